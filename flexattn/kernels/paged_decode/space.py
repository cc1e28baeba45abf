"""The search space of serving kernels, and their static defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product, starmap

from flexattn.device import Device
from flexattn.kernels.paged_decode import mla, warp_specialized, warps as serving_warps
from flexattn.kernels.paged_decode.config import SHORT_ROWS, Combine, ServingConfig
from flexattn.kernels.paged_decode.invariant import invariant_config
from flexattn.kernels.paged_decode.limits import overlaps, serving_reasons
from flexattn.problem.serving import ServingForm, ServingProblem


def workspace(
    form: ServingForm, config: ServingConfig, device: Device, part_slots: int = 0
) -> int:
    """Floats of the workspace: programs x 2 x BLOCK_M x (head_dim_v + 1), or half of them.

    A program's range of tiles begins inside at most one work tile and ends inside at most one
    other: two partial results, each of BLOCK_M rows of outputs and a log-sum-exp. Of a tile that
    ends in its range it keeps its own where it awaits those of the others. Batch-invariant ones
    have two and part_slots for its splits, of the rows that a work tile has.
    """
    if form.split_keys:
        rows = min(config.BLOCK_M, form.rows or config.BLOCK_M)
        return config.programs(device) * (2 + part_slots) * rows * (form.head_dim_v + 1)
    return config.programs(device) * config.left * config.BLOCK_M * (form.head_dim_v + 1)


def serving_axes(problem: ServingProblem, device: Device) -> Iterator[ServingConfig]:
    """Every combination that a search may try; some cannot run."""
    form, starts = problem.structure, serving_defaults(problem, device)
    first = [each for each in starts if not serving_reasons(each, form, device)]
    if form.split_keys:
        yield from (replace(first[0], per_sm=each) for each in (1, 2, 3, 4))
        return
    yield from serving_warps.warps_space(form)
    yield from mla.mla_space(form.rows)
    yield from warp_specialized.specialized_space(form)
    height = next(each.BLOCK_M for each in first if each.split_policy == "even")
    heights = {height, 16, 64} if form.rows > 16 or form.ragged else {height}
    combines: tuple[Combine, ...] = ("last", "launch", "dependent")
    axes = (sorted(heights), (32, 64, 128), (4, 8), (2, 3, 4), (1, 2, 3, 4), (1, 2, 4), combines)
    yield from starmap(ServingConfig, product(*axes))


def serving_defaults(problem: ServingProblem, device: Device) -> Iterator[ServingConfig]:
    """The static defaults, best first; some may not run.

    One token of a group of at most 16 heads takes the 16-row matrix instruction, which needs no
    padding of the rows to 64.
    """
    form = problem.structure
    if form.split_keys:
        yield invariant_config(form)
        return
    if device.capability == 90 and form.rows > 0:
        short = form.rows <= SHORT_ROWS
        if not short:
            yield from warp_specialized.specialized_defaults(problem, device)
        found = serving_warps.warps_defaults if short else serving_warps.tall_defaults
        yield from serving_warps.filling(found(problem), form, device)
    widest = max(form.head_dim_qk, form.head_dim_v)
    height = 64 if form.ragged or form.rows > 32 else 32 if form.rows > 16 else 16
    warps = 8 if height * widest > 64 * 128 else 4
    if form.ragged or form.rows >= 16:
        # Latent keys took 0.45 of the Triton kernel's time with 128 heads over 64 x 4k, with 16
        # over 64 x 4k 0.97, over 1 x 16k 0.47 (an H100).
        yield from mla.mla_defaults(form)
    combine = _combine(form, height, widest, device)
    if form.dtype == "float32":
        # Without matrix instructions a tile lives in registers.
        yield ServingConfig(height, 32, 8, 2, 1, 1, combine)
    elif widest <= 128:
        # Beside a shared prefix other programs walk each request's own keys: with one for each SM,
        # not two, a cascade took 47.1 us of 54.8 on an H200.
        start = ServingConfig(height, 64, warps, 3, 1 if form.prefix else 2, 1, combine)
        yield start
        yield replace(start, num_stages=2)
    else:
        if widest > 256:
            # Latent keys: 128 heads took 327 us with 64 of them, 391 with 32 and a tile more under
            # way, 465 with 32 (64 x 4k, an H200). Where the first two spill they give way.
            if form.shared_kv and height == 64:
                yield ServingConfig(height, 64, warps, 2, 1, 1, combine)
            yield ServingConfig(height, 32, warps, 3, 1, 1, combine)
        else:
            if height < 64 and device.capability == 90:
                # 16 rows of 256 columns: 44.5 us of 49.7, 32: 46.7 of 59.6 (8 x 8k keys, 2 heads);
                # one of 192 and 128: 174.6 of 219.5 (16 x 4k keys, 16 heads; an H200).
                yield ServingConfig(height, 64, 8, 3, 1, 1, combine)
            yield ServingConfig(height, 64, warps, 2, 1, 1, combine)
        yield ServingConfig(height, 32, warps, 2, 1, 1, combine)
    yield ServingConfig(16, 32, 4, 2, 1)
    yield ServingConfig(16, 16, 4, 1, 1)


def _combine(form: ServingForm, height: int, widest: int, device: Device) -> Combine:
    """Tall or wide tiles take one program long to merge, and its registers from the main loop.

    A kernel that merges beside the first one took 30.1 us of the launched one's 33.6 (48 rows,
    16 x 8k keys, an H200), 38.3 of 41.0 (128), 33.6 of 76.2 (64, 1 x 64k); of 16 rows of 192
    columns it took 225.8, and the program that finishes last 213.5. Of chunks nobody timed it.
    """
    if not form.prefix and height < 64 and widest <= 256:
        return "last"
    apart = form.ragged or form.prefix or not overlaps(device)
    return "launch" if apart else "dependent"
