"""Hopper's backward as a family: its configs to start from, what is searched, its launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from flexattn.device import Device
from flexattn.kernels.base.arguments import skips_vanished
from flexattn.kernels.base.config import Geometry, Language, turned, words
from flexattn.kernels.base.family import Around, Effort, KernelFamily
from flexattn.kernels.hopper_backward.config import (
    BLOCKS_AT_ONCE,
    EARLY,
    PIPELINED,
    HopperBackwardConfig,
    at_sizes,
    backward_grid,
    columns,
    multiplied_columns,
    sizes_of_launch,
    trims_runs,
)
from flexattn.kernels.hopper_backward.limits import LEAN_COLUMNS, LIMITS
from flexattn.kernels.hopper_backward.masks import (
    asked_by_row,
    band_and_rest,
    band_of,
    reads_diagonals,
    sums_heads,
)
from flexattn.kernels.hopper_backward.ragged import (
    KEY_TILE_WORDS,
    PART_ROWS,
    PARTIAL_GRADIENTS,
    render_key_tiles,
    render_sum_parts,
)
from flexattn.kernels.hopper_backward.source import (
    SUMS_OF_A_ROW,
    render,
    render_after,
    render_before,
    render_trim,
)
from flexattn.kernels.ptx.assembler import bounds_views, offered, waits_meet
from flexattn.problem import Kind, Problem, Structure

_TALL = HopperBackwardConfig(128, 128, 2)
_WIDE = HopperBackwardConfig(64, 128, 2)
_SPLIT = HopperBackwardConfig(64, 64, 2)
_ODD = HopperBackwardConfig(64, 96, 2, by_product=True, waves=4)
_LEAN = replace(_WIDE, ds_stages=2, ds_first=True, remat=True)
# Rows of a mean sequence: of fewer V stays in shared memory, from more on tiles are tall.
_SHORT, _LONG = 500, 800
# Rows of a pack of windows up to which more heads start side by side.
_FEW = 2**13
# The most parts of a group of query heads.
_MOST_PARTS = 8
# The most keys of a row whose weights, where all are alike, are no subnormal numbers of float16.
_FP16_KEYS = 2**14


def defaults(problem: Problem) -> Iterator[HopperBackwardConfig]:
    """Configs by preference, as measured on an H200 and an H100: tiles by their columns.

    Addresses are computed in the loop where its registers would not hold them as well: beside
    counters, beside a mask's comparisons but at 128 columns, where a mod takes registers, and
    where weights are dropped (ptxas of Triton 3.6 then spills in the loop that draws).
    Up to 128 columns the copy engine adds dQ, dS has two tiles, and lse is read early, as far as
    registers go: see _by_copy_engine for the rest.
    Above 128 columns by_product goes first, but with a score_mod, whose arithmetic would be one
    warpgroup's alone, and in float16 where a row has so many keys that its weights, which one
    warpgroup hands to the other in 16 bits, lose some of theirs. Up to 192 columns all of lse is
    read early: 0.95 to 0.99 of the time (D 160, H200). Of 192 columns tiles of 96 keys write two
    thirds of dQ, which by_product waits for: 0.81 to 0.84 of its time, and of values of up to 128
    0.77 to 0.94 of that of tiles of 128 keys, which go first with Triton 3.8.
    """
    structure = problem.structure
    if structure.ragged_kv:
        yield from _of_packs(problem)
        return
    width, plain = columns(structure), _few_registers(structure)
    sparsity = structure.sparsity
    short = sparsity is not None and sparsity.kv_block % 128 != 0
    if width <= 128 and (short or asked_by_row(structure, 64)):
        yield from _of_short_blocks(problem)
        return
    # Tall tiles have 64 registers of scores, and as many of their gradients.
    tiles = {64: (_TALL, _WIDE) if plain else (_WIDE,), 128: (_WIDE,)}.get(width, (_SPLIT,))
    for each in tiles:
        config, masked = at_sizes(each, problem), structure.mask is not None
        bare = plain and config.mha and config.even_n
        split = each is _SPLIT
        remat = split or structure.dropout or not (bare and (width == 128 or not masked))
        pipelined = "dk" if split and (masked or bare) else ""
        config = replace(config, remat=remat, pipelined=pipelined)
        # Tall tiles, a score_mod and a mask that is no band leave no registers for all of lse.
        # Where query heads are counted, the first two leave none for a second tile of dS either,
        # nor does Triton 3.9's loop. With dropout four warps that draw may take eight registers of
        # each of these threads.
        tight = each is _TALL or structure.score is not None
        tight_loop = not config.mha and (tight or waits_meet())
        half = tight or tight_loop or not plain or structure.dropout
        early = "half" if half and not split else "all"
        # Nor are there any beside what is read along diagonals, at 128 columns.
        if reads_diagonals(structure) and width == 128:
            early = ""
        config = replace(config, early_lse=early)
        if width <= 128:
            stages, remat = (1, True) if tight_loop else (2, config.remat)
            added = replace(config, dq_tma=True, ds_stages=stages, remat=remat)
            yield _by_copy_engine(added, structure)
        elif structure.score is None and not structure.dropout and _keeps_weights(problem):
            if _fits_odd_keys(structure) and _is_bare(structure):
                yield at_sizes(_ODD, problem)
            lean = at_sizes(_LEAN, problem)
            if lean.mha and lean.even_n and _fits_tall_keys(structure) and _is_bare(structure):
                yield lean
            fits = plain and max(structure.head_dims) <= LEAN_COLUMNS
            yield replace(_by_product(config), early_lse="all" if fits else "")
        yield config


def _of_short_blocks(problem: Problem) -> Iterator[HopperBackwardConfig]:
    """Configs for masks whose blocks of 64 keys no tile of 128 fits, or which rows choose, of up
    to 128 columns.

    Each dQ of 64 x 64 weights is added as often as of two tiles of 128 keys.
    """
    structure = problem.structure
    config = at_sizes(replace(_SPLIT, remat=True), problem)
    if structure.score is None and not structure.dropout and _keeps_weights(problem):
        yield _by_product(config)
    yield replace(config, dq_tma=True, ds_stages=2, early_lse="all")
    yield config


def _of_packs(problem: Problem) -> Iterator[HopperBackwardConfig]:
    """Configs for packed sequences, by preference.

    Blocks are persistent, since places of a list may be empty. They take the longest sequence
    first, of so few heads that its rows stay in L2: 0.75 to 0.91 of the time of tiles by their
    length (H200). Short tiles go last, and where all heads start side by side the longest first:
    0.79 (16:2 heads of 128 columns) and 0.94 (short sequences of 256) to 1.01. Half of V in
    registers takes 0.98 of it. At 64 columns, where each key head has one query head: tall tiles
    take 0.95 of the time of sequences of 4,000 rows and 0.99 of 1,000, and of 300 rows V in shared
    memory takes 0.97.
    Beside gradients of captured tensors more heads start side by side: else all blocks add to the
    same few places (0.69 of the time at 64 columns, 0.82 at 128). So they do in windows of few
    rows: 0.96 (64 columns) and 0.98 (96) for 8k rows, but 1.02 and 1.04 for 32k and 128k.
    The query heads of a group are split over blocks if there is at most one tile per SM, and the
    longest tile took twice the mean: 0.67 of the time (16:2 heads, 8k rows). With twice as many
    tiles the split takes 1.03. With 65 to 96 columns three stages take 0.985 to 1.0.
    """
    structure = problem.structure
    if columns(structure) > 128:
        config = at_sizes(replace(_SPLIT, remat=True), problem)
        if structure.score is None:
            yield _by_product(config)
        yield config
        return
    far = structure.score is None and _walks_far(structure)
    # With two bounds of a window, V in registers spills.
    held = far and not waits_meet()
    # Beside sums of heads, and what is read along diagonals, 128 columns leave none for lse.
    taken = reads_diagonals(structure) or sums_heads(structure)
    early = "" if taken and columns(structure) == 128 else "half"
    few = not _walks_far(structure) and problem.q_len <= _FEW
    narrow = far and 64 < max(structure.head_dims) <= 96
    config = at_sizes(
        replace(
            _WIDE, num_stages=3 if narrow else 2, head_parts=_parts_of_groups(problem),
            ds_stages=2, dq_tma=True, ds_first=True, persistent=True, remat=True,
            early_lse=early, dp_rs=held, waves=16 if structure.grads or few else 4,
        ),
        problem,
    )  # fmt: skip
    if held and problem.Hq == problem.Hkv and columns(structure) == 64:
        rows = problem.q_len // problem.B
        if rows >= _LONG:
            yield replace(config, BLOCK_M=_TALL.BLOCK_M, dp_rs=False)
        config = replace(config, dp_rs=rows >= _SHORT)
    yield config


def _parts_of_groups(problem: Problem) -> int:
    """The blocks over which a pack's groups of query heads are split, for two tiles per SM."""
    tiles, parts = sizes_of_launch(problem, _WIDE)["num_tiles"] * problem.Hkv, 1
    while tiles * parts < 2 * BLOCKS_AT_ONCE and parts < _MOST_PARTS:
        parts *= 2
    return parts


