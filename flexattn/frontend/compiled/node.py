"""traced(): what Dynamo sees of a call, which is torch's own node with a mark in its options.

Dynamo traces the mods and guards all that they read, as it does for torch's flex_attention. A mod
that were read here, from its closure, would be guarded by nothing: a number that it captures could
change, and the old kernel would go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, noop_mask

from flexattn.block_mask.lists import lists_pending
from flexattn.frontend.attention import answer
from flexattn.frontend.call import Call, autocast
from flexattn.frontend.compiled.op import widened
from flexattn.frontend.compiled.seam import keep_out, open_seam
from flexattn.frontend.compiled.spec import (
    BARE,
    INSTALLED,
    LARGEST_SIZE,
    MARK,
    VERSION,
    asked_statistics,
    breaks,
    own,
)
from flexattn.frontend.install import torch_own
from flexattn.frontend.packed import PACK_MARKS
from flexattn.kernels.choose import options
from flexattn.mods.expr import ScoreMod
from flexattn.problem import out_dtype
from flexattn.problem.inputs import add_sinks

# A torch whose lowering has moved: calls break the graph, as they would without a node.
_MOVED = open_seam()
keep_out(answer.__code__)


def traced(arguments: tuple[Any, ...]) -> Any:
    """A call's results in a graph that is being traced."""
    # torch 2.11 cannot trace a default of a class of ours.
    make: Any = Call
    given = make(*arguments, options=None)
    found = node_of(given)
    if found is not None:
        return found
    asked = arguments[8]
    if asked is not None and PACK_MARKS in asked:  # they are of a node alone
        asked = {key: value for key, value in asked.items() if key != PACK_MARKS}
        arguments = (*arguments[:8], asked or None, *arguments[9:])
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
        if name != PACK_MARKS:
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
