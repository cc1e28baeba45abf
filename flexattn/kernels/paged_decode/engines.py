"""The parts of serving that differ by engine: register layouts, waits, TMA's tiles."""

from __future__ import annotations

import math

from flexattn.device import Device
from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.base.config import power_above
from flexattn.kernels.paged_decode.config import COMBINE_WARPS, SHORT_ROWS, ServingConfig
from flexattn.kernels.printers.spelling import (
    TRITON,
    Dialect,
    TensorForm,
    signature_type,
    triton_type,
)
from flexattn.problem.serving import WARP_COLUMNS, ServingForm

# Of a word as a signed number: a NaN, but not the one that arithmetic gives, 0x7FFFFFFF.
UNWRITTEN = -1
# How often a word is asked for: two seconds or so, and no launch takes a tenth of that.
TURNS = 1 << 21
# Words that a thread waits for at a time; they are registers of it.
_HELD = 16


def await_context(vector: int, vectors: int, threads: int, columns: int) -> dict[str, object]:
    """The template's variables for the wait: a thread has `vectors` vectors of `vector` words.

    An element is a vector of a part's output, with its row's weight. threads: a power of two of
    them share a row, numbered from a multiple of it. columns: of a row; threads beyond its vectors
    hold what the first ones do.
    """
    loads = next(n for n in range(min(vectors, _HELD), 0, -1) if vectors % n == 0)
    return {
        "vector": vector,
        "words_of": ", ".join(f"v{c}" for c in range(vector)),
        "poll_asm": _poll(vector, loads),
        "poll_constraints": ",".join(
            ["=&r"] * ((vector + 1) * loads) + ["l"] * (2 * loads) + ["r"] * loads + ["l"] * loads
        ),
        "poll_pack": loads,
        "store_asm": (
            "{ .reg .pred wanted, own, first; .reg .b32 thread;",
            f"setp.ne.s32 wanted, ${vector + 4}, 0;",
            "mov.u32 thread, %tid.x;",
            f"and.b32 thread, thread, {threads - 1};",
            f"setp.lt.and.u32 own, thread, {columns // vector}, wanted;",
            "setp.eq.and.u32 first, thread, 0, wanted;",
            f"@own st.relaxed.gpu.global{_wide(vector)}.b32 [$1], {_group(range(3, vector + 3))};",
            f"@first st.relaxed.gpu.global.b32 [$2], ${vector + 3};",
            "mov.u32 $0, 0; }",
        ),
        "store_constraints": ",".join(["=r", "l", "l", *["r"] * (vector + 2)]),
    }


def _poll(vector: int, loads: int) -> tuple[str, ...]:
    """Ask for all words, and again as long as one of them is EMPTY: the largest there is.

    After TURNS times 1 is stored where the last operand says.
    """
    inputs = (vector + 1) * loads
    words = [[c * loads + i for c in range(vector + 1)] for i in range(loads)]
    lines = [f"{{ .reg .pred wanted<{loads}>, again; .reg .b32 turns, top<{inputs}>;"]
    lines.append("mov.b32 turns, 0;")
    for i, each in enumerate(words):
        lines.append(f"setp.ne.s32 wanted{i}, ${inputs + 2 * loads + i}, 0;")
        lines += [f"mov.b32 ${word}, 0;" for word in each]
    lines.append("ASK:")
    for i, each in enumerate(words):
        lines.append(
            f"@wanted{i} ld.relaxed.gpu.global{_wide(vector)}.b32 {_group(each[:-1])}, "
            f"[${inputs + i}];"
        )
        lines.append(f"@wanted{i} ld.relaxed.gpu.global.b32 ${each[-1]}, [${inputs + loads + i}];")
    found = [f"${word}" for each in words for word in each]
    made = 0
    while len(found) > 1:
        pairs = []
        for a, b in zip(found[::2], found[1::2], strict=False):
            lines.append(f"max.u32 top{made}, {a}, {b};")
            pairs.append(f"top{made}")
            made += 1
        found = pairs + found[len(pairs) * 2 :]
    lines += [
        f"setp.eq.s32 again, {found[0]}, {UNWRITTEN};",
        "add.u32 turns, turns, 1;",
        f"setp.lt.and.u32 again, turns, {TURNS}, again;",
        "@again bra ASK;",
        f"setp.eq.s32 again, {found[0]}, {UNWRITTEN};",
        f"@again st.relaxed.sys.global.b32 [${inputs + 3 * loads}], 1; }}",
    ]
    return tuple(lines)