def _by_copy_engine(config: HopperBackwardConfig, structure: Structure) -> HopperBackwardConfig:
    """The config with the knobs for dq_tma, as measured on an H200; unchanged with diagonals.

    Where a block walks most rows of a head, without a mask and with a causal one, each warpgroup
    hands on its half of dQ by itself. At 64 columns persistent blocks are faster than that: 0.92
    to 0.98 of its time, without a mask with V in registers. At 128 columns half of V in registers,
    half of lse read early and dS stored first take 0.96 of the time, and blocks of a head that
    begin at different rows 0.98. Blocks of heads of up to 96 columns are persistent beside V in
    registers: 0.97 (D 80 and 96, causal) and 0.96 (D 96). Beside a score_mod dS stored first
    spills nothing: 0.77 (soft-capping) and 0.96 (ALiBi).
    Where a mask joins few rows to each key, as documents and windows do, blocks are persistent,
    more heads start side by side, and ends of runs that are blocks are trimmed: 0.88 (documents)
    and 0.95 (a window) of the time, and with dS stored first as well 0.65 to 0.96 beside a
    score_mod. At 128 columns half of V in registers takes 0.97 beside a window, and 0.98 beside
    documents of which each row sees the past; beside other masks it may spill.
    With dropout tiles of 64 x 128 store dS first, and then have registers for lse. Tall ones have
    none, nor has Triton 3.9's loop.
    """
    if reads_diagonals(structure):
        return config
    if structure.dropout:
        if config.BLOCK_M == 128 or waits_meet():
            return config
        # Beside a list of blocks or a score_mod there are registers for the order alone.
        bare = structure.score is None and (structure.sparsity is None or structure.sparsity.runs)
        early = "all" if bare and config.mha else "half"
        halves = bare and _walks_far(structure)
        return replace(config, ds_first=True, dq_halves=halves, early_lse=early)
    sparsity = structure.sparsity
    plain, dense = _few_registers(structure), sparsity is None
    tall, wide = config.BLOCK_M == 128, columns(structure) == 128
    # Triton 3.9's loops leave no registers for V.
    held = plain and not waits_meet()
    if _walks_far(structure):
        if tall and config.mha:
            return replace(config, persistent=True, ds_first=True, dp_rs=held and dense)
        # Beside lists of single blocks there are no registers for it either.
        if held and wide and (sparsity is None or sparsity.runs):
            config = replace(config, dp_rs=True, early_lse="half", shift_rows=dense)
        # Without mods and V in registers the other order is faster.
        first = tall or config.dp_rs or not (plain and dense)
        if config.dp_rs and config.mha and max(structure.head_dims) <= 96:
            # Causal and narrower still, all of lse: 0.986 to 0.99 (D 80, 16k, H200).
            early = "all" if not dense and max(structure.head_dims) <= 80 else config.early_lse
            return replace(config, persistent=True, ds_first=True, early_lse=early)
        return replace(config, dq_halves=True, ds_first=first)
    if sparsity is None or not sparsity.runs or structure.mask is None:
        return config
    band, rest = band_and_rest(structure.mask.mod.expr)
    trimmed = rest is not None
    walks = replace(config, waves=4, ds_first=True, persistent=config.mha, trimmed=trimmed)
    beside = structure.score is None and band is not None and not waits_meet()
    return replace(walks, dp_rs=beside and wide and config.mha)


