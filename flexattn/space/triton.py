"""The Triton templates' configs: why one cannot run, where to start, and which ones to try."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from flexattn.device import Device
from flexattn.errors import ConfigError
from flexattn.mods.expr import depending, walk
from flexattn.problem import Problem, Structure
from flexattn.space.config import Config, DecodeConfig, PrefillConfig, padded, pieces

# Barriers, scratch of reductions and layout changes, beside the tiles themselves.
SHARED_SLACK = 2048
# Addresses, loop state, row statistics and what the mods hold, beside the tiles themselves.
WGMMA_SLACK, MMA_SLACK, KEYS_SLACK, MFMA_SLACK, FMA_SLACK = 26, 40, 100, 120, 24
# Beyond the static default, configs leave registers for mods heavier than those measured.
HEADROOM = 0.75
# Indices of rows and keys, where a mod asks for them.
INDEX_REGISTERS = 8


def reasons(config: Config, structure: Structure, device: Device) -> list[str]:
    """Why a config cannot run for a structure on a device; an empty list when it can."""
    found = _shape_reasons(config)
    if found:
        return found
    found += _sparse_reasons(config, structure)
    if isinstance(config, PrefillConfig) and config.use_tma:
        found += _tma_reasons(structure, device)
    shared = shared_memory(config, structure, device)
    if shared > device.shared_memory:
        found.append(
            f"shared memory: about {shared} bytes, {device.name} has {device.shared_memory}"
        )
    registers = register_estimate(config, structure, device)
    limit = min(device.max_registers, device.registers // (device.warp_size * config.num_warps))
    if registers > limit:
        found.append(f"registers: about {registers} a thread, {device.arch} has {limit}")
    return found


def _shape_reasons(config: Config) -> list[str]:
    found = [
        f"{name}={size} is not a power of two of at least 16"
        for name, size in (("BLOCK_M", config.BLOCK_M), ("BLOCK_N", config.BLOCK_N))
        if size < 16 or size & (size - 1)
    ]
    if config.num_warps not in (1, 2, 4, 8, 16):
        found.append(f"num_warps={config.num_warps} is not one of 1, 2, 4, 8, 16")
    if not 1 <= config.num_stages <= 8:
        found.append(f"num_stages={config.num_stages} is not between 1 and 8")
    return found


def _sparse_reasons(config: Config, structure: Structure) -> list[str]:
    """A tile never spans two blocks of a mask; it may cover one that no tile divides."""
    sparsity = structure.sparsity
    if sparsity is None:
        return []
    rows = sparsity.q_block * structure.packed_heads
    return [
        f"{name}={size} is wider than the mask's block of {block}"
        for name, size, block in (
            ("BLOCK_M", config.BLOCK_M, rows),
            ("BLOCK_N", config.BLOCK_N, sparsity.kv_block),
        )
        if size > _power_above(block)
    ]


def _tma_reasons(structure: Structure, device: Device) -> list[str]:
    layout = structure.layout
    found = []
    if not device.has_tma:
        found.append(f"use_tma: {device.arch} has no TMA")
    contiguous = layout.q_contiguous and layout.k_contiguous and layout.v_contiguous
    if not (layout.aligned and contiguous):
        found.append("use_tma: q, k, v must have inner stride 1, the rest multiples of 16 bytes")
    for head_dim in (structure.head_dim_qk, structure.head_dim_v):
        if len(pieces(head_dim)) > 1 or pieces(head_dim)[0][1] > 256:
            found.append(f"use_tma: head dimension {head_dim} is not one tile of at most 256")
    return found


def shared_memory(config: Config, structure: Structure, device: Device) -> int:
    """Bytes of shared memory a config needs: Q, P on its way to a product, K and V ahead of it.

    Measured on compiled kernels of every arch: exact but for the slack where nothing is loaded
    by a mod. wgmma reads K and V in place, so the tiles in use count too; one stage holds either.
    """
    itemsize = structure.itemsize
    qk, v = padded(structure.head_dim_qk), padded(structure.head_dim_v)
    q_tile = config.BLOCK_M * qk * itemsize
    p_tile = config.BLOCK_M * config.BLOCK_N * itemsize
    wgmma = _uses_wgmma(config, structure, device)
    if loads_tiles(structure):
        p_tile = max(p_tile, config.BLOCK_M * config.BLOCK_N * 4)
    elif wgmma and config.BLOCK_M >= 16 * config.num_warps:
        p_tile = 0  # P stays in the registers of the warps that made it
    held = max(qk, v)
    if config.num_stages > 1:
        held = (config.num_stages - (not wgmma)) * (qk + v)
    tiles = config.BLOCK_N * held * itemsize
    if device.backend == "hip":
        return max(q_tile, tiles + p_tile)
    return q_tile + tiles + p_tile + SHARED_SLACK


def _uses_wgmma(config: Config, structure: Structure, device: Device) -> bool:
    """A warpgroup multiplies 64 rows, with the accumulator in registers and K in shared memory."""
    matrix = device.has_wgmma and structure.itemsize == 2
    return matrix and config.BLOCK_M >= 64 and config.num_warps >= 4


def loads_tiles(structure: Structure) -> bool:
    """Whether a mod reads a value of its own for every score, which takes a tile to rearrange."""
    for captures in (structure.score, structure.mask):
        if captures is None:
            continue
        nodes = list(walk(captures.mod.expr))
        by_key, by_row = (
            depending(nodes, ("score", "kv_idx")),
            depending(nodes, ("score", "q_idx")),
        )
        for node in nodes:
            if node.op == "load" and node in by_key and node in by_row:
                return True
    return False


def register_estimate(config: Config, structure: Structure, device: Device) -> int:
    """Registers of one thread, roughly: accumulator and scores in fp32, P, and operands.

    Fitted to compiled kernels: it passes no config that spills in a loop, and refuses few others.
    """
    threads = device.warp_size * config.num_warps
    rows, width = config.BLOCK_M, config.BLOCK_N
    qk = padded(structure.head_dim_qk)
    words = structure.itemsize / 4
    acc = rows * padded(structure.head_dim_v) / threads
    scores = rows * width / threads
    p = scores * words
    if structure.dtype == "float32" and not structure.tf32:
        # Without matrix instructions a thread holds operands of several steps at once.
        ahead = 1.5 if config.num_stages > 1 else 1
        return int(3 * (acc + scores + p + ahead * width * qk / threads)) + FMA_SLACK
    if _uses_wgmma(config, structure, device):
        asked = structure.score is not None or structure.mask is not None
        slack = WGMMA_SLACK + 2 * config.num_stages + INDEX_REGISTERS * asked
        return int(acc + scores + p) + slack
    q, keys = rows * qk * words / threads, width * qk * words / threads
    if device.backend == "hip":
        return int(1.5 * (acc + scores + p + q + 2 * keys)) + MFMA_SLACK
    if config.num_warps * 16 > rows:
        # Warps beyond the rows share out the keys: fragments of K and V, and their addresses.
        return int(acc + scores + p + 1.5 * keys) + KEYS_SLACK
    return int(acc + scores + p + q + width * words / 2) + MMA_SLACK


def candidates(problem: Problem, device: Device) -> Iterator[Config]:
    """The static default, then what to fall back to if the compiler proves the estimates wrong.

    Lengths do not matter, so a new length needs no new kernel; for decode, q_len decides
    between two tile heights. Raises ConfigError with the reasons when nothing can run.
    """
    structure = problem.structure
    rejected: list[str] = []
    offered = False
    for candidate in _preferences(problem, device):
        config = suited(candidate, structure)
        found = reasons(config, structure, device)
        if not found:
            offered = True
            yield config
        rejected.append(f"{config}: {'; '.join(found)}")
    if not offered:
        raise ConfigError(
            f"no config of the {structure.kind} template fits {problem.describe()}",
            "\n        ".join(rejected[-4:]),
            "use smaller head dimensions",
        )


def default(problem: Problem, device: Device) -> Config:
    """The static default: the first config of the arch's preferences that can run here."""
    return next(candidates(problem, device))


