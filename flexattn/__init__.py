"""flexattn: attention as two small Python callables, at the speed of a hand-written kernel.

    out = flex_attention(q, k, v, score_mod=my_score, block_mask=create_block_mask(my_mask, ...))

Stable, changed only with a new minor version and a line in CHANGELOG.md: all names listed here,
`flexattn.catalogue`, and `flexattn.serving` (DecodePlan, CascadePlan, TreePlan, flex_decode, ...);
the environment variables and the verbs of the command line; the names in `kernel_options`.

- attention: flex_attention, AuxRequest, AuxOutput, FlexKernelOptions, ScoreMod, MaskMod
- of packed sequences: varlen_attn; nested tensors: pack, Packed
- keys that data choose: Selection
- inputs of eight bits: quantize, Quantized
- masks: create_block_mask, BlockMask, and_masks, or_masks, noop_mask, create_mask, visualize
- what runs, and why: explain, Explanation
- is it faster for my call, and which config is fastest: bench, tune
- torch's own function served by this library: install, uninstall
- compiled before the first call: warm; other operators in mods: register_op

AuxRequest, AuxOutput, BlockMask, FlexKernelOptions, and_masks, or_masks, noop_mask and create_mask
are torch's own. Everything else, each module that is not named here among it, may change in any
release: configs, records' schema, templates and what `explain` prints.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from flexattn import settings  # first: it reads FLEXATTN_INTERPRET before triton is imported

if TYPE_CHECKING:
    from flexattn.block_mask.visual import visualize
    from flexattn.cli.in_python import bench, tune
    from flexattn.deploy.warm import warm
    from flexattn.frontend.explain import Explanation, explain
    from flexattn.frontend.install import install, uninstall
    from flexattn.frontend.nested import Packed, pack
    from flexattn.frontend.quantize import Quantized, quantize
    from flexattn.frontend.selection import Selection
    from flexattn.frontend.varlen import varlen_attn
    from flexattn.public import *

# The modules of names that no call of flex_attention needs.
_APART = {
    **dict.fromkeys(("bench", "tune"), "flexattn.cli.in_python"),
    **dict.fromkeys(("Explanation", "explain"), "flexattn.frontend.explain"),
    **dict.fromkeys(("install", "uninstall"), "flexattn.frontend.install"),
    **dict.fromkeys(("Packed", "pack"), "flexattn.frontend.nested"),
    "Selection": "flexattn.frontend.selection",
    **dict.fromkeys(("Quantized", "quantize"), "flexattn.frontend.quantize"),
    "varlen_attn": "flexattn.frontend.varlen",
    "visualize": "flexattn.block_mask.visual",
    "warm": "flexattn.deploy.warm",
}
__version__ = "0.3.0"

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "Explanation",
    "FlexKernelOptions",
    "MaskMod",
    "Packed",
    "Quantized",
    "ScoreMod",
    "Selection",
    "and_masks",
    "bench",
    "create_block_mask",
    "create_mask",
    "explain",
    "flex_attention",
    "install",
    "noop_mask",
    "or_masks",
    "pack",
    "quantize",
    "register_op",
    "tune",
    "uninstall",
    "varlen_attn",
    "visualize",
    "warm",
]


def __getattr__(name: str) -> object:
    """A public name or a folder, imported when it is first asked for.

    So the command line says --help without torch, which takes seconds to import.
    """
    if name in __all__:
        # Of `warm`, too: what a first call imports belongs before the traffic.
        public = import_module("flexattn.public")
        found = getattr(import_module(_APART[name]) if name in _APART else public, name)
        globals()[name] = found
        return found
    try:
        return import_module(f"flexattn.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"flexattn.{name}":
            raise
    raise AttributeError(f"module 'flexattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
