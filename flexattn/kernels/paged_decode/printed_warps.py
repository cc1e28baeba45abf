"""Feasibility of paged decode where each warp has a part of a tile for itself.

Printed of stated/serving_warps.py, which says what the numbers mean, by `make golden`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from flexattn.kernels.base.rule import Rule, Rules


@dataclass(slots=True, eq=False, repr=False)
class RuleCase:
    """The numbers of one case."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    keys_per_warp: int
    num_stages: int
    per_sm: int
    least: int
    goes_round: bool
    known_policy: bool
    awaits: bool
    itemsize: int
    kv_itemsize: int
    qk_dim: int
    v_dim: int
    chunks: int
    kv_heads: int
    requests: int
    rows: int
    same_dtype: bool
    masked: bool
    aligned: bool
    shared_kv: bool
    prefix: bool
    offset: bool
    interpreted: bool
    capability: int
    programs: int
    thread_registers: int
    # Known where the rules of the shape hold.
    held: int = 0


def held(c: RuleCase) -> int:
    """Registers of a thread that hold a tile, K, V and Q in words, and the ends of requests."""
    kv_tiles = floor(c.keys_per_warp * c.kv_itemsize * (c.qk_dim + c.v_dim) / 128)
    widened = 32 if c.kv_itemsize == 1 else 0
    product_rows = c.BLOCK_M * c.chunks
    scores = floor(c.chunks * c.keys_per_warp * product_rows / 16)
    q_and_output = floor(c.BLOCK_M * (c.v_dim + floor(c.qk_dim / 2)) / 32)
    # Of requests.
    ends = (2 if c.masked else 1) * floor(c.requests / 32)
    return ends + kv_tiles + q_and_output + scores + widened


def estimate(c: RuleCase) -> None:
    """Write into a case what its config takes."""
    c.held = held(c)


RULES: Rules[RuleCase] = Rules(
    shape=(),
    fit=(
        Rule(
            "arch",
            "warp-private kernels run on NVIDIA's sm_80 to sm_90",
            lambda c: c.interpreted or (c.capability >= 80 and c.capability <= 90),
        ),
        Rule(
            "rows",
            "BLOCK_M={BLOCK_M} is 8 or 16, where heads have 256 columns 4 or 8",
            lambda c: c.BLOCK_M * c.chunks in (8, 16),
        ),
        Rule("warps", "num_warps is 1, 2, 4 or 8", lambda c: c.num_warps in (1, 2, 4, 8)),
        Rule(
            "keys",
            "each warp has {keys_per_warp} of 16, 32 or 64 keys, of 256 columns half of them",
            lambda c: c.chunks * c.keys_per_warp in (16, 32, 64),
        ),
        Rule(
            "keys",
            "warps have equal shares of BLOCK_N",
            lambda c: c.BLOCK_N == c.keys_per_warp * c.num_warps,
        ),
        Rule(
            "stages",
            "num_stages is 1: a warp holds one tile of K and V",
            lambda c: c.num_stages == 1,
        ),
        Rule(
            "programs", "per_sm and least are at least 1", lambda c: c.least >= 1 and c.per_sm >= 1
        ),
        Rule(
            "merge",
            "fewer than 4 warps have no registers to merge 16 rows, or 8 of 256 columns",
            lambda c: c.interpreted or c.num_warps >= 4 or c.BLOCK_M * c.chunks == 8,
        ),
        Rule(
            "split_policy",
            "split_policy={split_policy!r} is heads or round",
            lambda c: c.known_policy,
        ),
        Rule(
            "combine",
            "parts are awaited where tiles are split by heads or round",
            lambda c: c.awaits,
        ),
        Rule(
            "dtype",
            "q has 16 bits, K and V are as q or have 8",
            lambda c: c.itemsize == 2 and (c.same_dtype or c.kv_itemsize == 1),
        ),
        Rule(
            "dtype",
            "K and V of 8 bits are widened by instructions of sm_89 and newer",
            lambda c: c.interpreted or c.capability >= 89 or c.kv_itemsize != 1,
        ),
        Rule(
            "head dimension",
            "head dimensions ({qk_dim}, {v_dim}) are 64 or 128, or 128 or 256",
            lambda c: (
                (c.qk_dim == 64 * c.chunks or c.qk_dim == 128 * c.chunks)
                and (c.v_dim == 64 * c.chunks or c.v_dim == 128 * c.chunks)
            ),
        ),
        Rule(
            "merge",
            "one warp has too few threads to merge rows of 256 values",
            lambda c: 128 * c.num_warps >= c.v_dim,
        ),
        Rule(
            "layout",
            "K and V are apart, and aligned to 16 bytes",
            lambda c: c.aligned and not c.shared_kv,
        ),
        Rule(
            "requests",
            "of at most 1024 requests, no shared prefix",
            lambda c: not c.prefix and c.requests <= 1024,
        ),
        Rule(
            "registers",
            "{held} registers hold a thread's K, V, Q, scores and output",
            lambda c: c.interpreted or c.held + 40 <= c.thread_registers,
        ),
        Rule(
            "heads",
            "{kv_heads} KV heads have programs of their own",
            lambda c: c.kv_heads <= c.programs,
        ),
        Rule(
            "round",
            "tiles of one request and one tile of rows go round",
            lambda c: (
                not c.goes_round
                or (not c.offset and c.requests == 1 and c.rows <= c.BLOCK_M and c.rows > 0)
            ),
        ),
    ),
    worth=(),
)