def space(problem: Problem, device: Device) -> Iterator[Config]:
    """Every config worth trying that can run, each once, the static default first."""
    first = default(problem, device)
    yield first
    seen = {first}
    limit = device.max_registers
    for candidate in _grid(problem, device):
        config = suited(candidate, problem.structure)
        tight = register_estimate(config, problem.structure, device) > HEADROOM * limit
        if config not in seen and not tight and not reasons(config, problem.structure, device):
            seen.add(config)
            yield config


def suited(config: Config, structure: Structure) -> Config:
    """The config with its tiles cut to the mask's blocks."""
    sparsity = structure.sparsity
    if sparsity is None:
        return config
    rows = sparsity.q_block * structure.packed_heads
    return replace(
        config,
        BLOCK_M=_tile_for(config.BLOCK_M, rows),
        BLOCK_N=_tile_for(config.BLOCK_N, sparsity.kv_block),
    )


def _tile_for(tile: int, block: int) -> int:
    """The widest tile not above this one that divides the block, or else that covers it."""
    dividing = block & -block
    if dividing >= 16:
        return min(tile, dividing)
    return min(tile, _power_above(block))


def _power_above(block: int) -> int:
    return max(16, 1 << (block - 1).bit_length())


def _preferences(problem: Problem, device: Device) -> Iterator[Config]:
    structure = problem.structure
    widest = max(structure.head_dim_qk, structure.head_dim_v)
    if structure.kind == "decode":
        yield from _decode_preferences(problem, widest, device)
        return
    if structure.dtype == "float32":
        # Without matrix instructions the tile lives in registers: small tiles.
        for shape in ((64, 32, 4, 2), (64, 32, 8, 2), (32, 32, 8, 2), (32, 16, 4, 1)):
            yield PrefillConfig(*shape)
        yield from (PrefillConfig(16, 16, 4, 1), PrefillConfig(16, 16, 8, 1))
        return
    table = _PREFILL.get(device.arch, _PREFILL["small"])
    if device.backend == "hip":
        table = _PREFILL["hip"]
    for limit, configs in table:
        if widest <= limit:
            yield from configs
            break
    yield from (PrefillConfig(64, 32, 8, 1), PrefillConfig(32, 32, 8, 1))
    yield from (PrefillConfig(32, 16, 4, 1), PrefillConfig(16, 16, 4, 1))
    yield PrefillConfig(16, 16, 8, 1)


