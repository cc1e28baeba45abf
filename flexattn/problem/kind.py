"""kind_for(): which kind of kernel a call's sizes want, by what both would cost.

It stands apart from what a Problem is, because it decides no kernel's text.
"""

from __future__ import annotations

from math import ceil

from flexattn.problem.problem import Kind, Problem, Shape

# Rows of a tile of prefill's, and of decode's where there are more than 16; keys of a chunk for
# each of its rows.
_PREFILL_ROWS, _DECODE_ROWS, _CHUNKED = 128, 64, 8
# How many times as long decode's rows take on an SM that has several of its programs, and on one
# that has a single one. Measured on an H200 (D 128) are 740 TFLOP/s of Hopper's prefill, and 390
# of Triton's 64 x 64 keys with several; that a single one has two thirds of that is an estimate.
_SEVERAL, _SINGLE = 2, 3


def kind_for(sizes: Shape | Problem, num_sms: int, fp8: bool = False) -> tuple[Kind, str]:
    """Decode or prefill for these lengths, with the reason in words.

    At most 16 query rows always decode: one tile holds them with all heads of a group. More rows
    may be a chunk of a prompt over a long cache. Prefill's tiles are then few, so SMs are idle, or
    mostly empty. Decode packs a group's heads into its tiles and splits the keys over all SMs, but
    multiplies at a lower rate. It is chosen where it is expected to take three quarters of
    prefill's time or less.
    """
    q_len, group = sizes.q_len, sizes.Hq // sizes.Hkv
    if fp8:
        return "prefill", "fp8 has no decode template"
    if q_len <= 16:
        return "decode", f"q_len {q_len} is at most 16"
    if sizes.kv_len >= _CHUNKED * max(q_len, _PREFILL_ROWS):
        tiles = sizes.B * sizes.Hq * ceil(q_len / _PREFILL_ROWS)
        packed = max(1, sizes.B * sizes.Hkv * ceil(q_len * group / _DECODE_ROWS))
        # Rows of prefill's rate, one SM after the other.
        prefill = ceil(tiles / num_sms) * _PREFILL_ROWS
        decode: float = ceil(packed / num_sms) * _DECODE_ROWS * _SEVERAL
        if packed <= num_sms:
            decode = _DECODE_ROWS * _SINGLE / (num_sms // packed)
        if decode <= 0.75 * prefill:
            return "decode", f"{tiles} prefill tiles would be empty or leave SMs of {num_sms} idle"
    return "prefill", f"q_len {q_len} fills prefill tiles"
