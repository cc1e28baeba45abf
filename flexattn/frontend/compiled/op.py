"""flexattn::attend: the op that stands for a call in compiled code, and runs it as eager does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.lazy import lazy_mask
from flexattn.frontend.attention import run_admitted
from flexattn.frontend.call import Call
from flexattn.frontend.compiled.looks import remember_look
from flexattn.frontend.compiled.spec import Spec, parsed
from flexattn.kernels.printers.torch_printer import mask_callable, score_callable
from flexattn.mods import Bound
from flexattn.mods.graph import GraphMod
from flexattn.mods.signatures import ScoreMod
from flexattn.problem import checks, out_dtype
from flexattn.runtime.layout import dense_strides

OP_NAME = "flexattn::attend"
_SCHEMA = (
    "attend(Tensor q, Tensor k, Tensor v, Tensor[] lists, Tensor[] score, Tensor[] mask, "
    "SymInt[] score_integers, SymInt[] mask_integers, str spec, float scale, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None) "
    "-> (Tensor, Tensor, Tensor)"
)
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
library.define(_SCHEMA)


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


library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake(OP_NAME, _fake, lib=library)


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
    bound = _on(q, said.score, tensors, integers)
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
    bound = _on(q, said.mask, tensors, integers)
    mask_mod = mask_callable(bound)
    assert mask_mod is not None
    mask = lazy_mask(tuple(lists), said.block, mask_mod, (q.shape[2], k.shape[2]))
    checks.check_block_mask(mask, q, k)
    remember_look(mask, lists, said)
    return bound, mask


def _on(q: Tensor, mod: GraphMod, tensors: Sequence[Tensor], integers: Sequence[int]) -> Bound:
    """The bound mod, its tensors on q's device with negative bits resolved."""
    bound = mod.bound(tensors, integers)
    if all(x.device == q.device and not x.is_neg() for x in bound.tensors):
        return bound
    there = tuple(x.to(q.device).resolve_neg() for x in bound.tensors)
    return bound._replace(tensors=there)