def axes(problem: Problem, every: bool) -> Iterator[HopperBackwardConfig]:
    """The configs that a search may try; every: all settings of the knobs on all tiles.

    Else it varies nine fields of the defaults at most: BLOCK_M, num_stages, and those of `_forms`.
    The others follow from the structure, as the docstrings of the defaults say.
    """
    if columns(problem.structure) > 128:
        yield at_sizes(_ODD, problem)
    if every:
        for rows, keys, stages, ds in product((64, 128), (64, 128), (1, 2, 3), (1, 2)):
            config = at_sizes(HopperBackwardConfig(rows, keys, stages, ds_stages=ds), problem)
            for each in turned(config, problem.structure):
                yield at_sizes(each, problem)
        return
    starts = list(defaults(problem))
    yield from starts
    if _fits_tall_keys(problem.structure):
        yield at_sizes(_LEAN, problem)
        starts = [each for each in starts if each.BLOCK_N == 64]
    first = {each.BLOCK_M: each for each in reversed(starts)}
    tall = () if columns(problem.structure) > 64 else (_TALL.BLOCK_M,)
    for rows, stages in product((*tall, _WIDE.BLOCK_M), (2, 3)):
        start = first.get(rows) or replace(starts[0], BLOCK_M=rows)
        yield from _forms(replace(start, num_stages=stages), problem.structure)


