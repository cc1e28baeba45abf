"""Where to start with the Triton backward, what to fall back to, and what a search tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from flexattn.device import Device, is_rdna
from flexattn.kernels.base.features import fp32_products
from flexattn.kernels.printers.gradient_printer import adds_along_diagonals
from flexattn.kernels.triton_backward.config import BackwardConfig, serialises
from flexattn.problem import Problem

_Table = tuple[tuple[int, tuple[BackwardConfig, ...]], ...]

# By the widest head dimension; chosen so that loops compile without spills.
_TABLES: dict[str, _Table] = {
    "sm_90": (
        (
            64,
            (
                BackwardConfig(64, 128, 128, 128, 8, 3, True),
                BackwardConfig(64, 128, 128, 64, 8, 2),
            ),
        ),
        (
            128,
            (
                BackwardConfig(64, 128, 128, 64, 8, 2, True),
                BackwardConfig(32, 128, 128, 32, 8, 2, True),
                BackwardConfig(32, 128, 128, 32, 8, 2),
                BackwardConfig(64, 64, 64, 64, 8, 2),
            ),
        ),
        (192, (BackwardConfig(32, 64, 64, 64, 8, 2), BackwardConfig(32, 32, 64, 32, 8, 1))),
        (
            256,
            (BackwardConfig(32, 32, 64, 32, 8, 2, True), BackwardConfig(32, 32, 64, 32, 8, 1)),
        ),
    ),
    "small": (
        (64, (BackwardConfig(32, 64, 64, 32, 4, 2),)),
        (128, (BackwardConfig(32, 64, 64, 32, 8, 2), BackwardConfig(16, 64, 64, 32, 4, 2))),
        (256, (BackwardConfig(16, 32, 32, 16, 4, 1), BackwardConfig(32, 32, 32, 32, 8, 1))),
    ),
    "hip": (
        (64, (BackwardConfig(64, 64, 64, 64, 4, 1), BackwardConfig(32, 64, 64, 32, 4, 1))),
        (128, (BackwardConfig(32, 64, 64, 32, 4, 1), BackwardConfig(16, 64, 64, 16, 4, 1))),
        (256, (BackwardConfig(16, 32, 32, 16, 4, 1),)),
    ),
    "rdna": (
        (64, (BackwardConfig(16, 32, 32, 16, 4, 1),)),
        (128, (BackwardConfig(16, 16, 16, 16, 4, 1),)),
        (256, (BackwardConfig(16, 16, 16, 16, 8, 1),)),
    ),
}
# Where the gradient of a relative bias is summed along diagonals, on sm_90 up to 64 and up to 128
# columns: sums take registers and shared memory, with which the table's first ones spill.
_DIAGONALS = (
    BackwardConfig(64, 128, 128, 64, 8, 2, True),
    BackwardConfig(32, 128, 128, 32, 8, 2, True),
)
# Without matrix instructions what is multiplied lies in registers: beyond 64 wide tiles spill.
_FLOAT32 = (BackwardConfig(32, 32, 32, 32, 8, 1), BackwardConfig(16, 32, 32, 16, 4, 1))
# Of parts of bfloat16, up to 64 and up to 128 columns.
_PARTS = (BackwardConfig(32, 64, 64, 32, 4, 1), BackwardConfig(16, 32, 32, 16, 8, 1))
_SMALLEST = (BackwardConfig(16, 16, 16, 16, 4, 1), BackwardConfig(16, 16, 16, 16, 8, 1))


def defaults(problem: Problem, device: Device) -> Iterator[BackwardConfig]:
    """Configs by preference, the smallest tiles last."""
    structure = problem.structure
    widest = max(structure.head_dim_qk, structure.head_dim_v)
    if (products := fp32_products(structure)) == "bf16x6":
        yield _PARTS[widest > 64]
        yield from _SMALLEST
    elif products:
        yield from _FLOAT32 if widest <= 64 else ()
        yield from reversed(_SMALLEST)
    else:
        table = next((found for limit, found in _table(device) if widest <= limit), ())
        if structure.dropout and widest > 64:
            # Random bits take registers: of 64 rows at a time the loops of sm_90 spill.
            table = tuple(replace(each, BLOCK_M1=min(each.BLOCK_M1, 32)) for each in table)
        if device.arch == "sm_90" and widest <= 128 and adds_along_diagonals(structure):
            table = (_DIAGONALS[widest > 64], *table)
        guarded = device.has_wgmma and serialises(structure)
        yield from (replace(each, guarded=guarded) for each in table)
        yield BackwardConfig(16, 32, 32, 16, 4, 1)
        yield from _SMALLEST


def axes(problem: Problem, device: Device, every: bool) -> Iterator[BackwardConfig]:
    """What a search may try."""
    held = (32, 64, 128) if every else (64, 128)
    walked = (16, 32, 64, 128) if every else (32, 64)
    stages = (1, 2, 3) if every else (2, 3)
    stages = (1, 2) if device.backend == "hip" else stages
    tma = (False, True) if device.has_tma else (False,)
    for n1, m2, m1, n2, warps, depth in product(held, held, walked, walked, (4, 8), stages):
        yield from (BackwardConfig(m1, n1, m2, n2, warps, depth, each) for each in tma)


def _table(device: Device) -> _Table:
    if device.backend == "hip":
        return _TABLES["rdna" if is_rdna(device) else "hip"]
    return _TABLES.get(device.arch, _TABLES["small"])