# Widest head dimension, then configs by preference: measured on an H200; elsewhere chosen to
# fit 99 KiB of shared memory, or the LDS of CDNA, without spills.
_PREFILL: dict[str, tuple[tuple[int, tuple[PrefillConfig, ...]], ...]] = {
    "sm_90": (
        (64, (PrefillConfig(64, 128, 4, 3, True), PrefillConfig(128, 64, 4, 3))),
        (
            128,
            (
                PrefillConfig(128, 64, 4, 2, True),
                PrefillConfig(128, 128, 8, 3, True),
                PrefillConfig(128, 128, 8, 2, True),
                PrefillConfig(128, 128, 8, 2),
                PrefillConfig(128, 64, 8, 2),
            ),
        ),
        (256, (PrefillConfig(128, 64, 8, 2, True), PrefillConfig(128, 64, 8, 2))),
        (576, (PrefillConfig(64, 32, 8, 2), PrefillConfig(64, 32, 8, 1))),
    ),
    "small": (
        (64, (PrefillConfig(128, 64, 4, 3),)),
        (128, (PrefillConfig(64, 64, 4, 2), PrefillConfig(128, 32, 8, 2))),
        (256, (PrefillConfig(64, 32, 8, 2), PrefillConfig(32, 32, 4, 2))),
        (576, (PrefillConfig(32, 16, 8, 1),)),
    ),
    "hip": (
        (64, (PrefillConfig(128, 64, 4, 1),)),
        (128, (PrefillConfig(128, 64, 8, 1), PrefillConfig(64, 32, 4, 1))),
        (256, (PrefillConfig(64, 32, 4, 1),)),
        (576, (PrefillConfig(32, 16, 4, 1),)),
    ),
}


def _decode_preferences(problem: Problem, widest: int, device: Device) -> Iterator[Config]:
    rows = problem.q_len * problem.structure.packed_heads
    heights = (16,) if rows <= 16 else (64, 32, 16)
    wide = device.shared_memory > 160 * 1024 and problem.structure.dtype != "float32"
    for height in heights:
        warps = 8 if height * widest >= 64 * 256 else 4
        if wide:
            width = 128 if widest <= 128 else 64
            yield DecodeConfig(height, width if height == 16 else 64, warps, 3)
        if widest <= 128:
            yield DecodeConfig(height, 64, warps, 2)
        yield from (DecodeConfig(height, 32, warps, 2), DecodeConfig(height, 32, 8, 2))
        yield DecodeConfig(height, 16, warps, 1)
        yield DecodeConfig(height, 16, 8, 1)


def _grid(problem: Problem, device: Device) -> Iterator[Config]:
    if problem.structure.kind == "decode":
        # Two warps would hold all keys of a tile in too few registers.
        for width, warps, stages in product((32, 64, 128), (4, 8), (2, 3, 4)):
            first = default(problem, device)
            yield DecodeConfig(first.BLOCK_M, width, warps, stages)
        return
    # One stage loads nothing ahead, and on NVIDIA spills where two do not.
    depths = (1, 2) if device.backend == "hip" else (2, 3)
    for rows, width, warps, stages, tma in product(
        (64, 128), (32, 64, 128), (4, 8), depths, (False, True)
    ):
        # Two warps on the same 16 rows pay where the accumulator needs them, and only there.
        needless = warps * 16 > rows and problem.structure.head_dim_v <= 128
        if not needless and (tma or not device.has_tma or not _tma_works(problem, device)):
            yield PrefillConfig(rows, width, warps, stages, tma)


def _tma_works(problem: Problem, device: Device) -> bool:
    return not _tma_reasons(problem.structure, device)
