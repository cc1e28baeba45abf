"""flexattn::attend and attend_backward: a call, and its gradients, as ops of compiled code.

They run it as eager code does.

What was found in the lists of a mask serves later calls of the op that are given the same lists.
flexattn::widened is what torch's node is given for inputs that it has no place for: an input of
eight bits with its factors, or a key narrower than its query, is converted in the graph to the
dtype of the output. Our lowering finds the input itself behind that, and nobody computes the
conversion; wherever torch's node is run by others it is what they attend to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, reduce
from operator import is_, or_
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.lists import lazy_mask, transposed
from flexattn.frontend.attention import route_of, run_admitted
from flexattn.frontend.call import Call, on_device
from flexattn.frontend.compiled.spec import Spec, parsed
from flexattn.frontend.gradients import (
    AskedGradients,
    by_autograd,
    plan_backward,
    run_backward,
    zeros_of,
)
from flexattn.kernels.printers.torch_printer import mask_callable, score_callable
from flexattn.mods import Bound
from flexattn.mods.expr import ScoreMod
from flexattn.problem import checks, out_dtype
from flexattn.problem.mask_lists import keep_class, keep_runs, known_class, known_runs, mask_class
from flexattn.problem.problem import NARROWER
from flexattn.runtime.backward import like, slots_among
from flexattn.runtime.key_lists import BothLists, has_more_rows, keep_by_key, made_by_key
from flexattn.runtime.launch import Lists, dense_strides

# The body of an op is called without autograd's keys, and where a dispatch mode is on, as in
# Inductor's first run of an op, without those of torch.vmap, by which plain torch maps the mods.
_KEYS = reduce(
    or_,
    (
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
        for name in (
            "FuncTorchBatched", "FuncTorchVmapMode", "FuncTorchDynamicLayerFrontMode",
            "FuncTorchDynamicLayerBackMode", "AutogradCPU", "AutogradFunctionality",
        )
    ),
)  # fmt: skip
library = torch.library.Library("flexattn", "FRAGMENT")


def define_op(
    schema: str, run: Callable[..., Any], shapes: Callable[..., Any], *tags: torch.Tag
) -> Any:
    """An op of this library. run: its body. shapes: empty results, for tensors without values."""
    name = schema.partition("(")[0]
    library.define(schema, tags=tags)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flexattn::{name}", shapes, lib=library)
    return getattr(torch.ops.flexattn, name).default


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Sequence[Tensor],
    score: Sequence[Tensor],
    mask: Sequence[Tensor],
    score_integers: Sequence[int],
    mask_integers: Sequence[int],
    spec: str,
    scale: float,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of q [B, Hq, L, E], k [B or 1, Hkv, S, E], v [B or 1, Hkv, S, Ev].

    lists: of blocks, none, two or four as a BlockMask has them by query. score, mask: what the
    mods capture, in the order of their graphs, with the integers beside it. spec: what `printed`
    gave. Returns out, lse and max_scores (float32, natural log); what is not asked is empty.
    Raises what an eager call raises when it is launched.
    """
    said = parsed(spec)
    checks.check_tensors(q, k, v, enable_gqa=True)
    factors = (None if x is None else x.resolve_neg() for x in (q_descale, k_descale, v_descale))
    of_q, of_k, of_v = factors
    with torch.no_grad(), transforming():
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
        bound, score_mod = score_of(said, q, score, score_integers)
        kept, block_mask = mask_of(said, q, k, lists, mask, mask_integers)
        found = run_admitted(Call(
            q, k, v, score_mod, block_mask, checks.check_scale(scale, q.shape[3]), True, False,
            said.options, said.statistics, None, of_q, of_k, of_v, 0.0, bound, kept, said.chosen,
        ))  # fmt: skip
    nothing = partial(q.new_empty, 0, dtype=torch.float32)
    lse, maxima = found.lse, found.max_scores
    return found.out, nothing() if lse is None else lse, nothing() if maxima is None else maxima


