"""Paged decode as a family: the configs of a DecodePlan, what a search tries, what it launches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import product, starmap
from typing import Any

from flexattn.device import Device
from flexattn.kernels.base.config import Geometry, Language
from flexattn.kernels.base.family import Effort, KernelFamily
from flexattn.kernels.base.source import Source
from flexattn.kernels.paged_decode.config import (
    SHORT_ROWS,
    TILE_ROWS,
    Combine,
    ServingConfig,
    SplitPolicy,
    fits_l2,
    invariant_config,
    merge_shape,
)
from flexattn.kernels.paged_decode.engines import (
    MOST_STAGES,
    SPECIALIZED_STAGES,
    TMA_KEYS,
    TMA_ROWS,
)
from flexattn.kernels.paged_decode.limits import SERVING_LIMITS, overlaps, serving_reasons
from flexattn.kernels.paged_decode.source import render_serving, render_serving_combine
from flexattn.problem import Kind
from flexattn.problem.serving import ServingForm, ServingProblem


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
    if form.kv_itemsize == 1:
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
    if form.kv_itemsize == 1:
        yield ServingConfig(4, 64, 4, 1, 2, 1, "await", "heads")
    # 8 keys a warp; of 16 32 x 4k keys take as long, 8 x 8k 0.7 % more.
    yield ServingConfig(4, 32, 4, 1, 2, 1, "await", "heads")


def tall_defaults(problem: ServingProblem) -> Iterator[ServingConfig]:
    """The static default for more than 8 rows, where there is one: measured on an H200.

    Tiles of 16 rows read the keys once each, and have no second launch that merges them. Where
    they find all but the first reading in the L2 cache, 71 rows over 4 x 4160 keys of D 64 take
    15.7 us of 20.0, 48 over 1 x 4160 of D 128 20.0 of 27.0. With one tile they are 0 to 9 % faster
    over any keys. Few requests leave fewer parts to merge with half the programs.
    """
    form = problem.structure
    widest = max(form.head_dim_qk, form.head_dim_v)
    one = 0 < form.rows <= 2 * SHORT_ROWS
    if widest > 128 or form.mask is not None or form.kv_itemsize != 2:
        return
    if one or fits_l2(problem):
        few = form.requests == 1 or (widest > 64 and form.requests * form.kv_heads <= 8)
        keys, programs = 64 if widest > 64 else 128, 1 if few else 2
        yield ServingConfig(2 * SHORT_ROWS, keys, 4, 1, programs, 1, "await", "heads")


def filling(
    configs: Iterable[ServingConfig], form: ServingForm, device: Device
) -> Iterator[ServingConfig]:
    """The configs that leave few programs idle, as each head has the same number of them.

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


def serving_axes(problem: Any, device: Device, effort: Effort) -> Iterator[ServingConfig]:
    """Every combination that a search of any effort may try; some cannot run."""
    form, starts = problem.structure, serving_defaults(problem, device)
    first = [each for each in starts if not serving_reasons(each, form, device)]
    if form.split_keys:
        yield from (replace(first[0], per_sm=each) for each in (1, 2, 3, 4))
        return
    yield from warps_space(form)
    yield from mla_space(form.rows)
    yield from specialized_space(form)
    height = next(each.BLOCK_M for each in first if each.split_policy == "even")
    heights = {height, 16, 64} if form.rows > 16 or form.ragged else {height}
    combines = ("last", "launch", "dependent")
    axes = (sorted(heights), (32, 64, 128), (4, 8), (2, 3, 4), (1, 2, 3, 4), (1, 2, 4), combines)
    yield from starmap(ServingConfig, product(*axes))


