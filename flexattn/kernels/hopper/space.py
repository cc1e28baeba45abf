"""Configs of Hopper's prefill: where to start, by structure and by sizes, and what is searched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from math import ceil

from flexattn.device import Device
from flexattn.kernels.base.config import orders, turned
from flexattn.kernels.base.features import loads_by_key, loads_tiles, without_blocks
from flexattn.kernels.base.sizes import key_steps, waves
from flexattn.kernels.hopper.config import (
    BOX,
    BOXED_REGISTERS,
    CONSUMER_REGISTERS,
    CONSUMER_ROWS,
    HOPPER_ORDERS,
    TWO_BLOCKS_REGISTERS,
    WIDEST,
    HopperPrefillConfig,
    TileScheduler,
    fit_to_mask,
    padded_columns,
    shares_keys,
    whole_boxes,
)
from flexattn.kernels.hopper.limits import LIMITS, QK_DIMS, V_DIMS
from flexattn.kernels.ptx.assembler import assemblers, preferred
from flexattn.mods.analysis.mask_form import mask_form
from flexattn.problem import INDEX_RANGES, Problem, Structure

# Heads of a section where tiles of all heads are to lie side by side.
EVERY_HEAD = 64


def config(
    consumers: int, width: int, stages: int, scheduler: TileScheduler = "grid", held: int = 0
) -> HopperPrefillConfig:
    """A config with the registers that its number of consumers leaves each of them.

    Rescaling lazily gains 2 to 11 % on the H200, at every size and with every mod.
    """
    return HopperPrefillConfig(
        consumers,
        width,
        stages,
        CONSUMER_REGISTERS[consumers],
        tile_scheduler=scheduler,
        q_in_regs=held,
        lazy_rescale=True,
    )


def preferences(structure: Structure, pack_gqa: bool = False) -> Iterator[HopperPrefillConfig]:
    """Configs to start from, best first, with tiles cut to the mask's blocks.

    pack_gqa: the same where consumers have a head each, so that a block of rows is cut less often.
    """
    for tile in _tiles(structure):
        found = completed(tile, structure, pack_gqa)
        # Of a block that three do not divide the next tile has two.
        if tile.consumers < 3 or found.consumers == tile.consumers:
            # One consumer, as blocks of 64 rows leave, has nobody to take turns with but that of
            # another block, if shared memory holds both: 1.35 to 1.4 of the speed.
            if found.consumers == 1 and found.num_stages == 2 and structure.sparsity is not None:
                yield replace(found, consumer_regs=TWO_BLOCKS_REGISTERS)
            yield found


def _tiles(structure: Structure) -> tuple[HopperPrefillConfig, ...]:
    """The tiles to start from, best first."""
    widest = _widest(structure)
    boxed = v_box(structure) and (64 < widest <= 128 or structure.head_dim_v > 128)
    table = _IN_BOXES if boxed else _PREFERRED
    moves = _moves(structure)
    if structure.e4m3_weights and widest > 128:
        table = _E4M3_WEIGHTS
    elif structure.fp8 and moves and widest <= 128:
        return _E4M3_MOVING
    found = next((configs for limit, configs in table if widest <= limit), ())
    # Of a mask that moves each of three consumers has a part of a run of its own, which rules out
    # the pipeline.
    return tuple(each for each in found if each.consumers < 3 or not moves)


def _widest(structure: Structure) -> int:
    """The wider head dimension; in eight bits the columns of its tile."""
    widest = max(structure.head_dim_qk, structure.head_dim_v)
    return padded_columns(widest) if structure.fp8 else widest


def completed(
    tile: HopperPrefillConfig, structure: Structure, pack_gqa: bool = False
) -> HopperPrefillConfig:
    """A tile, cut to the mask's blocks, with all that follows from it and the structure.

    A search tries other tiles, orders, pack_gqa, lazy_rescale, and other ways to compile. The rest
    won little in the records of an H200: docs/tuning.md has a table.
    """
    structure = without_blocks(structure, (CONSUMER_ROWS, tile.BLOCK_N))
    widest = _widest(structure)
    terms = structure.terms
    diagonal = terms is not None and terms.diagonal is not None
    box, exact = v_box(structure), structure.fp8 and not structure.e4m3_weights
    tile = _in_parts(tile, structure)
    if box:
        held = min(tile.q_in_regs, structure.head_dim_qk // 32 * 32)
        tile = replace(_in_boxes(tile, box), q_in_regs=held)
    if structure.fp8:
        tile = replace(tile, q_in_regs=0)
    found = fit_to_mask(replace(tile, pack_gqa=pack_gqa), structure)
    unit = CONSUMER_ROWS, found.BLOCK_N
    reads = loads_by_key(structure, unit) or loads_tiles(structure, unit)
    # What is held from before the scores are there takes registers that they need.
    lazy = _rescales_lazily(structure, widest, reads or diagonal)
    found = replace(found, lazy_rescale=lazy)
    if structure.sparsity is not None:
        # Walking lists takes the registers that a part of Q would; runs end 2 % earlier at
        # D 256. In boxes registers are left, and 64 rows of Q are as many bytes as 64 keys.
        stays = box and structure.sparsity.runs
        # Some tiles are longer: the longest start first, and none waits for a block.
        section = EVERY_HEAD if _moves(structure) or widest <= 64 else found.l2_swizzle
        found = replace(
            found,
            q_in_regs=found.q_in_regs if stays else 0,
            tile_scheduler="dynamic",
            order="sections",
            l2_swizzle=section,
        )
    elif widest <= 128 or box or structure.fp8:
        # A block that stays begins a tile of rows while it ends the one before. Two consumers
        # end no later, in fp8 sooner, where it takes the next that is left; nor do boxes of
        # 64 columns and more, 1 to 6 % sooner up to 192, and e4m3 at 256, 2 to 5 %.
        many = found.consumers > 2 and widest <= 64 and not structure.fp8
        found = replace(found, tile_scheduler="static" if many else "dynamic")
    turns = found.consumers > 1 and (diagonal or _takes_turns(structure, widest, reads))
    # Scores of eight bits leave the tensor cores time: turns of two consumers cost 2 % (causal,
    # D 128, H200), and with e4m3 weights as much where a mask moves.
    if found.consumers == 2 and structure.score is None:
        turns = turns and not (exact and widest == 128)
        turns = turns and not (structure.e4m3_weights and widest > 128 and _moves(structure))
    # Softmaxes of many steps, or whose threads meet, are 2 to 6 % faster where they alternate
    # whole; so is a soft cap beside 256 columns of e4m3 weights.
    capped = structure.e4m3_weights and terms is not None and terms.capped
    computes = structure.score is not None and not reads and (widest <= 128 or capped)
    return replace(
        found,
        ping_pong=turns,
        ping_pong_softmax=computes and turns,
        merge_consumers=_merges(structure, widest),
        ptxas=preferred(),
        cross_tile_pipeline=_crosses(structure, found.tile_scheduler),
    )


def _in_parts(config: HopperPrefillConfig, structure: Structure) -> HopperPrefillConfig:
    """The config for head dimensions above 256. The one stage that K may have is cut in parts of
    whole boxes, about four of them.
    """
    if structure.head_dim_qk <= WIDEST:
        return config
    whole = (parts for parts in (4, 3, 5, 7) if structure.head_dim_qk % (parts * BOX) == 0)
    return replace(
        config,
        v_parts=-(-structure.head_dim_v // WIDEST),
        k_parts=next(whole, 1) if config.num_stages == 1 else 1,
        consumer_regs=min(config.consumer_regs, BOXED_REGISTERS),
    )


def v_box(structure: Structure) -> int:
    """The v_box of a structure: 0 where head dimensions have whole tiles.

    Boxes of 64 are the fewest copies; of the last one products take the first columns alone.
    Between 64 and 128 columns they are 3 to 13 % faster (H200). Elsewhere the widest that are
    whole where products end, as the manual draws operands of wgmma.
    """
    qk, v = structure.head_dim_qk, structure.head_dim_v
    known = qk in QK_DIMS and v in V_DIMS
    boxed = qk % 8 == v % 8 == 0 and max(qk, v) <= 256
    if structure.fp8 or structure.kv_dtype or not boxed or (known and 96 not in (qk, v)):
        return 0
    if v % BOX == 0 or 64 < max(qk, v) <= 128:
        return BOX
    return 32 if whole_boxes(v, 32) == whole_boxes(v, 16) else 16


def _in_boxes(config: HopperPrefillConfig, box: int) -> HopperPrefillConfig:
    """The config with that v_box, and the registers that this leaves its consumers."""
    taken = BOXED_REGISTERS if config.consumers == 2 else config.consumer_regs
    return replace(config, v_box=box, consumer_regs=taken)


def _merges(structure: Structure, widest: int) -> bool:
    """True if one copy of the consumers' code is as fast as one each, which takes twice the time
    to compile: it is 1 to 5 % faster where mods are read and at D 64, and 2 % slower where every
    tile is nothing but products 128 wide (H200).
    """
    plain = structure.score is None and structure.sparsity is None and not structure.fp8
    return not (plain and 64 < widest <= 128) or bool(v_box(structure))


def forms(config: HopperPrefillConfig) -> Iterator[HopperPrefillConfig]:
    """A config, then its tiles compiled otherwise: by another ptxas, then without the pass."""
    yield config
    for ptxas in assemblers():
        if ptxas != config.ptxas:
            yield replace(config, ptxas=ptxas)
    if config.consumers > 1:
        yield replace(config, merge_consumers=not config.merge_consumers)


def _rescales_lazily(structure: Structure, widest: int, reads: bool) -> bool:
    """True if lazy rescaling has registers left beside those of mods' reads, lists or runs."""
    if widest > 192 and reads:
        return False
    sparsity = structure.sparsity
    if widest > WIDEST:
        return sparsity is None or sparsity.runs
    if structure.head_dim_v > 128:
        return True  # tiles of 64 keys
    return not 128 < widest <= 192 or sparsity is None or not reads