def _fake(
    q: Tensor, k: Tensor, v: Tensor, lists: Any, score: Any, mask: Any, score_integers: Any,
    mask_integers: Any, spec: str, scale: float, *descales: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    said, rows = parsed(spec), q.shape[:3]
    shape = (*rows, v.shape[3])
    strides = dense_strides(q.stride(), shape)
    out = q.new_empty_strided(shape, strides, dtype=out_dtype(q.dtype))
    lse, maxima = (
        q.new_empty(rows if asked else (0,), dtype=torch.float32)
        for asked in (said.lse, said.max_scores)
    )
    return out, lse, maxima


ATTEND_OP = define_op(
    "attend(Tensor q, Tensor k, Tensor v, Tensor[] lists, Tensor[] score, Tensor[] mask, "
    "SymInt[] score_integers, SymInt[] mask_integers, str spec, float scale, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None) "
    "-> (Tensor, Tensor, Tensor)",
    _attend,
    _fake,
)


def transforming() -> AbstractContextManager[None]:
    """Lets torch.vmap and autograd work inside of the op."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    guard: Any = torch._C._ForceDispatchKeyGuard
    return guard(included, excluded - _KEYS)  # type: ignore[no-any-return]


def score_of(
    said: Spec, q: Tensor, tensors: Sequence[Tensor], integers: Sequence[int]
) -> tuple[Bound | None, ScoreMod | None]:
    """The score_mod as kernels and as plain torch take it; an identity is none."""
    if said.score is None or said.score.mod.expr.op == "var":
        return None, None
    bound = on_device(said.score.bound(tensors, integers), q)
    return bound, score_callable(bound)


def mask_of(
    said: Spec,
    q: Tensor,
    k: Tensor,
    lists: Sequence[Tensor],
    tensors: Sequence[Tensor],
    integers: Sequence[int],
) -> tuple[Bound | None, BlockMask | None]:
    """The mask_mod as kernels take it, and the BlockMask; what was found in it before is kept."""
    if said.mask is None or said.block is None:
        return None, None
    bound = on_device(said.mask.bound(tensors, integers), q)
    mask_mod = mask_callable(bound)
    assert mask_mod is not None
    mask = lazy_mask(tuple(lists), said.block, mask_mod, (q.shape[2], k.shape[2]))
    checks.check_block_mask(mask, q, k)
    remember_look(mask, lists, said)
    return bound, mask


@dataclass(slots=True)
class _Look:
    """The result of reading lists, and how often they had been written to. The first one has it.

    others: the lists behind the first. by_key: the same lists by key, once a backward asked for
    them, and what they were made for.
    """

    others: list[weakref.ref[Tensor]]
    written: tuple[tuple[int, int], ...]
    name: str
    runs: Tensor | None
    by_key: tuple[Any, Lists] | None = None


_LOOK = "_flexattn_look"


def remember_look(mask: BlockMask, lists: Sequence[Tensor], said: Spec) -> None:
    """Give a mask the class and the runs of its lists, which reading them would take a wait.

    As with an eager call's mask one look serves for as long as the lists live, and what is written
    into them later leaves them without runs. Code that Inductor generates writes into memory that
    no version counts, and a captured CUDA graph into its inputs: such lists are not looked at. A
    backward cannot tell who made what it was saved: it takes what its forward saw, or nothing.
    """
    found = _known(lists) if said.looks else None
    if found is not None:
        keep_class(mask, found.name)
        if found.runs is not None and found.written == _written(lists):
            keep_runs(mask, found.runs)
    elif not said.looks or said.backward:
        keep_class(mask)
    else:
        mask_class(mask)
        name = known_class(mask)
        if name is not None:
            others = [*map(weakref.ref, lists[1:])]
            setattr(lists[0], _LOOK, _Look(others, _written(lists), name, known_runs(mask)))


def remember_by_key(mask: BlockMask, lists: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Give a mask its lists by key: those that a graph has, or those kept with its look.

    given: nothing where nobody has made them. Kept are those of masks with runs, which given lists
    do not say, and those that nobody has made: once for all calls with the same lists by query.
    Given lists of a mask that was made shorter name rows that there are not: others are made.
    """
    found = _known(lists)
    if given and not has_more_rows(mask) and (known_runs(mask) is None or found is None):
        num, idx, *full = given
        keep_by_key(mask, Lists.made((num, idx, *(full or (None, None)))))
        return
    if found is None or any(x.is_inference() for x in lists):
        # Of lists that live as long as this call nothing is kept, and nobody waits for them.
        keep_by_key(mask, made_by_key(mask, Lists.of(mask)))
        return
    made_for = _written(lists), tuple(mask.seq_lengths), tuple(mask.BLOCK_SIZE)
    if found.by_key is not None and found.by_key[0] == made_for:
        keep_by_key(mask, found.by_key[1])
        return
    by_key = BothLists.of(mask).by_key
    # A captured graph writes its own each time it is replayed, into memory of its own.
    if not (lists[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        found.by_key = made_for, by_key


def _known(lists: Sequence[Tensor]) -> _Look | None:
    found: _Look | None = getattr(lists[0], _LOOK, None)
    others = [] if found is None else [there() for there in found.others]
    same = len(others) == len(lists) - 1 and all(map(is_, others, lists[1:]))
    return found if same else None


def _written(lists: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    # Tensors of inference mode do not count, and have no runs.
    return tuple((0 if x.is_inference() else x._version, x.data_ptr()) for x in lists)


# Where the lowering of an op keeps what it was given.
_SOURCE = "_flexattn_source"


def _widened(x: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    if factor is None:
        return x.to(dtype)
    return (x.to(torch.float32) * factor[..., None, None]).to(dtype)


WIDENED_OP = define_op(
    "widened(Tensor x, Tensor? factor, ScalarType dtype) -> Tensor", _widened, _widened
)


def widened(x: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [B, H, S, D] times factor [B, H], where there is one, in a wider dtype."""
    found: Tensor = torch.ops.flexattn.widened(x, factor, dtype)
    return found


def lower_widened(x: Any, factor: Any, dtype: torch.dtype) -> Any:
    """The conversion in Inductor's program, which is left out where nobody asks for it."""
    from torch._inductor.lowering import lowerings, to_dtype

    if factor is None:
        found = to_dtype(x, dtype, copy=True)
    else:
        each = factor
        for _ in range(2):
            each = lowerings[torch.ops.aten.unsqueeze.default](each, -1)
        product = lowerings[torch.ops.aten.mul.Tensor](to_dtype(x, torch.float32), each)
        found = to_dtype(product, dtype, copy=True)
    setattr(found, _SOURCE, (x, factor))
    return found


def widened_sources(given: Any, nodes: Any) -> list[tuple[Any, Any, Any]]:
    """The input itself, its node, and its factor, for each of query, key and value.

    given, nodes: as a lowering of torch's node has them.
    """
    found = [(x, node, None) for x, node in zip(given, nodes, strict=True)]
    for i, (x, node, _) in enumerate(found):
        if getattr(node, "target", None) is WIDENED_OP and hasattr(x, _SOURCE):
            source, factor = getattr(x, _SOURCE)
            found[i] = source, node.args[0], factor
    q, k, v = (x.get_dtype() for x, _, _ in found)
    # What was copied or converted between has lost its source: then none is taken.
    fits = k == v and (q == k or k in NARROWER.get(q, ()))
    return found if fits else [(x, node, None) for x, node in zip(given, nodes, strict=True)]


_TAKES = (
    "Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dout, "
    "Tensor? dlse, Tensor[] lists, Tensor[] by_key, Tensor[] score, Tensor[] mask, "
    "SymInt[] score_integers, SymInt[] mask_integers, str spec, float scale"
)
_Found = tuple[Tensor, Tensor, Tensor, list[Tensor]]


def _attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    lists: Sequence[Tensor],
    by_key: Sequence[Tensor],
    score: Sequence[Tensor],
    mask: Sequence[Tensor],
    score_integers: Sequence[int],
    mask_integers: Sequence[int],
    spec: str,
    scale: float,
) -> _Found:
    """Gradients of q, k, v and of those tensors in score that the spec names.

    out, lse: of `attend` (lse in natural log). dout, dlse: their gradients, None where nothing
    depends on one. lists, by_key: of blocks, as a BlockMask has them by query and by key; no
    by_key where they are to be made here.
    """
    said = parsed(spec)
    scale = checks.check_scale(scale, q.shape[3])
    wanted = [score[i] for i in said.grads]
    if not out.numel() or not k.numel():
        dq, dk, dv = (like(x).zero_() for x in (q, k, v))
        return dq, dk, dv, list(map(zeros_of, wanted))
    with torch.no_grad(), transforming():
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
        leaves = list(score)
        for i in said.grads:
            leaves[i] = score[i].detach().to(q.device).resolve_neg().requires_grad_()
        bound, score_mod = score_of(said, q, leaves, score_integers)
        kept, block_mask = mask_of(said, q, k, lists, mask, mask_integers)
        call = Call(q, k, v, score_mod, block_mask, scale, score=bound, mask=kept)
        grads = [leaves[i] for i in said.grads]
        if route_of(call)[0] == "reference":
            found = by_autograd(call[:3], score_mod, block_mask, scale, grads, (dout, dlse))
        else:
            if block_mask is not None:
                remember_by_key(block_mask, lists, by_key)
            found = _by_kernel(call, said, block_mask, grads, out, lse, dout, dlse)
    captured = [
        x.to(own.device, own.dtype).contiguous() for x, own in zip(found[3], wanted, strict=True)
    ]
    return (*found[:3], captured)


def _by_kernel(
    call: Call, said: Spec, block_mask: BlockMask | None, grads: Sequence[Tensor], out: Tensor,
    lse: Tensor, dout: Tensor | None, dlse: Tensor | None,
) -> _Found:  # fmt: skip
    tensors = () if call.score is None else call.score.tensors
    # A number that changes may have left a tensor out of the expression.
    slots = slots_among(tensors, grads)
    asked = AskedGradients(call.score, call.mask, block_mask, call.scale, said.chosen, slots)
    learned = [tensors[slot] for slot in slots]
    found = run_backward(
        partial(plan_backward, asked), call[:3], out, lse, (dout, dlse), call.scale, learned,
        lambda: asked,
    )  # fmt: skip
    by_tensor = dict(zip(map(id, learned), found.captured, strict=True))
    captured = [by_tensor[id(x)] if id(x) in by_tensor else zeros_of(x) for x in grads]
    return found.dq, found.dk, found.dv, captured


def _fake_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, dout: Any, dlse: Any, lists: Any,
    by_key: Any, score: Sequence[Tensor], mask: Any, score_integers: Any, mask_integers: Any,
    spec: str, scale: float,
) -> _Found:  # fmt: skip
    dq, dk, dv = map(empty_like, (q, k, v))
    return dq, dk, dv, [score[i].new_empty(score[i].shape) for i in parsed(spec).grads]


def empty_like(x: Tensor) -> Tensor:
    """Memory for a gradient of a tensor without values, as `like` lays one out."""
    return x.new_empty_strided(x.shape, dense_strides(x.stride(), tuple(x.shape)))


def _fake_by_key(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    *batch, rows, columns = indices.shape
    return counts.new_empty([*batch, columns]), indices.new_empty([*batch, columns, rows])


BACKWARD_OP = define_op(
    f"attend_backward({_TAKES}) -> (Tensor, Tensor, Tensor, Tensor[])",
    _attend_backward,
    _fake_backward,
)
BY_KEY_OP = define_op(
    "lists_by_key(Tensor counts, Tensor indices) -> (Tensor, Tensor)", transposed, _fake_by_key
)
