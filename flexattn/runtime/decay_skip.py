"""The keys of a decaying score that may count: by norms of q and k, and by tiles of a backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from flexattn.device import Device
from flexattn.errors import BuildError
from flexattn.kernels.base.binding import strides
from flexattn.kernels.base.config import Config
from flexattn.kernels.base.features import decays, skips_far
from flexattn.kernels.base.source import Source
from flexattn.kernels.decay_skip.source import (
    render_blocks,
    render_norms,
    render_window,
    rows_of_part,
)
from flexattn.problem import Problem, Structure
from flexattn.runtime.build import Before, Kernel, Scratch, builder
from flexattn.runtime.outcomes import concerns_the_device, memory, outcome_of
from flexattn.settings import current, say_once

# Where few keys, or few rows for each of them, are walked, two more kernels would cost what they
# save: an estimate, which nothing has measured yet.
LEAST_KEYS, LEAST_ROWS, LEAST_SCORES = 1024, 256, 10**8


def pays(problem: Problem) -> bool:
    """True if a call is long enough for keys to be left out of it: by its shape alone."""
    scores = problem.B * problem.Hq * problem.q_len * problem.kv_len
    long = problem.kv_len >= LEAST_KEYS and problem.q_len >= LEAST_ROWS
    return long and scores >= LEAST_SCORES


def sources(structure: Structure, config: Config, target: Device) -> tuple[Source, ...]:
    """The kernels that run before one that leaves keys out: of norms, and of windows."""
    if not skips_far(structure, config):
        return ()
    return _rendered(structure, target)


def _rendered(structure: Structure, target: Device) -> tuple[Source, ...]:
    return builder().sources(
        ("decay", structure, target),
        lambda: (render_norms(structure, target), render_window(structure, target)),
    )


def begin_window(structure: Structure, target: Device, index: int) -> None:
    """Start building them, while the kernel is built that they run before."""
    if index >= 0 and decays(structure):
        for source in _rendered(structure, target):
            builder().begin(source, target, index)


def decay_window(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    given: Sequence[str],
    target: Device,
    index: int,
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> Before | None:
    """The two kernels that find windows, for one problem and the strides of q and k.

    They write "DECAY_WINDOW", float32: the windows [B, Hq] first, whole numbers, then what the
    first kernel leaves for the second. given: the names of what the launch is given, that among
    them; fixed: values that it has, the factors of eight bits among them. index: of the GPU, -1 in
    the interpreter. None where the kernels do not build: the call
    then visits all keys.
    """
    structure = problem.structure
    kernels = _built(problem, _rendered(structure, target), "keys", target, index)
    if kernels is None:
        return None
    rows, heads = rows_of_part(structure.head_dim_qk), problem.B * problem.Hq
    q_parts, k_parts = -(-problem.q_len // rows), -(-problem.kv_len // rows)
    q_programs, k_programs = heads * q_parts, k.shape[0] * problem.Hkv * k_parts
    shared = {
        "Hq": problem.Hq, "q_len": problem.q_len, "kv_len": problem.kv_len, "q_parts": q_parts,
        "k_parts": k_parts, "start": heads,
    }  # fmt: skip
    layout = structure.layout
    of_norms = {
        **shared,
        **strides("stride_q", "bhm" if layout.q_contiguous else "bhmd", q),
        **strides("stride_k", "bhn" if layout.k_contiguous else "bhnd", k),
        "Hkv": problem.Hkv,
        "q_programs": q_programs,
    }
    factors = {name: value for name, value in fixed.items() if "descale" in name.lower()}
    of_window = {
        **factors,
        **shared,
        "group": problem.Hq // problem.Hkv,
        "stride_kb": 0 if k.shape[0] == 1 else problem.Hkv,
        "k_start": heads + q_programs,
    }
    passed = ["NORMS" if name == "DECAY_WINDOW" else name for name in given]
    norms, window = kernels
    return Before(
        (
            norms.prepare(q_programs + k_programs, of_norms, passed, spare=passed),
            window.prepare(heads, of_window, passed, spare=(*passed, *factors)),
        ),
        (Scratch("DECAY_WINDOW", (heads + q_programs + k_programs,)),),
    )


# What the kernels of a backward write for it, and what is there where nothing is left out.
TILES_FOUND = ("DECAY_WINDOW", "M_BLOCK_MAX", "N_BLOCK_MIN")
VISITS_ALL = dict.fromkeys(TILES_FOUND, 0)
# Of fewer keys the three kernels cost what they save or more, on an H200: 16 heads of 128 columns,
# with a causal mask and ALiBi's slopes. What a forward asks for is asked for as well.
LEAST_BACKWARD_KEYS = 2048


def decay_tiles(
    problem: Problem,
    tile: tuple[int, int],
    inputs: Sequence[Tensor],
    fixed: Mapping[str, Any],
    given: Sequence[str],
    target: Device,
    index: int,
) -> Before | None:
    """The kernels that find windows, and the one that finds the tiles which a backward visits.

    tile: rows and keys of its tiles. inputs: q, k and v. fixed, given: values that the backward's
    kernels have, and names of what its launch is given, TILES_FOUND among them. None where these
    kernels cost more than they save, or do not build: the backward then visits all tiles.
    """
    if problem.kv_len < LEAST_BACKWARD_KEYS or not pays(problem):
        return None
    windows = decay_window(problem, inputs[0], inputs[1], given, target, index)
    source = render_blocks(problem.structure, *tile, target)
    built = None if windows is None else _built(problem, (source,), "tiles", target, index)
    if windows is None or built is None:
        return None
    m_blocks, n_blocks = -(-problem.q_len // tile[0]), -(-problem.kv_len // tile[1])
    told, heads = {**fixed, "m_blocks": m_blocks, "n_blocks": n_blocks}, (problem.B, problem.Hq)
    blocks = built[0].prepare(heads[0] * heads[1], told, given, spare=(*told, *given))
    sizes = zip(TILES_FOUND[1:], (n_blocks, m_blocks), strict=True)
    found = (Scratch(name, (*heads, size), torch.int32) for name, size in sizes)
    return Before((*windows.kernels, blocks), (*windows.scratch, *found))


def _built(
    problem: Problem, sources: Sequence[Source], skipped: str, target: Device, index: int
) -> list[Kernel] | None:
    """The kernels of sources; None where they do not build, which is logged, and kept as known."""
    known = [memory().find(each, target) for each in sources]
    if not current().strict and any(each is not None and not each.built for each in known):
        return None
    try:
        return [builder().kernel(each, target, index) for each in sources]
    except BuildError as error:
        if current().strict or concerns_the_device(error):
            raise
        outcome = outcome_of(error)
        say_once(f"{problem.describe()}: far {skipped} are not left out: {outcome}")
        for source in sources:
            # Of several it is not known which: none is compiled again.
            memory().note(source, target, outcome, problem.describe())
        return None