def _forms(start: HopperBackwardConfig, structure: Structure) -> Iterator[HopperBackwardConfig]:
    """A tile with all settings of what a search varies on it; the rest stays as it is."""
    off_on = False, True
    if columns(structure) > 128:
        plain = replace(start, by_product=False)
        for pipelined, early, remat in product(PIPELINED, ("", "all"), off_on):
            yield replace(plain, pipelined=pipelined, early_lse=early, remat=remat)
        if not (structure.dropout or structure.grads):
            yield _by_product(plain)
        return
    for stays, stored, held, early in product(off_on, off_on, off_on, EARLY):
        form = replace(start, persistent=stays, ds_first=stored, dp_rs=held, early_lse=early)
        # Blocks that stay store dK by way of two tiles of dS.
        ds = 2 if stays else start.ds_stages
        form = replace(form, ds_stages=ds, dq_halves=False, waves=1, trimmed=False)
        yield form
        if _walks_far(structure):
            yield replace(form, dq_halves=not stays)
            continue
        # Where a block walks few rows, its ends and the last wave count.
        yield replace(form, waves=4)
        if structure.sparsity is not None and structure.sparsity.runs:
            yield replace(form, waves=4, trimmed=True)
            yield replace(form, waves=16, trimmed=True)


def _by_product(config: HopperBackwardConfig) -> HopperBackwardConfig:
    return replace(config, by_product=True, pipelined="", early_lse="", remat=True)


def _fits_tall_keys(structure: Structure) -> bool:
    """True if dK and dV of 128 keys leave registers, of heads above 128 columns."""
    return 128 < structure.head_dim_qk <= LEAN_COLUMNS and structure.head_dim_v <= 128


def _fits_odd_keys(structure: Structure) -> bool:
    """True of heads of 192 columns at most whose dK and dV of 96 keys fill a warpgroup each."""
    qk, v = map(multiplied_columns, structure.head_dims)
    return qk == LEAN_COLUMNS >= v and not bounds_views()


def _is_bare(structure: Structure) -> bool:
    """True if blocks walk far in runs of tiles, in loops with the registers of Triton 3.6."""
    runs = structure.sparsity is None or structure.sparsity.runs
    return runs and _few_registers(structure) and _walks_far(structure) and not waits_meet()


def _keeps_weights(problem: Problem) -> bool:
    return problem.structure.dtype != "float16" or problem.kv_len <= _FP16_KEYS


def _walks_far(structure: Structure) -> bool:
    """True if a block walks most rows of a head: without a mask, or with a causal one."""
    if structure.mask is None:
        return True
    band = band_of(structure.mask.mod.expr)
    return band is not None and None in (band.low, band.high)


def _few_registers(structure: Structure) -> bool:
    """True if mods take no registers: no score_mod, and no mask_mod but a band."""
    mask = structure.mask
    return structure.score is None and (mask is None or band_of(mask.mod.expr) is not None)