def serving_defaults(problem: Any, device: Device) -> Iterator[ServingConfig]:
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
            yield from specialized_defaults(problem, device)
        found = warps_defaults if short else tall_defaults
        yield from filling(found(problem), form, device)
    widest = max(form.head_dim_qk, form.head_dim_v)
    height = 64 if form.ragged or form.rows > 32 else 32 if form.rows > 16 else 16
    warps = 8 if height * widest > 64 * 128 else 4
    if form.ragged or form.rows >= 16:
        # Latent keys took 0.45 of the Triton kernel's time with 128 heads over 64 x 4k, with 16
        # over 64 x 4k 0.97, over 1 x 16k 0.47 (an H100).
        yield from mla_defaults(form, device)
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
            if form.unit and height > 16:
                # Places of chosen keys take registers, and keys that are widened take more.
                wide = form.kv_itemsize > 1
                if wide:
                    yield ServingConfig(height, 32, warps, 2, 1, 1, combine)
                height = 32 if wide else 16
            elif form.shared_kv and height == 64:
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
    columns it took 225.8, and the program that finishes last 213.5. Nobody timed it on chunks.
    """
    if not form.prefix and height < 64 and widest <= 256:
        return "last"
    apart = form.ragged or form.prefix or not overlaps(device)
    return "launch" if apart else "dependent"


def mla_space(rows: int = TMA_ROWS) -> Iterator[ServingConfig]:
    """Every config for so many packed rows (0: unknown), the default first.

    Shares of few tiles cost more to merge. Few rows are a side of wgmma that may be short.
    """
    for height in (16, 32):
        if 0 < rows <= height:
            for least, stages in product((1, 2), range(2, MOST_STAGES[height] + 1)):
                yield ServingConfig(height, TMA_KEYS, 4, stages, 1, least, "launch", "whole")
    for least in (1, 2, 4, 8):
        yield ServingConfig(TMA_ROWS, 2 * TMA_KEYS, 4, 1, 1, least, "launch", "whole")


def mla_defaults(form: ServingForm, device: Device) -> Iterator[ServingConfig]:
    """The first configs to try: at most 16 rows with operands swapped, then as many rows are.

    Chosen keys of one request leave most SMs without a tile of 64 rows. With tiles of 32 rows,
    128 heads took 22.8 us of 29.9 (2,048 keys of eight bits, an H200).
    Beside two tiles the combine kernel has room to begin. On an H200 they are 1.18 and 1.62 times
    as fast as 64 rows (64 requests of 4k keys, one of 16k), three tiles 1.16 and 1.50 times.
    """
    if 0 < form.rows <= 16:
        yield next(mla_space(form.rows))
    elif form.unit and form.requests:
        tiles = form.requests * form.kv_heads * -(-form.rows // TMA_ROWS)
        if 4 * tiles * -(-form.chosen * form.unit // (2 * TMA_KEYS)) <= device.num_sms:
            yield next(mla_space(32))
    yield next(mla_space())


# Parts of a work tile of several, beside which two programs of an SM gain more than merging costs.
_MOST_PARTS = 16


def specialized_defaults(problem: ServingProblem, device: Device) -> Iterator[ServingConfig]:
    """The static default for more than 8 rows of a request, where there is one.

    Measured on an H200, beside the other templates. Of 128 columns one program an SM took 26.6 us
    of 33.6 (48 rows, 16 x 8k keys), 70.8 of 79.9 (32 rows of 8 heads, 16 x 4k), 26.7 of 29.1 (16
    rows, 16 x 8k), 12.9 of 16.0 (48 rows, 4 x 2k) and 23.0 of 76.2 (64 rows, 1 x 64k). Two leave
    twice as many parts to merge: 29.6, 73.2, 28.5, 14.3 and 46.0. But they gain where rows fill
    several work tiles: 34.3 of 37.7 with one (128 rows, 16 x 8k), and of 64 columns 37.6 of 50.2
    with one and 43.4 (71 rows, 64 x 4k). Not timed: a work tile for each of two programs, which
    leaves no more parts and hides ends of work tiles; fewer rows of 64 columns; and beside a
    cascade's prefix, where an SM's registers do not hold both.
    """
    form = problem.structure
    several = form.rows > TMA_ROWS
    if form.ragged or form.offset or form.head_dim_v > 128:
        return
    if form.head_dim_v <= 64 and (fits_l2(problem) or not several):
        return
    work_tiles = form.requests * form.kv_heads * -(-form.rows // TMA_ROWS)
    if 2 * device.num_sms <= (_MOST_PARTS if several else 1) * work_tiles:
        yield ServingConfig(TMA_ROWS, TMA_KEYS, 4, 2, 2, 1, "launch", "whole")
    elif form.head_dim_v > 64:
        yield ServingConfig(TMA_ROWS, TMA_KEYS, 4, 3, 1, 1, "launch", "whole")


def specialized_space(form: ServingForm) -> Iterator[ServingConfig]:
    """Every config for more rows than warp-private tiles have; not all of them can run."""
    if 0 < form.rows <= SHORT_ROWS:
        return
    for groups, per_sm, stages, least in product(
        (2, 1), (1, 2), range(2, SPECIALIZED_STAGES + 1), (1, 2)
    ):
        yield ServingConfig(
            TMA_ROWS, TMA_KEYS, 4 * groups, stages, per_sm, least, "launch", "whole"
        )  # fmt: skip


# Told in a table's cell without their names.
_NAMELESS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "per_sm", "combine")


class _PagedDecode(KernelFamily[ServingConfig]):
    """Problems and structures are those of flexattn.problem.serving."""

    name = "paged_decode"
    kind: Kind = "serving"
    language: Language = "triton"
    limits = SERVING_LIMITS
    quick = 32

    defaults = staticmethod(serving_defaults)
    axes = staticmethod(serving_axes)

    def template(self, config: ServingConfig) -> str:
        return config.template

    def grid(self, problem: Any, config: Any, device: Device) -> Geometry:
        """The grid of the largest batch; programs share out whatever tiles there are."""
        packed, B, q_len = problem.Hq // problem.Hkv, problem.B, problem.q_len
        tiles = B * -(-q_len * packed // config.BLOCK_M)
        if problem.total_q:
            tiles = -(-q_len * packed // config.BLOCK_M) + B
        work_tiles = tiles * problem.Hkv * (-(-problem.kv_len // config.BLOCK_N) + 1)
        return Geometry(config.programs(device), tiles, work_tiles)

    def merges(self, problem: Any, config: ServingConfig, device: Device) -> int:
        """Programs of the second kernel."""
        return merge_shape(problem.structure, config, device).grid(config.programs(device))

    def render(self, structure: Any, config: ServingConfig, device: Device, title: str) -> Source:
        return render_serving(structure, config, device, title)

    def sources(
        self, structure: Any, config: ServingConfig, device: Device, title: str
    ) -> tuple[Source, ...]:
        """The kernel, and the second one that merges where the config has one.

        The parts of a shared prefix are merged by the last kernel of its cascade.
        """
        attend = render_serving(structure, config, device, title)
        if not config.merges_apart or structure.prefix:
            return (attend,)
        return attend, render_serving_combine(structure, config, device)

    def serves(self, config: ServingConfig, measured: Any, problem: Any, device: Device) -> bool:
        """True if as many rows were measured, or a tile holds these as well as the default's.

        Several short tiles would each read the keys again, and a tall one computes rows of nobody.
        """
        rows: int = problem.structure.rows
        if measured.structure.rows == rows:
            return True
        height = next(self.able(problem, device)).BLOCK_M
        return min(rows, height) <= config.BLOCK_M <= max(TILE_ROWS, height)

    def launch_key(self, config: ServingConfig) -> tuple[object, ...]:
        """The whole config: how many programs run and what merges them is not in the code."""
        return (config,)

    def short(self, config: ServingConfig) -> str:
        """16x64 w4 s3 p2 last has two programs on an SM, the last of which merges."""
        parts = [f"{config.BLOCK_M}x{config.BLOCK_N} w{config.num_warps} s{config.num_stages}"]
        parts += [f"p{config.per_sm}", config.combine]
        for field in fields(config):
            value = getattr(config, field.name)
            if field.name not in _NAMELESS and value != field.default:
                parts.append(f"{field.name}={value}")
        return " ".join(parts)


PAGED_DECODE = _PagedDecode()