def _takes_turns(structure: Structure, widest: int, reads: bool) -> bool:
    """True if one consumer's softmax fills another's products: 2 to 6 % on the H200.

    It does not where products alone, of whole tiles 128 wide, leave the tensor cores no time.
    Along runs it gains 0 to 9 % at D 256, and with lazy_rescale 5 to 9 % at 192/128; with e4m3
    weights 3 % where every row sees all keys.
    """
    if widest > 128:
        sparsity = structure.sparsity
        if structure.e4m3_weights and sparsity is None and structure.score is None:
            return True
        runs = sparsity is not None and sparsity.runs
        dims = structure.head_dim_qk, structure.head_dim_v
        narrow = dims == (192, 128) and structure.score is None
        return runs and not reads and (narrow or dims == (256, 256))
    return widest <= 64 or (widest <= 128 and bool(structure.score or structure.sparsity))


def _crosses(structure: Structure, scheduler: TileScheduler) -> bool:
    """True if cross_tile_pipeline is faster, or nothing that a kernel has.

    It is 6 % faster where every work tile has all keys and products are 128 wide. A mask makes
    work tiles short, and their epilogues, which are then in the loop, many; what a score_mod
    holds in registers it holds from one to the next. Without it those are 2 to 12 % faster.
    """
    widest = _widest(structure)
    if scheduler == "grid" or widest > 128:
        return True
    plain = structure.score is None and structure.sparsity is None
    return widest > 64 and plain and not structure.fp8


