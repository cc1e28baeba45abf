"""Warp-private serving kernels: what is worth trying, where to start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from flexattn.device import Device
from flexattn.kernels.paged_decode.config import SHORT_ROWS, ServingConfig, SplitPolicy, fits_l2
from flexattn.problem.serving import SERVING_ITEMSIZE, ServingForm, ServingProblem


def warps_defaults(problem: ServingProblem) -> Iterator[ServingConfig]:
    """The static defaults for at most 8 rows, best first: measured on an H200."""
    form = problem.structure
    if form.chunks > 1:
        yield from _wide_defaults(form)
        return
    if form.requests == 1 and form.mask is None:
        # Of 128k keys 128.4.2 is 0.7 % ahead, but a form has no length: the tuner's records do.
        yield ServingConfig(8, 128, 8, 1, 1, 1, "await", "round")
    if form.offset:
        # Few keys of a request's own: a cascade's passes end 6 % earlier than with the next one.
        yield ServingConfig(8, 64, 4, 1, 2, 1, "await", "heads")
    if SERVING_ITEMSIZE[form.kv_dtype] == 1:
        # Within 0.7 % of the next one where requests are long, 3 to 7 % ahead where few or short.
        yield ServingConfig(8, 64, 2, 1, 4, 1, "await", "heads")
    if form.head_dim_v == 128 and form.kv_heads >= 16 and form.requests > 8:
        # Many heads leave each few programs. Of 32 heads and 16 x 2k keys smaller ones take 125.0
        # us of 127.8 in pages and 123.5 of 124.1 without, of 16 heads and 16 x 4k 125.3 of 126.1.
        yield ServingConfig(8, 32, 2, 1, 4, 1, "await", "heads")
    wide, narrow = (ServingConfig(8, keys, 4, 1, 2, 1, "await", "heads") for keys in (128, 64))
    # Contiguous keys and few requests need less under way: 2 % of 8 x 8k keys, 1.6 % of 64 x 4k.
    # Keys of D 64 are half as long: of few requests the wide tile takes 11 % less.
    least = form.head_dim_v == 128 and (not form.page or form.requests <= 8)
    yield from (narrow, wide) if least else (wide, narrow)


def _wide_defaults(form: ServingForm) -> Iterator[ServingConfig]:
    """The same where heads have 256 columns.

    Of 8 rows few requests and heads leave them to the Triton template, whose programs that merge
    have fewer parts to wait for: one request of 8k keys and 2 heads takes it 25.7 us of 27.5.
    """
    if form.rows > SHORT_ROWS // form.chunks:
        if form.requests * form.kv_heads > 4:
            yield ServingConfig(8, 64, 8, 1, 1, 1, "await", "heads")
        return
    if form.requests == 1:
        policy: SplitPolicy = "round" if form.mask is None else "heads"
        yield ServingConfig(4, 64, 8, 1, 1, 1, "await", policy)
    if SERVING_ITEMSIZE[form.kv_dtype] == 1:
        yield ServingConfig(4, 64, 4, 1, 2, 1, "await", "heads")
    # 8 keys a warp; of 16 32 x 4k keys take as long, 8 x 8k 0.7 % more.
    yield ServingConfig(4, 32, 4, 1, 2, 1, "await", "heads")


def tall_defaults(problem: ServingProblem) -> Iterator[ServingConfig]:
    """The static default for more than 8 rows, where there is one: measured on an H200.

    Tiles of 16 rows read the keys once each, and have no second launch that merges them. Where
    they find all but the first reading in the L2 cache, 71 rows over 4 x 4160 keys of D 64 take
    15.7 us of 20.0, 48 over 1 x 4160 of D 128 20.0 of 27.0. Of one tile they are 0 to 9 % faster
    over any keys. Few requests leave fewer parts to merge with half the programs.
    """
    form = problem.structure
    widest = max(form.head_dim_qk, form.head_dim_v)
    one = 0 < form.rows <= 2 * SHORT_ROWS
    if widest > 128 or form.mask is not None or SERVING_ITEMSIZE[form.kv_dtype] != 2:
        return
    if one or fits_l2(problem):
        few = form.requests == 1 or (widest > 64 and form.requests * form.kv_heads <= 8)
        keys, programs = 64 if widest > 64 else 128, 1 if few else 2
        yield ServingConfig(2 * SHORT_ROWS, keys, 4, 1, programs, 1, "await", "heads")


def filling(
    configs: Iterable[ServingConfig], form: ServingForm, device: Device
) -> Iterator[ServingConfig]:
    """Those that leave few programs idle, as each head has the same number of them.

    More idle ones than an eighth cost more than walking apart gives. Where more than a sixteenth
    are idle, twice as many programs of half the warps may fill the heads better: 40 heads leave 24
    of 264 idle and 8 of 528, which took 757 us of 781 (64 requests of 2560 keys, an H200).
    """

    def idle(config: ServingConfig) -> float:
        programs = config.programs(device)
        return programs % form.kv_heads / programs

    for each in configs:
        share = idle(each)
        finer = replace(each, BLOCK_N=64 // form.chunks, num_warps=2, per_sm=4)
        if each.split_policy == "heads" and idle(finer) <= 1 / 16 < share:
            yield finer
        if share <= 1 / 8:
            yield each


def warps_space(form: ServingForm) -> Iterator[ServingConfig]:
    """Every config of this kind; not all of them can run."""
    policies: tuple[SplitPolicy, ...] = ("heads", "round")
    short, chunks = SHORT_ROWS // form.chunks, form.chunks
    height = short if 0 < form.rows <= short else 2 * short
    axes = product(
        (1, 2, 4, 8),
        (16 // chunks, 32 // chunks, 64 // chunks),
        (1, 2, 3, 4, 6, 8, 12),
        (1, 2),
        policies,
    )
    for warps, keys, per_sm, least, policy in axes:
        if policy == "round" and least > 1:
            continue  # it shares tiles out without looking at how many there are
        yield ServingConfig(height, warps * keys, warps, 1, per_sm, least, "await", policy)
