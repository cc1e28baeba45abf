"""flexattn::attend_sequences and its backward: packed sequences as ops of compiled code.

`varlen_attn` in a graph is torch's node with a document mask, which whoever runs the node
attends by. The first tensors that its mask_mod captures, the marks, say which sequence a row is
of and where that begins. Kernels that read cu_seqlens know both: with the marks' values replaced,
the node's mods are those of positions in a sequence, and nobody reads the mask's lists.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexattn.frontend.attention import flex_attention
from flexattn.frontend.call import on_device
from flexattn.frontend.compiled.op import (
    as_own,
    define_op,
    empty_like,
    gradients_among,
    score_of,
    transforming,
)
from flexattn.frontend.compiled.spec import parsed
from flexattn.frontend.documents import Packing, document_mask
from flexattn.frontend.gradients import (
    AskedGradients,
    plan_backward,
    repeats_bits,
    run_backward,
)
from flexattn.frontend.packed import Pack, is_readable
from flexattn.frontend.varlen import heads_of
from flexattn.kernels.printers.torch_printer import mask_callable
from flexattn.mods import bind
from flexattn.mods.expr import Expr, const, walk
from flexattn.mods.graph import GraphMod
from flexattn.mods.refusal import Refusal
from flexattn.mods.simplify import make, rebuilt
from flexattn.mods.site import interned
from flexattn.runtime.backward import slots_of
from flexattn.runtime.launch import dense_strides
from flexattn.verify.first_use import Attended

# Places of the marks, as varlen.py orders them: cu_seqlens of rows and of keys, numbers of
# sequences, and where these begin. Where rows and keys have one table the first four are all.
CU_SEQLENS, SEQUENCE_NUMBERS, BEGINS = (0, 4), (1, 2, 6), (3, 5)


def in_sequences(
    mod: GraphMod, numbers: Collection[int], begins: Collection[int]
) -> tuple[GraphMod, list[int]]:
    """A node's mod as one of positions in a sequence, and the tensors that it still captures.

    numbers, begins: places of the captured tensors that have each row's sequence, and where it
    begins. With 0 as the beginning, positions count within a sequence, and b is its number.
    Raises Refusal for a mod that reads another tensor at a row's place in the pack.
    """
    b = Expr("var", "int64", (), "b")
    narrow = make("cast", "int32", (b,))

    def replace(node: Expr, args: Sequence[Expr]) -> Expr | None:
        # What a user's mod reads is at positions in a sequence, which are computed.
        bare = node.op == "load" and node.args and node.args[0].value in ("q_idx", "kv_idx")
        if bare and node.value in begins:
            return const(0, node.dtype)
        if bare and node.value in numbers:
            return make("cast", node.dtype, (b,))
        if bare:
            raise Refusal("reads a tensor at a row's place in the pack")
        # A number of 32 bits that is widened again.
        if node.op == "cast" and args[0] is narrow and node.dtype == "int64":
            return b
        return None

    expr = rebuilt(mod.mod.expr, replace)
    read = {int(node.value or 0) for node in walk(expr) if node.op == "load"}
    kept = sorted(read | {i for kind, i in mod.sources if kind == "tensor"})
    place = {old: new for new, old in enumerate(kept)}

    def moved(node: Expr, args: Sequence[Expr]) -> Expr | None:
        found = node.op == "load"
        return (
            Expr("load", node.dtype, tuple(args), place[int(node.value or 0)]) if found else None
        )

    sources = tuple((kind, place[i] if kind == "tensor" else i) for kind, i in mod.sources)
    buffers = tuple(mod.mod.buffers[i] for i in kept)
    made = interned(mod.mod.kind, rebuilt(expr, moved), buffers, mod.mod.scalars)
    return GraphMod(made, mod.numbers, sources), kept


def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """out [1, Hq, L, Ev], lse [1, Hq, L], natural log, and nothing, of q, k and v as one batch.

    rest: cu_seqlens int32 of rows and keys; what the mods capture, in the order of their graphs,
    with the integers beside it; what `printed` gave, and the scale. Mods are of positions in a
    sequence. Where no kernel of packs is right a document mask made here serves.
    """
    cu_q, cu_k = (x.contiguous() for x in rest[:2])
    with torch.no_grad(), transforming():
        rows = _rows(q), _rows(k), _rows(v)
        pack = _pack(rows, cu_q, cu_k, *rest[2:])
        found = None
        if is_readable(*rows, cu_q, cu_k, None):
            found = pack.attended(*rows, cu_q, cu_k, None, True)
        if found is not None:
            assert found.lse is not None
            out, sums = found.out, found.lse
        else:
            call = pack.as_documents(*rows)
            given = call.q, call.k, call.v, call.score_mod, call.block_mask, call.scale
            heads: Any = flex_attention(*given, enable_gqa=True, return_lse=True)
            out, sums = _rows(heads[0]), heads[1][0].T.contiguous()
    nothing = q.new_empty(0, dtype=torch.float32)
    return _placed(out.transpose(0, 1)[None], q), sums.T[None], nothing


def _placed(out: Tensor, q: Tensor) -> Tensor:
    """An output laid out as q is, as graphs have been told."""
    strides = dense_strides(q.stride(), tuple(out.shape))
    if out.stride()[1:] == strides[1:]:
        return out
    return torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device).copy_(out)


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*q.shape[:3], v.shape[3])
    sums = q.new_empty((q.shape[2], q.shape[1]), dtype=torch.float32)
    out = q.new_empty_strided(shape, dense_strides(q.stride(), shape))
    return out, sums.T[None], q.new_empty(0, dtype=torch.float32)


def _attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    *rest: Any,
) -> list[Tensor]:
    """Gradients of q, k, v and what the spec names of score; dout and dlse: of out and lse.

    out, lse: of `_attend`. rest: as of `_attend`.
    """
    wanted = parsed(rest[-2]).grads
    score = list(rest[2])
    for i in wanted:
        score[i] = score[i].detach().to(q.device).resolve_neg().requires_grad_()
    learned = [score[i] for i in wanted]
    cu_q, cu_k = (x.contiguous() for x in rest[:2])
    with torch.no_grad(), transforming():
        rows = _rows(q), _rows(k), _rows(v)
        pack = _pack(rows, cu_q, cu_k, score, *rest[3:])
        grads = None if dout is None else _rows(dout.resolve_neg()), dlse
        if is_readable(*rows, cu_q, cu_k, None) and pack.has_gradients(*rows, len(cu_q) - 1):
            found = pack.gradients(rows, (_rows(out), lse), grads, cu_q, cu_k)
            first = [x.transpose(0, 1)[None] for x in found[:3]]
            slots = pack.learned()
        else:
            call = pack.as_documents(*rows)
            assert call.block_mask is not None
            bound = bind(call.score_mod, "score", q.device)
            asked = AskedGradients(
                bound, bind(call.block_mask.mask_mod, "mask", q.device), call.block_mask,
                call.scale, parsed(rest[-2]).chosen, slots_of(bound),
            )  # fmt: skip
            slots = [] if bound is None else [bound.tensors[slot] for slot in asked.slots]
            inputs, grads = (call.q, call.k, call.v), (dout, dlse)
            planned = partial(plan_backward, asked)
            found = run_backward(
                planned, inputs, out, lse, grads, call.scale, slots, lambda: asked
            )
            first = [*found[:3]]
    captured = gradients_among(slots, found.captured, learned)
    own = map(as_own, captured, (rest[2][i] for i in wanted))
    return [*first, *own]


def _fake_backward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    score = rest[6]  # behind out, lse, their gradients, and cu_seqlens of both
    captured = [score[i].new_empty(score[i].shape) for i in parsed(rest[-2]).grads]
    return [*map(empty_like, (q, k, v)), *captured]


def _rows(x: Tensor) -> Tensor:
    """One batch [1, heads, rows, D] as a pack [rows, heads, D]."""
    return x.resolve_neg()[0].transpose(0, 1)


def _pack(
    rows: tuple[Tensor, Tensor, Tensor], cu_q: Tensor, cu_k: Tensor, score: Sequence[Tensor],
    mask: Sequence[Tensor], score_integers: Sequence[int], mask_integers: Sequence[int],
    spec: str, scale: float,
) -> Pack:  # fmt: skip
    said = parsed(spec)
    bound, score_mod = score_of(said, rows[0], score, score_integers)
    kept = None
    if said.mask is not None:
        kept = on_device(said.mask.bound(mask, mask_integers), rows[0])

    def as_documents(q: Tensor, k: Tensor, v: Tensor) -> Attended:
        packing = Packing(cu_q, cu_k, q.shape[0], k.shape[0], -1, -1, mask_callable(kept))
        block_mask, positions = document_mask(packing)
        score = score_mod and positions.score_mod(score_mod)
        return Attended(*heads_of(q, k, v), scale, score, block_mask)

    in_order = repeats_bits(said.chosen)
    return Pack(bound, kept, scale, as_documents, in_order, slots_of(bound))


_QKV = "Tensor q, Tensor k, Tensor v"
_MODS = (
    "Tensor cu_q, Tensor cu_k, Tensor[] score, Tensor[] mask, SymInt[] score_integers, "
    "SymInt[] mask_integers, str spec, float scale"
)
SEQUENCES_OP = define_op(
    f"attend_sequences({_QKV}, {_MODS}) -> (Tensor, Tensor, Tensor)", _attend, _fake
)
SEQUENCES_BACKWARD_OP = define_op(
    f"attend_sequences_backward({_QKV}, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, "
    f"{_MODS}) -> Tensor[]",
    _attend_backward,
    _fake_backward,
)
