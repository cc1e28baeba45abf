"""Where Inductor asks what torch's node becomes: our lowerings stand in front of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, wraps
from importlib import import_module
from types import CodeType
from typing import Any

import torch

from flexattn.frontend.compiled.mark import MARK, split
from flexattn.settings import say_once

NODE, BACKWARD = "flex_attention", "flex_attention_backward"
# What torch's lowering takes, in 2.11 and 2.13.
_TAKES = (
    "query", "key", "value", "subgraph", "block_mask", "scale", "kernel_options",
    "score_mod_other_buffers", "mask_mod_other_buffers",
)  # fmt: skip
_OPTIONS = _TAKES.index("kernel_options")


@lru_cache(maxsize=1)
def open_seam() -> str:
    """Put our lowerings in front of torch's, once; returns why not where torch has moved them."""
    try:
        import_module("torch._inductor.kernel.flex")  # it registers torch's own
        from torch._inductor.lowering import lowerings

        from flexattn.frontend.compiled.lowering import lower

        node, backward = (getattr(torch.ops.higher_order, name) for name in (NODE, BACKWARD))
        stock, stock_backward = lowerings[node], lowerings[backward]
        takes = tuple(inspect.signature(stock).parameters)
        if takes != _TAKES:
            raise LookupError(f"it takes {', '.join(takes)}")
    except (ImportError, AttributeError, LookupError) as error:
        why = f"torch {torch.__version__} has moved its lowering of flex_attention: {error}"
        say_once(f"{why}; under torch.compile, calls of flexattn break the graph")
        return why
    lowerings[node] = _ours(stock, lower)
    lowerings[backward] = _unmarked(stock_backward)
    return ""


def keep_out(code: CodeType) -> None:
    """Keep Dynamo out of a function and of all that it calls, where no graph holds the call.

    Where Dynamo gives a call up it runs it, and would compile each function of ours by itself.
    """
    # A torch that has moved these traces more than it must, and computes the same.
    with suppress(ImportError, AttributeError, TypeError):
        types: Any = import_module("torch._dynamo.types")
        frames: Any = import_module("torch._dynamo.eval_frame")
        skip = types.FrameAction.SKIP
        frames.set_code_exec_strategy(code, types.FrameExecStrategy(skip, skip))


def _ours(stock: Callable[..., Any], lower: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def lowering(*args: Any) -> Any:
        given = args[_OPTIONS]
        if MARK not in given:
            return stock(*args)
        theirs, ours = split(given)
        found = lower(*args, options=ours)
        return stock(*args[:_OPTIONS], theirs, *args[_OPTIONS + 1 :]) if found is None else found

    return lowering


def _unmarked(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering that does not show torch's templates our keys, which they would print."""

    @wraps(stock)
    def lowering(*args: Any) -> Any:
        return stock(*(split(x)[0] if isinstance(x, dict) and MARK in x else x for x in args))

    return lowering