def _wide(vector: int) -> str:
    return "" if vector == 1 else f".v{vector}"


def _group(words: range | list[int]) -> str:
    names = ", ".join(f"${word}" for word in words)
    return names if len(words) == 1 else f"{{{names}}}"


# Tiles of keys x rows, which each warp has alone. Its language is Gluon, by the name of Triton's.
WARPS_DIALECT = Dialect(
    gluon=True,
    tile=TensorForm("[WARPS, KEYS_PER_WARP, BLOCK_M]", "MMA"),
    key=TensorForm("[WARPS, KEYS_PER_WARP, 1]", "MMA"),
)
# 8-bit dtypes as PTX names them.
PTX_EIGHT_BITS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
# Vectors of parts that a thread awaits at a time.
AWAITED = 16


def serving_layouts(form: ServingForm, config: ServingConfig) -> dict[str, object]:
    """The variables of the template of warps on their own, beside those of all serving templates.

    The layouts are those of `mma.m16n8k16`, lane 4 g + j: of its first operand a thread has rows g
    and g + 8 and columns 2 j, 2 j + 1, 2 j + 8, 2 j + 9. K's columns are elements of a head, of
    which a thread reads 16 bytes side by side; V's rows are. Tensors of K, V and Q hold words of
    two elements, or of four of 8 bits: [warps, keys or rows, words].
    """
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

    in_word = 4 // form.kv_itemsize
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
        "scores_layout": "SCORES" if form.chunks > 1 else "MMA",
        "product_keys": "KEYS_PER_WARP" if form.chunks == 1 else "(KEYS_PER_WARP * CHUNKS)",
        "product_rows": "BLOCK_M" if form.chunks == 1 else "(BLOCK_M * CHUNKS)",
        "product_columns": "HEAD_DIM_V" if form.chunks == 1 else "(HEAD_DIM_V // CHUNKS)",
        "in_word": in_word,
        "k_side": k_side,
        "v_side": v_side,
        "eight_bits": PTX_EIGHT_BITS.get(form.kv_dtype, ""),
        "numbers": "halves" if in_word == 2 else "widened",
        "kv_element": triton_type(form.kv_dtype),
        "q_element": triton_type(form.dtype) if form.dtype != form.product_dtype else "",
        "rows_beyond": config.BLOCK_M > _merge_rows(form, config),
        **await_context(
            _vector(form, config),
            _parts(form, config) * _rows_held(form, config),
            32 * config.num_warps // _rows_at_once(form, config),
            form.head_dim_v,
        ),
    }


def _warp_sizes(form: ServingForm, config: ServingConfig, device: Device) -> dict[str, int]:
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


# Tiles of one warpgroup's keys. Its language is Gluon, by the name of Triton's.
MLA = Dialect(
    gluon=True,
    tile=TensorForm("[BLOCK_M, KEYS]", "MMA_S"),
    key=TensorForm("[1, KEYS]", "MMA_S"),
)
# The same with the operands of both products swapped: a row of a tile is a key.
MLA_SWAP_AB = Dialect(
    gluon=True,
    tile=TensorForm("[KEYS, BLOCK_M]", "MMA"),
    key=TensorForm("[KEYS, 1]", "MMA"),
)
LATENT, ROPE = 512, 64
# Of tiles whose keys a warp loads by TMA.
TMA_ROWS, TMA_KEYS = 64, 64
# Tiles of keys that an SM holds beside so many rows of Q.
MOST_STAGES = {16: 3, 32: 2}
# Fewer keys of a page are more copies a tile than one warp can ask for.
LEAST_PAGE = 16
# Scores (base 2) above a row's reference before that follows: weights of 16 bits hold 2^8.
_SLACK = 8
# Of a thread of the second warpgroup, and of the loading warp: the first has what they leave.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 232, 40
# Of four warps that gather chosen keys, and of the second warpgroup beside them.
_BESIDE_GATHERERS, _GATHERERS_REGISTERS = 192, (120, 152)
# Keys whose bits are in shared memory at a time: 4 KiB.
SEEN_KEYS = 1 << 15
# Of the loading warp with more lengths, where there is no second warpgroup: with 40 it spills 50
# words of 256 requests.
_MANY_REQUESTS, _THEIR_REGISTERS = 64, 88
# Work tiles whose numbers are held where values are loaded apart: more than tiles of keys are.
_SLOTS = 8
SPECIALIZED_STAGES = _SLOTS - 2