def _moves(structure: Structure) -> bool:
    """True if later rows have other keys: then few of all heads' keys are at work at once.

    So it is for windows and documents: tiles of all heads side by side end 1 and 6 % earlier.
    """
    if structure.sparsity is None or not structure.sparsity.runs or structure.mask is None:
        return False
    span = mask_form(structure.mask.mod.expr, INDEX_RANGES).span
    return span.low is not None or span.rest is not None


# Widest head dimension, then configs by preference; the last of each leaves registers for mods.
_PREFERRED: tuple[tuple[int, tuple[HopperPrefillConfig, ...]], ...] = (
    (64, (config(3, 128, 2), config(2, 128, 2), config(2, 64, 2))),
    (128, (config(2, 128, 2), config(2, 64, 3), config(2, 64, 2))),
    (192, (config(2, 128, 2), config(2, 64, 2))),
    (256, (config(2, 64, 2, held=128), config(2, 64, 2), config(2, 32, 2))),
    (576, (config(2, 64, 1), config(2, 32, 2), config(2, 32, 1), config(1, 64, 1))),
)
# The same where P and V are as narrow as K.
_E4M3_WEIGHTS = ((256, (config(2, 128, 2), config(2, 64, 3), config(2, 64, 2), config(2, 32, 2))),)
# Of eight bits up to 128 columns, where a mask moves: three consumers are 4 to 13 % faster (H200).
_E4M3_MOVING = (config(3, 128, 2), config(3, 64, 3), config(2, 128, 2), config(2, 64, 2))
# The same in boxes. Up to 128 columns three consumers have registers for 64 keys each: 16 to 42 %
# faster than two with 128 (H200), 2 to 23 % with a causal mask. Beyond by a count of registers and
# shared memory.
_IN_BOXES: tuple[tuple[int, tuple[HopperPrefillConfig, ...]], ...] = (
    (128, (config(3, 64, 3), config(2, 128, 2), config(2, 64, 2))),
    (160, (config(2, 64, 2, held=160), config(2, 64, 2), config(2, 32, 2))),
    (192, (config(2, 64, 2, held=192), config(2, 64, 2), config(2, 32, 2))),
    (256, (config(2, 64, 2, held=128), config(2, 64, 2), config(2, 32, 2))),
)


