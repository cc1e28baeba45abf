"""flexattn: attention as two small Python callables, at the speed of a hand-written kernel."""

from importlib import import_module
from typing import TYPE_CHECKING

from flexattn import settings  # first: it reads FLEXATTN_INTERPRET before triton is imported

if TYPE_CHECKING:
    from flexattn.public import *

__version__ = "0.2.0"

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "Explanation",
    "FlexKernelOptions",
    "Packed",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "explain",
    "flex_attention",
    "install",
    "noop_mask",
    "or_masks",
    "pack",
    "register_op",
    "uninstall",
    "visualize",
    "warm",
]


def __getattr__(name: str) -> object:
    """A public name or a folder, imported when it is first asked for.

    So the command line says --help without torch, which takes seconds to import.
    """
    if name in __all__:
        globals()[name] = found = getattr(import_module("flexattn.public"), name)
        return found
    try:
        return import_module(f"flexattn.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"flexattn.{name}":
            raise
    raise AttributeError(f"module 'flexattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