def dialect(config: ServingConfig) -> Dialect:
    """The dialect in which the mods of a config's kernel are printed."""
    if config.warp_private:
        return WARPS_DIALECT
    if not config.by_tma:
        return TRITON
    return MLA_SWAP_AB if config.swap_ab else MLA


def first_registers(form: ServingForm, config: ServingConfig) -> int:
    """The most of a thread of a TMA kernel as it starts; 0: no bound.

    A combine kernel begins beside few rows of MLA, and beside head dimensions of 128.
    """
    if not config.warp_specialized:
        few = {16: 168, 32: 184} if config.gathers(form) else {16: 128, 32: 168}
        return few[config.BLOCK_M] if config.swap_ab else 0
    if form.head_dim_v > 128:
        return 168
    return 136 if config.per_sm == 1 else 128


def merge_registers(form: ServingForm, config: ServingConfig, device: Device) -> int:
    """The most of a thread of the kernel that merges, with which it begins beside; 0: no bound."""
    if form.head_dim_v > 128 or config.per_sm > 1:
        return 0
    taken = 128 * (config.num_warps // 4 + 1) * first_registers(form, config)
    return (device.registers - taken) // (32 * COMBINE_WARPS) // 8 * 8


def described(form: ServingForm, name: str) -> Argument:
    """The cache as a tensor descriptor [pages or requests, heads, keys, columns]."""
    block = [1, 1, _box(form), ROPE]
    return Argument(name, f"tensordesc<{signature_type(form.kv_dtype)}{block}>")


def _box(form: ServingForm) -> int:
    """Keys of one copy."""
    return min(form.page, TMA_KEYS) if form.page else TMA_KEYS


def context(form: ServingForm, config: ServingConfig) -> dict[str, object]:
    """The variables of an engine's template, beside those of all serving templates."""
    if config.warp_private:
        return serving_layouts(form, config)
    if not config.by_tma:
        return {}
    apart = config.warp_specialized
    consumers, loaders = _CONSUMER_REGISTERS, _PRODUCER_REGISTERS
    if config.gathers(form):
        consumers, loaders = _BESIDE_GATHERERS, _GATHERERS_REGISTERS[config.swap_ab]
    elif apart and form.head_dim_v <= 128:
        consumers = 184
    many = apart and config.num_warps == 4 and form.requests > _MANY_REQUESTS
    return {
        "jit": "gluon.jit",
        "by_request": ", ONE_WARP",
        "by_lane": ", BY_LANE",
        "prefetched_before": True,
        "per_lane": max(1, form.requests // 32),
        "boxes": TMA_KEYS // _box(form),
        "box_keys": _box(form),
        "seen_bytes": SEEN_KEYS // 8,
        "groups": config.num_warps // 4,
        "consumer_registers": consumers,
        "producer_registers": _THEIR_REGISTERS if many else loaders,
    }


def sizes(form: ServingForm, config: ServingConfig, device: Device) -> dict[str, int]:
    """Constants of an engine's kernel alone, and those that it has another value for."""
    if config.warp_private:
        return _warp_sizes(form, config, device)
    if not config.by_tma:
        return {}
    # Of a work tile in shared memory; what its part is, if not its first or a later one.
    slots = {"SLOT_WORDS": 16, "SLOTS": 4, "WHOLE": 2, "NO_PORTION": 3}
    tile = {"KEYS": TMA_KEYS, "BOX": _box(form)}
    if config.warp_specialized:
        own = {"STAGES": config.num_stages, "CHUNKS": form.head_dim_v // ROPE}
        # LANES: of the warpgroup that starts the others.
        return tile | slots | own | {"SLOTS": _SLOTS, "LANES": 128}
    # Tiles that are held, or quarters of a tile, each of which arrives by itself.
    own = {"STAGES": config.num_stages} if config.swap_ab else {"FULL": 4, "SLACK": _SLACK}
    own |= {"WIDTH": -(-form.chosen * form.unit // config.BLOCK_N)} if form.unit else {}
    if config.sifts(form):
        own |= {"SIFTED": max(128, power_above(form.chosen)), "SEEN": SEEN_KEYS}
    return {"KEYS": TMA_KEYS, "HALF": LATENT // 2, "BOX": _box(form), **own, **slots}