def axes(problem: Problem, every: bool) -> Iterator[HopperPrefillConfig]:
    """The preferences, then what a search varies, on tiles cut to the mask's blocks.

    The preferences are also tried with the other way to rescale, with pack_gqa, and with other
    compilers. every: all tiles are tried so too, except with other compilers. Some cannot run.
    """
    structure = problem.structure
    starts = list(preferences(structure))
    shared = preferences(structure, pack_gqa=True)
    yield from starts
    # Scores that rise from tile to tile are weighed twice with lazy_rescale.
    yield from (replace(each, lazy_rescale=not each.lazy_rescale) for each in starts)
    yield from (each for each in shared if each.heads > 1 and shares_keys(problem, each))
    for each in starts:
        yield from forms(each)
    counts, widths, depths = ((2, 3), (64, 128), (2, 3))
    if every:
        counts, widths, depths = ((1, 2, 3), (32, 64, 128), (2, 3, 4))  # type: ignore[assignment]
    if structure.head_dim_qk > WIDEST:
        counts, widths, depths = ((1, 2), (32, 64), (1, 2))
    held = {(each.consumers, each.BLOCK_N): each.q_in_regs for each in reversed(_tiles(structure))}
    for consumers, width, stages, packed in product(
        counts, widths, depths, (False, True)[: 1 + every]
    ):
        tile = config(consumers, width, stages, held=held.get((consumers, width), 0))
        tile = completed(tile, structure, packed)
        if packed and not (tile.heads > 1 and shares_keys(problem, tile)):
            continue
        worth = orders(HOPPER_ORDERS, problem, tile.BLOCK_M, every)
        for order, other in product(worth, (False, True)[: 1 + every]):
            section = tile.l2_swizzle if order == "sections" else 8
            lazy = tile.lazy_rescale != other
            found = replace(tile, order=order, l2_swizzle=section, lazy_rescale=lazy)
            yield from turned(found, structure)


