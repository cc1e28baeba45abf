"""kind_for(): which kind of kernel a call's sizes want, by what both would cost.

It stands apart from what a Problem is, because it decides no kernel's text.
"""

from __future__ import annotations

from math import ceil

from flexattn.problem.problem import Kind, Problem, Shape

# At most so many query rows always decode: one tile holds them with all heads of a group.
FEW_ROWS = 16
# Rows of a tile of prefill's, and of decode's where there are more than 16; keys of a chunk for
# each of its rows.
_PREFILL_ROWS, _DECODE_ROWS, _CHUNKED = 128, 64, 8
# Rows of prefill's tiles of up to 64 columns.
_NARROW, _NARROW_ROWS = 64, 192
# Microseconds that 128 keys take, fitted to 109 chunks on an H200
# (bench/results/h200-chunks.json): in the mean the kind that they choose takes 1.009 of the faster
# one's time. Of a tile of prefill's: at least the first, the second for each column; the third is
# the factor where SMs have more than one tile. Of a tile of decode's, for each column, where a GPU
# is full of them; the second is of more than 128 columns.
_PREFILL, _PREFILL_COLUMN, _SEVERAL = 1.2, 0.0098, 1.2
_DECODE_COLUMN, _DECODE_WIDE = 0.014, 0.031
# What merges splits; bytes that memory gives in a microsecond.
_MERGE, _BANDWIDTH = 8.0, 4.6e6
# No head of more columns was measured.
_WIDEST = 256


def kind_for(
    sizes: Shape | Problem, num_sms: int, fp8: bool = False, packs: bool = False
) -> tuple[Kind, str]:
    """Decode or prefill for these lengths, with the reason in words.

    At most FEW_ROWS query rows always decode. More rows may be a chunk of a prompt over a long
    cache. Prefill's tiles are then few, so SMs are idle, or mostly empty. Decode packs a group's
    heads into its tiles and splits the keys over all SMs, but multiplies at a lower rate. It is
    chosen where it is expected to be faster. packs: two heads of a group share a tile of prefill's
    that either would half fill (Hopper's, in 16 bits).
    """
    q_len, group = sizes.q_len, sizes.Hq // sizes.Hkv
    if fp8:
        return "prefill", "fp8 has no decode template"
    if q_len <= FEW_ROWS:
        return "decode", f"q_len {q_len} is at most {FEW_ROWS}"
    if sizes.kv_len >= _CHUNKED * max(q_len, _PREFILL_ROWS):
        columns = min(_columns(sizes), _WIDEST)
        rows = _NARROW_ROWS if columns <= _NARROW else _PREFILL_ROWS
        tiles = sizes.B * sizes.Hq * ceil(q_len / rows)
        if packs and group % 2 == 0 and 2 * q_len <= _PREFILL_ROWS:
            tiles //= 2
        packed = sizes.B * sizes.Hkv * ceil(q_len * group / _DECODE_ROWS)
        waves, steps = ceil(tiles / num_sms), sizes.kv_len / 128
        read = sizes.B * sizes.Hkv * sizes.kv_len * columns * 4 / _BANDWIDTH
        prefill = waves * steps * max(_PREFILL, _PREFILL_COLUMN * columns)
        prefill = max(prefill * (_SEVERAL if waves > 1 else 1), read)
        each = _DECODE_COLUMN if columns <= 128 else _DECODE_WIDE
        decode = max(packed / num_sms * steps * each * columns, read) + _MERGE
        if decode < prefill:
            return "decode", f"{tiles} prefill tiles would be empty or leave SMs of {num_sms} idle"
    return "prefill", f"q_len {q_len} fills prefill tiles"


def _columns(sizes: Shape | Problem) -> float:
    """The mean number of columns of a key and of a value."""
    if isinstance(sizes, Problem):
        return (sizes.structure.head_dim_qk + sizes.structure.head_dim_v) / 2
    return (sizes.D + sizes.Dv) / 2
