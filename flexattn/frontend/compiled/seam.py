"""Our lowerings of torch's node in Inductor: they are tried before torch's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from importlib import import_module
from types import CodeType
from typing import Any

import torch

from flexattn.errors import FlexAttnError
from flexattn.frontend.compiled.spec import INSTALLED, MARK, split_options
from flexattn.frontend.install import served
from flexattn.settings import say_once

NODE, BACKWARD_NODE = "flex_attention", "flex_attention_backward"
# What torch's lowering takes, in 2.11 and 2.13.
_TAKES = (
    "query", "key", "value", "subgraph", "block_mask", "scale", "kernel_options",
    "score_mod_other_buffers", "mask_mod_other_buffers",
)  # fmt: skip
_OPTIONS, _BACKWARD_OPTIONS = _TAKES.index("kernel_options"), 11


def open_seam() -> str:
    """Put our lowerings in front of torch's; returns why not where torch has moved them."""
    try:
        import_module("torch._inductor.kernel.flex")  # it registers torch's own
        from torch._inductor.lowering import lowerings

        from flexattn.frontend.compiled.lowering import (
            lower,
            lower_backward,
            with_lists_by_key,
        )
        from flexattn.frontend.compiled.op import lower_widened

        node, backward = (getattr(torch.ops.higher_order, name) for name in (NODE, BACKWARD_NODE))
        stock, stock_backward = lowerings[node], lowerings[backward]
        takes = tuple(inspect.signature(stock).parameters)
        if takes != _TAKES:
            raise LookupError(f"it takes {', '.join(takes)}")
    except (ImportError, AttributeError, LookupError) as error:
        why = f"torch {torch.__version__} has moved its lowering of flex_attention: {error}"
        say_once(f"{why}; under torch.compile, calls of flexattn break the graph")
        return why
    _let_floats_change()
    lowerings[torch.ops.flexattn.widened.default] = lower_widened
    lowerings[node] = _ours(stock, lower, _OPTIONS)
    lowerings[backward] = _ours(
        stock_backward, lower_backward, _BACKWARD_OPTIONS, with_lists_by_key
    )
    return ""


def _let_floats_change() -> None:
    """Let a captured Python float that changes have a backward, of which torch 2.13 loses track.

    Such a float is read from a tensor inside of the mod. torch traces the mod once more for its
    backward, and the fake value of that read, which nobody uses, ends the trace with
    PendingUnbackedSymbolNotFound.
    """
    # A torch that has moved these says so itself, where a float changes.
    with suppress(ImportError, AttributeError):
        module: Any = import_module("torch._higher_order_ops.flex_attention")
        fake_mode_of = import_module("torch._guards").detect_fake_mode
        create = module.create_fw_bw_graph

        @wraps(create)
        def created(score_mod: Any, index: Any, *rest: Any) -> Any:
            mode = fake_mode_of(index)
            if mode is None or mode.shape_env is None:
                return create(score_mod, index, *rest)
            with mode.shape_env.ignore_fresh_unbacked_symbols():
                return create(score_mod, index, *rest)

        module.create_fw_bw_graph = created


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


def _ours(
    stock: Callable[..., Any],
    lower: Callable[..., Any],
    at: int,
    for_torch: Callable[[Sequence[Any]], Sequence[Any]] = tuple,
) -> Callable[..., Any]:
    """A lowering of marked nodes; torch's templates see no key of ours, which they would print.

    at: where kernel_options stand. for_torch: what torch's own lowering takes of a marked node's
    arguments.
    """

    @wraps(stock)
    def lowering(*args: Any) -> Any:
        if MARK not in args[at]:
            served["torch: a node of another's"] += 1
            return stock(*args)
        theirs, ours = split_options(args[at])
        who = "flexattn: a node"
        try:
            found = lower(*args, options=ours)
        except FlexAttnError as why:
            if INSTALLED not in args[at]:
                raise
            found, who = None, f"torch: {why}"
        else:
            who = who if found is not None else "torch: a node it was left"
        served[who] += 1
        if found is not None:
            return found
        return stock(*for_torch((*args[:at], theirs, *args[at + 1 :])))

    return lowering
