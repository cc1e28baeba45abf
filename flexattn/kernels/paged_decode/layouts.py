"""Register layouts of the warp-private serving kernel: which thread has which elements."""

from __future__ import annotations

import math

from flexattn.device import Device
from flexattn.kernels.paged_decode.awaiting import UNWRITTEN, await_context
from flexattn.kernels.paged_decode.config import SHORT_ROWS, ServingConfig
from flexattn.kernels.printers.spelling import Dialect, TensorForm
from flexattn.problem.serving import SERVING_ITEMSIZE, WARP_COLUMNS, ServingForm

# Tiles of keys x rows, which each warp has alone. Its language is Gluon, by the name of Triton's.
WARPS_DIALECT = Dialect(
    gluon=True,
    tile=TensorForm("[WARPS, KEYS_PER_WARP, BLOCK_M]", "MMA"),
    key=TensorForm("[WARPS, KEYS_PER_WARP, 1]", "MMA"),
)
# Vectors of parts that a thread awaits at a time.
AWAITED = 16


def serving_layouts(form: ServingForm, config: ServingConfig) -> dict[str, object]:
    """What that kernel's template knows beside what all serving templates do.

    The layouts are those of `mma.m16n8k16`, lane 4 g + j: of its first operand a thread has rows g
    and g + 8 and columns 2 j, 2 j + 1, 2 j + 8, 2 j + 9. K's columns are elements of a head, of
    which a thread reads 16 bytes side by side; V's rows are. Tensors of K, V and Q hold words of
    two elements, or of four of 8 bits: [warps, keys or rows, words].
    """
    if not config.warp_private:
        return {}
    warps, own, height = config.num_warps, config.keys_per_warp, config.BLOCK_M
    inside = _inside(form, config)
    warp = [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]

    def bits(begin: int, end: int, axis: int) -> list[list[int]]:
        """Bases from begin to below end, powers of two, along an axis."""
        found = []
        while begin < end:
            found.append([begin if each == axis else 0 for each in range(3)])
            begin *= 2
        return found

    def linear(registers: list[list[int]], lanes: list[list[int]], *shape: int) -> str:
        return f"tl.DistributedLinearLayout({registers}, {lanes}, {warp}, [], {list(shape)})"

    def paged(registers: list[list[int]], lanes: list[list[int]]) -> str:
        """The keys of a layout as [warps, pages, keys of a page]."""

        def split(base: list[int]) -> list[int]:
            return [0, base[1] // inside, base[1] % inside]

        kept = [split(base) for base in registers if base[1]]
        shape = warps, own // inside, inside
        return linear(kept, [split(base) for base in lanes], *shape)

    in_word = 4 // SERVING_ITEMSIZE[form.kv_dtype]
    # Elements that a thread reads side by side of K, and so of Q, and of V: 8 threads have a row.
    k_side = 4 * in_word
    v_side = min(k_side, form.head_dim_v // (8 * form.chunks))
    q, k, v = form.head_dim_qk // 2, form.head_dim_qk // in_word, form.head_dim_v // in_word
    q_words, v_words = k_side // 2, v_side // in_word
    rows = bits(1, 8, 1)
    k_registers = bits(1, 4, 2) + bits(16, k, 2) + bits(8, own, 1)
    k_lanes = bits(4, 16, 2) + rows
    v_registers = bits(1, v_words, 2) + bits(8 * v_words, v, 2) + bits(1, 2, 1) + bits(8, own, 1)
    v_lanes = bits(2, 8, 1) + bits(v_words, 8 * v_words, 2)
    q_chunk, side = q // form.chunks, SHORT_ROWS // form.chunks
    q_registers = bits(1, q_words, 2) + bits(4 * q_words, q_chunk, 2) + bits(side, height, 1)
    q_lanes = bits(q_words, 4 * q_words, 2) + bits(q_chunk, q, 2) + bits(1, side, 1)
    mma = f"tl.NVMMADistributedLayout([2, 0], [{warps}, 1, 1], [1, 16, 8])"
    # Of chunks that belong together one thread has the products, and adds them up.
    sums = linear(bits(8, own, 1) + bits(4, height, 2), bits(1, 4, 2) + rows, warps, own, height)
    scores = (("SCORES", sums),) if form.chunks > 1 else ()
    requests = f"tl.BlockedLayout([{max(1, form.requests // 32)}], [32], [{warps}], [0])"
    return {
        "jit": "gluon.jit",
        "by_lane": ", BY_LANE",
        "by_request": ", BY_REQUEST",
        "layouts": (
            ("MMA", mma),
            *scores,
            ("A", f"tl.DotOperandLayout(0, {mma}, 2)"),
            ("B", f"tl.DotOperandLayout(1, {mma}, 2)"),
            ("K_LOAD", linear(k_registers, k_lanes, warps, own, k)),
            ("V_LOAD", linear(v_registers, v_lanes, warps, own, v)),
            ("Q_LOAD", linear(q_registers, q_lanes, warps, height, q)),
            ("K_PAGES", paged(k_registers, k_lanes)),
            ("V_PAGES", paged(v_registers, v_lanes)),
            *_merged(form, config),
            ("BY_LANE", f"tl.BlockedLayout([1], [32], [{warps}], [0])"),
            ("BY_REQUEST", requests),
            ("WORD", "tl.pointer_type(tl.int32)"),
        ),
        "chunks": form.chunks,
        "scores_layout": "SCORES" if form.chunks > 1 else "MMA",
        "product_keys": "KEYS_PER_WARP" if form.chunks == 1 else "(KEYS_PER_WARP * CHUNKS)",
        "product_rows": "BLOCK_M" if form.chunks == 1 else "(BLOCK_M * CHUNKS)",
        "product_columns": "HEAD_DIM_V" if form.chunks == 1 else "(HEAD_DIM_V // CHUNKS)",
        "in_word": in_word,
        "k_side": k_side,
        "v_side": v_side,
        "round_robin": config.split_policy == "round",
        "rows_beyond": config.BLOCK_M > _merge_rows(form, config),
        **await_context(
            _vector(form, config),
            _parts(form, config) * _rows_held(form, config),
            32 * config.num_warps // _rows_at_once(form, config),
            form.head_dim_v,
        ),
    }


def warp_sizes(form: ServingForm, config: ServingConfig, device: Device) -> dict[str, int]:
    """Constants of that kernel alone, and those that it has another value for.

    STEP: from a program's KV tile of a work tile to its next.
    """
    programs = config.programs(device) // form.kv_heads
    return {
        "HEAD_DIM": form.head_dim_qk,
        "WARPS": config.num_warps,
        "KEYS_PER_WARP": config.keys_per_warp,
        "CONTIGUOUS_KEYS": _inside(form, config),
        "PROGRAMS_PER_HEAD": programs,
        "STEP": programs if config.split_policy == "round" else 1,
        "MERGE_ROWS": _merge_rows(form, config),
        "MERGE_PARTS": _parts(form, config),
        "VECTOR": _vector(form, config),
        "EMPTY": UNWRITTEN,
        **({"CHUNKS": form.chunks} if form.chunks > 1 else {}),
    }


def _inside(form: ServingForm, config: ServingConfig) -> int:
    """Keys of a warp that surely lie side by side in one page: a power of two."""
    common = math.gcd(form.page, config.keys_per_warp) if form.page else config.keys_per_warp
    return common & -common


def _merge_rows(form: ServingForm, config: ServingConfig) -> int:
    """Rows that a program merges at a time."""
    return min(config.BLOCK_M, form.rows or config.BLOCK_M)


def _rows_held(form: ServingForm, config: ServingConfig) -> int:
    """Rows of a merge that one thread has."""
    return _merge_rows(form, config) // _rows_at_once(form, config)


def _rows_at_once(form: ServingForm, config: ServingConfig) -> int:
    """Rows of a merge that warps have at a time: of each row a thread has one vector at most."""
    warps = max(1, config.num_warps * WARP_COLUMNS // max(WARP_COLUMNS, form.head_dim_v))
    return min(warps, _merge_rows(form, config))


def _parts(form: ServingForm, config: ServingConfig) -> int:
    """Parts of a work tile that are polled at a time."""
    return max(1, AWAITED // _rows_held(form, config))


def _vector(form: ServingForm, config: ServingConfig) -> int:
    """Columns side by side that a thread merges."""
    by_row = _rows_at_once(form, config)
    return max(1, min(4, form.head_dim_v // (32 * (config.num_warps // by_row))))


def _merged(form: ServingForm, config: ServingConfig) -> tuple[tuple[str, str], ...]:
    """Layouts of a merge: of warps [warps, rows, columns], of programs [parts, rows, columns]."""
    warps = config.num_warps
    by_row, vector = _rows_at_once(form, config), _vector(form, config)
    spread = f"{by_row}, {warps // by_row}"

    def whole(first: int, columns: int) -> str:
        """All of the first dimension is in one thread's registers."""
        return f"tl.BlockedLayout([{first}, 1, {columns}], [1, 1, 32], [1, {spread}], [2, 1, 0])"

    return (
        ("WARPWISE", whole(warps, vector)),
        ("PARTWISE", whole(_parts(form, config), 1)),
        ("OWNED", f"tl.BlockedLayout([1, {vector}], [1, 32], [{spread}], [1, 0])"),
    )
