"""An AppendPlan is verified when it is built, by a run on made-up tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexattn.device import Device
from flexattn.errors import WrongKernelError
from flexattn.kernels.base.source import Source
from flexattn.reference.cache_append import MAX_FINITE, appended
from flexattn.runtime.fallback.outcome import Outcome
from flexattn.serving.rope import Rope
from flexattn.serving.scales import scales_shape
from flexattn.verify.first_use import LaunchedKernels, accepted, due
from flexattn.verify.gate import ErrorRow, Verdict
from flexattn.verify.made_up import apart
from flexattn.verify.samples import Unjudged

if TYPE_CHECKING:
    from flexattn.serving.append import AppendPlan

_TOKENS = 11
_PAGES = 5
_ELEMENTS = 2**24


def check_append(
    plan: AppendPlan, source: Source, target: Device, scaled: Any, rope: Rope | None
) -> None:
    """Raise WrongKernelError unless a new plan's kernel is verified, or stores what torch does."""
    title = f"append for {plan.append}"
    subject = LaunchedKernels(
        (source,), target, lambda: (title, "its one kernel"), Outcome("built")
    )
    if due(subject) and not accepted(subject, lambda: _judge(plan, scaled, rope)):
        raise WrongKernelError(
            f"{title}: the kernel stores other numbers than plain torch on {target.name}",
            "a kernel's first launch agrees with plain torch",
            "store with torch's index_put, and send the file that was named",
        )


def _judge(plan: AppendPlan, scaled: Any, rope: Rope | None) -> Verdict:
    a, where = plan.append, plan.device
    pages = _PAGES if a.page > 3 else _TOKENS
    if pages * a.page * a.heads * (a.head_dim_qk + a.head_dim_v) > _ELEMENTS:
        raise Unjudged("its pages are too large for a made-up cache")
    draw = torch.Generator(where).manual_seed(0)
    heads = [a.heads] if a.layout == "HND" else []
    shape = [pages, *heads, a.page, *([] if heads else [a.heads])]
    dims = [dim for dim in (a.head_dim_qk, a.head_dim_v) if dim]
    with apart(where):
        new = [torch.randn(_TOKENS, a.heads, d, generator=draw, device=where) for d in dims]
        k = new[0].to(a.dtype)
        v = new[1].to(a.dtype) if len(dims) > 1 else None
        cache = [torch.zeros(*shape, d, device=where).to(a.kv_dtype) for d in dims]
        scales: list[Tensor | None] = [None] * len(dims)
        if scaled:
            size = [1]
            if scaled not in (True, "tensor", "head"):
                size = list(scales_shape(scaled, a.layout, (pages, a.page, a.heads)))
            scales = [
                0.01 + torch.rand(size, generator=draw, device=where, dtype=torch.float32)
                for _ in dims
            ]
        slots, positions, found = _placed(plan, pages)
        tables: tuple[Tensor, ...] = ()
        if rope is not None and rope.base is None:
            angles = torch.arange(64.0, device=where)[:, None] / torch.arange(
                1.0, rope.dim // 2 + 1, device=where
            )
            tables = angles.cos().to(rope.table), angles.sin().to(rope.table)
        about = {"page": a.page, "layout": a.layout, "scaled": scaled, "rope": rope}
        caches, steps = appended(
            k, v, (*cache, None)[:2], (*scales, None)[:2], slots.tolist(),
            positions=positions, tables=tables, **about,
        )  # fmt: skip
        names = ("k_scale", "v_scale")
        found |= {name: x for name, x in zip(names, scales, strict=False) if x is not None}
        if rope is not None and plan.append.slots is not None:
            found["positions"] = positions.to(plan.append.slots)
        found |= dict(zip(("cos", "sin"), tables, strict=False))
        plan.run(k, v, (cache[0], cache[-1]) if v is not None else cache[0], **found)
        pairs = [*zip(cache, caches, strict=False), *zip(scales, steps, strict=False)]
        rows = [_row(got, want) for got, want in pairs if got is not None and want is not None]
    return Verdict(tuple(rows), (), ())


def _placed(plan: AppendPlan, pages: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Of each token its slot and position, and what tells a run where tokens go."""
    a, where = plan.append, plan.device
    if a.slots is not None:
        slots = torch.arange(_TOKENS, device=where) * 3 % (pages * a.page)
        return slots, slots % 13, {"slot_mapping": slots.to(a.slots)}
    # One request, whose last keys are the tokens, in pages in reverse.
    keys = min(pages * a.page, _TOKENS + a.page // 2)
    positions = torch.arange(keys - _TOKENS, keys, device=where)
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32, device=where)[None]
    slots = table[0, positions // a.page] * a.page + positions % a.page
    found = {"block_table": table, "seq_lens": torch.tensor([keys], device=where).int()}
    if plan.form.slots == "ragged table":
        found["cu_seqlens_q"] = torch.tensor([0, _TOKENS], dtype=torch.int32, device=where)
    return slots, positions, found


def _row(got: Tensor, want: Tensor) -> ErrorRow:
    """The share of numbers that are not those of torch, nor their neighbours in the dtype.

    Cosines of a GPU and of torch differ in their last bits, which rounding may show.
    """
    name = "scales" if got.dtype == torch.float32 and want.dim() < 4 else "cache"
    eps = torch.finfo(got.dtype).eps
    mine, theirs = got.float(), want.float()
    most = eps * theirs.abs() + (2.0**-9 if got.dtype in MAX_FINITE else 1e-6)
    wrong = ((mine - theirs).abs() > most) | (mine.isnan() != theirs.isnan())
    return ErrorRow(name, float(wrong.float().mean()), 0.0, 0.0)
