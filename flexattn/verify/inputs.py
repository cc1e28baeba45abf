"""The tensors that a problem is measured on: seeded, and laid out as its Layout says."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.mods import Bound
from flexattn.problem import DTYPES, FP8, Problem

_TORCH = {name: dtype for dtype, name in (DTYPES | FP8).items()}


def make_inputs(problem: Problem, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, Hq, q_len, D], k [B, Hkv, kv_len, D], v [B, Hkv, kv_len, Dv], normal, equal each time.

    A head dimension that is not contiguous has stride 2; tensors that are not aligned start
    beside a 16-byte border.
    """
    s, p = problem.structure, problem
    layout = s.layout
    draw = torch.Generator(device).manual_seed(0)
    sizes = (
        ("q", p.Hq, p.q_len, s.head_dim_qk, layout.q_contiguous),
        ("k", p.Hkv, p.kv_len, s.head_dim_qk, layout.k_contiguous),
        ("v", p.Hkv, p.kv_len, s.head_dim_v, layout.v_contiguous),
    )
    q, k, v = (
        _normal(
            (p.B, heads, length, dim), _TORCH[s.dtype_of(name)], contiguous, layout.aligned, draw
        )
        for name, heads, length, dim, contiguous in sizes
    )
    return q, k, v


def make_sinks(problem: Problem, device: torch.device) -> Tensor | None:
    """Sinks [Hq] for `make_inputs`, equal each time; None where the problem has none."""
    if not problem.structure.sinks:
        return None
    draw = torch.Generator(device).manual_seed(1)
    sinks = torch.randn(problem.Hq, generator=draw, device=device)
    return sinks.to(_TORCH[problem.structure.sinks])


def gradient_like(out: Tensor) -> Tensor:
    """A normal random gradient of an output, equal each time."""
    draw = torch.Generator(out.device).manual_seed(2)
    return torch.randn(out.shape, generator=draw, device=out.device).to(out.dtype)


def moved(bound: Bound | None, where: torch.device | str) -> Bound | None:
    """A mod with what it captures on a device, as data: nothing of it requires a gradient."""
    if bound is None:
        return None
    return bound._replace(tensors=tuple(x.detach().to(where) for x in bound.tensors))


def _normal(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    contiguous: bool,
    aligned: bool,
    draw: torch.Generator,
) -> Tensor:
    """A view of wider rows: whole 16 bytes each, or one element beside that."""
    dim, step, per_line = shape[-1], 1 if contiguous else 2, 16 // dtype.itemsize
    offset = 0 if aligned else 1
    width = dim * step + offset
    if aligned:
        width = -(-width // per_line) * per_line
    drawn = torch.bfloat16 if dtype.itemsize == 1 else dtype
    rows = torch.empty((*shape[:-1], width), dtype=drawn, device=draw.device)
    rows = rows.normal_(generator=draw).to(dtype)
    return rows[..., offset : offset + dim * step : step]