# Tiles of 128 keys up to which softmaxes are rescaled at once: of 64 columns or without a mask, of
# three consumers without one, and of more columns with one.
_FEW_STEPS, _OF_THREE, _FEWER_STEPS = 5, 4, 3.5
# Two consumers end sooner if their waves of tiles have so many rows less than those of three.
_LESS = 0.75


def sized(problem: Problem, device: Device) -> Iterator[HopperPrefillConfig]:
    """The preferences of a structure, and before them what the sizes want more."""
    rules = list(preferences(problem.structure))
    able = [each for each in rules if not LIMITS.violated(each, problem.structure, device)]
    best = _by_sizes(problem, able, device) if able else None
    if best is not None and not LIMITS.violated(best, problem.structure, device):
        yield best
    yield from (each for each in rules if each != best)


def _by_sizes(
    problem: Problem, rules: Sequence[HopperPrefillConfig], device: Device
) -> HopperPrefillConfig:
    """The first preference, or that of `alternatives` which was faster at such sizes (H200)."""
    first, structure = rules[0], problem.structure
    if structure.fp8 or structure.head_dim_qk > WIDEST:
        return first
    dense, steps = structure.sparsity is None, key_steps(problem)
    shared = _sharing(problem, first)
    if shared is not None and waves(problem, device) > 1:
        return shared
    config = first
    for shorter in _shorter(rules):
        rows = [
            ceil(waves(problem, device, each.all_rows)) * each.all_rows
            for each in (shorter, first)
        ]
        if rows[0] < _LESS * rows[1] if dense or first.v_box else steps <= _FEW_STEPS:
            config = shorter
    few = _FEW_STEPS if dense or max(structure.head_dims) <= 64 else _FEWER_STEPS
    if config.consumers > 2:
        few = _OF_THREE * dense
    if config.lazy_rescale and steps <= few:
        return _at_once(config, dense)
    two = not dense and config.consumers == 2
    return _side_by_side(config) if two and steps <= _FEW_STEPS else config


def alternatives(
    problem: Problem, rules: Sequence[HopperPrefillConfig]
) -> Iterator[HopperPrefillConfig]:
    """The first preference with the changes that sizes ask for: five kernels at most.

    Fewer rows of a tile, or heads of a group that share one; each softmax rescaled at once, where
    keys are few; heads side by side where a mask makes their tiles uneven.
    """
    if not rules:
        return
    first, dense = rules[0], problem.structure.sparsity is None
    shorter = list(_shorter(rules))
    yield from shorter
    shared = _sharing(problem, first)
    if shared is not None:
        yield shared
    for each in (first, *shorter):
        if each.lazy_rescale:
            yield _at_once(each, dense)
        if not dense:
            yield _side_by_side(each)


def _shorter(rules: Sequence[HopperPrefillConfig]) -> Iterator[HopperPrefillConfig]:
    """The first preference of fewer rows."""
    return islice((each for each in rules if each.consumers < rules[0].consumers), 1)


def _sharing(problem: Problem, first: HopperPrefillConfig) -> HopperPrefillConfig | None:
    """The first preference whose heads share a tile that the rows of one would half fill."""
    if problem.Hq == problem.Hkv or problem.q_len > first.BLOCK_M // 2:
        return None
    packed = preferences(problem.structure, pack_gqa=True)
    able = (each for each in packed if each.heads > 1 and shares_keys(problem, each))
    return next(able, None)


def _side_by_side(config: HopperPrefillConfig) -> HopperPrefillConfig:
    return replace(config, order="heads", l2_swizzle=8)


def _at_once(config: HopperPrefillConfig, dense: bool) -> HopperPrefillConfig:
    """The config rescaled at once; without a mask also with tiles that end before the next one
    begins, if its blocks stay.
    """
    crosses = config.cross_tile_pipeline and not (dense and config.persistent)
    return replace(config, lazy_rescale=False, cross_tile_pipeline=crosses)
