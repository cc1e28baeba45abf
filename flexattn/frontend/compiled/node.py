"""A call as torch's own node of a graph, and our lowerings of it, tried before torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from importlib import import_module
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, noop_mask

from flexattn.block_mask.lists import lists_pending
from flexattn.errors import FlexAttnError
from flexattn.frontend.attention import answer
from flexattn.frontend.call import Call, autocast
from flexattn.frontend.compiled.joint import marked
from flexattn.frontend.compiled.op import widened
from flexattn.frontend.compiled.spec import (
    BARE,
    INSTALLED,
    LARGEST_SIZE,
    MARK,
    VERSION,
    asked_statistics,
    breaks,
    own,
    split_options,
)
from flexattn.frontend.install import served, torch_own
from flexattn.kernels.choose import options
from flexattn.mods.expr import ScoreMod
from flexattn.problem import out_dtype
from flexattn.problem.inputs import add_sinks
from flexattn.settings import say_once


def traced(arguments: tuple[Any, ...]) -> Any:
    """A call's results in a graph that is being traced."""
    # torch 2.11 cannot trace a default of a class of ours.
    make: Any = Call
    given = make(*arguments, options=None)
    found = node_of(given)
    if found is not None:
        return found
    return outside(answer, arguments)


def node_of(given: Call, installed: bool = False) -> Any:
    """The same of a call as it was given; None where it is no node.

    installed: it is a call of torch's own function, which torch keeps where we refuse it.
    """
    if _MOVED or breaks(given):
        return None
    want, sinks, mask = asked_statistics(given), given.sinks, given.block_mask
    q, k, v = _taken(given)
    score_mod = given.score_mod
    if score_mod is not None and q.dtype != torch.float64:
        score_mod = _in_float32(score_mod)
    out, aux = torch_own(
        q, k, v, score_mod, _of_all(q) if mask is None else _with_lists_by_key(mask),
        None if given.scale is None else float(given.scale), given.enable_gqa,
        kernel_options=_marked(given, installed),
        return_aux=AuxRequest(want.lse or sinks is not None, want.max_scores),
    )  # fmt: skip
    lse = aux.lse
    if sinks is not None:
        # torch's node knows no sinks: what they take from a row follows from its lse alone.
        out, lse = add_sinks(out, lse, sinks)
    if given.return_aux is not None:
        return out, AuxOutput(lse=lse if want.lse else None, max_scores=aux.max_scores)
    return (out, lse) if given.return_lse else out


def _taken(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as torch's node takes them: of one dtype, and of one batch."""
    q, k, v = autocast(call.q, call.k, call.v)
    of_k, of_v = call.k_descale, call.v_descale
    if k.size(0) != q.size(0):
        k, v = k.expand(q.size(0), -1, -1, -1), v.expand(q.size(0), -1, -1, -1)
        of_k, of_v = (x if x is None else x.expand(q.size(0), -1) for x in (of_k, of_v))
    dtype = out_dtype(q.dtype)
    if k.dtype != dtype:
        k, v = widened(k, of_k, dtype), widened(v, of_v, dtype)
    return (q if q.dtype == dtype else widened(q, call.q_descale, dtype)), k, v


def _marked(call: Call, installed: bool) -> dict[str, Any]:
    """torch's options for where its own kernel serves, and the call's under our mark."""
    given = call.kernel_options
    found = dict(options.for_torch(given) or {})
    if found.get("BACKEND") == "FLASH":  # whose statistics are not in base 2
        del found["BACKEND"]
    found[MARK] = VERSION
    if call.block_mask is None:
        found[BARE] = True
    if installed:
        found[INSTALLED] = True
    for name, value in (given or {}).items():
        found[own(name)] = value
    return found


def _in_float32(score_mod: ScoreMod) -> ScoreMod:
    """A score_mod that sees scores in float32, as kernels have them, whatever query's dtype."""

    def wide(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score.to(torch.float32), b, h, q_idx, kv_idx)

    return wide


def _of_all(q: Tensor) -> BlockMask:
    """The mask that torch would make of no mask, in fewer operations."""
    one = torch.ones([1, 1, 1], dtype=torch.int32, device=q.device)
    first = torch.zeros([1, 1, 1, 1], dtype=torch.int32, device=q.device)
    lists = one, first, None, None
    return BlockMask((1, 1), *lists, *lists, (LARGEST_SIZE, LARGEST_SIZE), noop_mask)


def _with_lists_by_key(mask: BlockMask) -> BlockMask:
    """A mask that torch takes for one with lists by key, which a backward is to be given.

    Lists that are not there yet are made outside of the graph, where our backward first reads
    them, or in torch's own backward. Those by query stand for them: torch asks for some, and lists
    that were kept with the mask would be another mask to the guards of the next call.
    """
    if not lists_pending(mask):
        return mask
    lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    by_key = lists if torch.is_grad_enabled() else (None,) * 4
    make: Any = BlockMask
    made: BlockMask = make(mask.seq_lengths, *lists, *by_key, mask.BLOCK_SIZE, mask.mask_mod)
    return made


# torch.export and fullgraph=True, which take no break, print the reason.
@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="torch's node of flex_attention has no place for all of this call: "
    "flexattn.explain of the same arguments says for what"
)
def outside(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call fn with the arguments, as if nothing were compiled; breaks a graph being traced."""
    return fn(*args, **kwargs)


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

        from flexattn.frontend.compiled.joint import TRACED_OP
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
    _mark_graphs()
    lowerings[TRACED_OP] = lambda score, whole: score
    lowerings[torch.ops.flexattn.widened.default] = lower_widened
    lowerings[node] = _ours(stock, lower, _OPTIONS)
    lowerings[backward] = _ours(
        stock_backward, lower_backward, _BACKWARD_OPTIONS, with_lists_by_key
    )
    return ""


def _mark_graphs() -> None:
    """Mark score_mods where torch traces them for a backward (joint.py).

    A captured Python float that changes is read from a tensor inside of the mod. torch 2.13 traces
    the mod once more for its backward, and the fake value of that read, which nobody uses, ends
    the trace with PendingUnbackedSymbolNotFound: it is let be.
    """
    # Where torch has moved these, nothing is marked, and its own backward serves.
    with suppress(ImportError, AttributeError):
        module: Any = import_module("torch._higher_order_ops.flex_attention")
        fake_mode_of = import_module("torch._guards").detect_fake_mode
        create = module.create_fw_bw_graph

        @wraps(create)
        def created(score_mod: Any, index: Any, *rest: Any) -> Any:
            score_mod, mode = marked(score_mod), fake_mode_of(index)
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


# A torch whose lowering has moved: calls break the graph, as they would without a node.
_MOVED = open_seam()
keep_out(answer.__code__)