class _Backward(KernelFamily[HopperBackwardConfig]):
    name = "hopper_backward"
    kind: Kind = "backward"
    language: Language = "gluon"
    limits = LIMITS

    def offered(self, device: Device) -> bool:
        return device.has_wgmma and offered()

    def defaults(self, problem: Problem, device: Device) -> Iterator[HopperBackwardConfig]:
        return defaults(problem)

    def axes(
        self, problem: Problem, device: Device, effort: Effort
    ) -> Iterator[HopperBackwardConfig]:
        return axes(problem, effort == "exhaustive")

    def options_of(self, config: HopperBackwardConfig) -> dict[str, int | bool | str]:
        return {"BACKEND": "GLUON"}

    def at_sizes(
        self,
        config: HopperBackwardConfig,
        measured: Problem,
        problem: Problem,
        device: Device,
    ) -> HopperBackwardConfig:
        return at_sizes(config, problem)

    grid = staticmethod(backward_grid)
    render = staticmethod(render)

    def around(self, problem: Problem, config: HopperBackwardConfig, device: Device) -> Around:
        """dq is added up in fp32, in the order in which threads hold it."""
        structure = problem.structure
        ragged, sizes = structure.ragged_kv, sizes_of_launch(problem, config)
        tiles = (1 if ragged else problem.B) * problem.Hq * sizes["num_queries"]
        rows = config.BLOCK_M * multiplied_columns(structure.head_dim_qk) // SUMS_OF_A_ROW
        scratch = [
            ("STATS", (1, 1, tiles, 2 * config.BLOCK_M)),
            ("DQ_ACC", (1, tiles, rows, SUMS_OF_A_ROW)),
        ]
        if config.dq_tma:
            scratch.append((config.flags, (1, 1, tiles, 1 + config.dq_halves)))
        if config.persistent:
            scratch.append(("WORK_COUNTER", (1, 1, 1, 4)))
        before, through_lse = (
            render_before(structure, config, device, each) for each in (False, True)
        )
        after = render_after(structure, config, device)
        skips = skips_vanished(structure, config)
        blocks = (config.BLOCK_M, config.BLOCK_N) if skips else None
        trim = render_trim(structure, config, device) if trims_runs(structure, config) else None
        if ragged:
            trim = render_key_tiles(structure, config, device)
            scratch.append(("KEY_TILES", (1, 1, 1 + sizes["num_tiles"], KEY_TILE_WORDS)))
            scratch.append(("ROW_TILES", (1, 1, sizes["num_queries"], 2)))
        sums = None
        if config.head_parts > 1:
            every = sizes["num_tiles"] * config.BLOCK_N
            for name, width in zip(PARTIAL_GRADIENTS, structure.head_dims, strict=True):
                scratch.append((name, (1, sizes["kv_units"], every, width)))
            programs = every // PART_ROWS * problem.Hkv
            sums = render_sum_parts(structure, config, device), programs
        return Around((before, through_lse), tiles, after, tuple(scratch), blocks, trim, sums)

    def bind(
        self, problem: Problem, config: HopperBackwardConfig, grid: Geometry
    ) -> dict[str, Any]:
        return sizes_of_launch(problem, config)

    def made_deterministic(
        self, config: HopperBackwardConfig, structure: Structure
    ) -> HopperBackwardConfig | None:
        """At up to 128 columns: shared memory has no room for a tile of dQ of 256."""
        if columns(structure) > 128:
            return None
        stages = min(config.num_stages, 3)
        return replace(
            config,
            BLOCK_M=64,
            num_stages=stages,
            dq_halves=False,
            ds_first=False,
            dq_tma=True,
            deterministic=True,
            waves=1,
            persistent=False,
            dp_rs=False,
            trimmed=False,
            remat=True,
            by_product=False,
        )

    def launch_key(self, config: HopperBackwardConfig) -> tuple[object, ...]:
        return config.BLOCK_M, config.BLOCK_N, config.waves, config.deterministic

    def short(self, config: HopperBackwardConfig) -> str:
        """64x128 s2, then the form that sizes allow, and the words of what is turned."""
        form = ["mha"] * config.mha + ["even"] * config.even_n
        tile = f"{config.BLOCK_M}x{config.BLOCK_N} s{config.num_stages}"
        ahead = [f"pipelined-{config.pipelined}"] if config.pipelined else []
        return " ".join([tile, *form, *ahead, *words(replace(config, pipelined=""))])


BACKWARD = _Backward()
