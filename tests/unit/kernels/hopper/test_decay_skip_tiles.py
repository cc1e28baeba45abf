"""Which KV tiles Hopper's producer loads, by its own statements: none that counts is skipped.

Nothing interprets that template. A work tile's KV range is arithmetic, which Python can do.
"""

import random
import re
import textwrap
from dataclasses import replace
from types import SimpleNamespace

from flexattn.catalogue import alibi, causal, causal_offset, sliding_window
from flexattn.kernels.hopper.config import HopperPrefillConfig
from tests.covering import each_choice
from tests.families import render
from tests.problems import H200, problem

ROWS, WIDTH, BLOCK = 64, 64, 128
KEEPS = {
    "causal": (causal, lambda row, key: key <= row),
    "ahead": (causal_offset(100), lambda row, key: key <= row + 100),
    "behind": (causal_offset(-70), lambda row, key: key <= row - 70),
    "window": (sliding_window(200), lambda row, key: row - 200 <= key <= row),
}


class Number(int):
    """As the kernel's integers: division is rounded towards zero, and `to` changes nothing."""

    def __floordiv__(self, other):
        return Number(abs(self) // other * (1 if self >= 0 else -1))

    def __add__(self, other):
        return Number(int(self) + other)

    def __sub__(self, other):
        return Number(int(self) - other)

    def __mul__(self, other):
        return Number(int(self) * other)

    __radd__, __rmul__ = __add__, __mul__

    def to(self, dtype):
        return self


def found_by(source, names, runs, window):
    """The variables after the producer's statements for a work tile's KV range."""
    text = source.text[source.text.index("\ndef produce(") :]
    lines = re.search(r"(?ms)^( +decay_window = .*?)^ +(?:empty|off_hkv) = ", text).group(1)
    constants = {
        name: Number(float(value))
        for name, value in re.findall(r"(?m)^(\w+) = gl\.constexpr\((-?[\d.]+)\)$", source.text)
    }
    place = {name: Number(value) for name, value in names.items()}

    def load(address, mask=True, other=None):
        if mask is not True:
            return Number(window) if window is not None else other
        return Number(runs[address])

    gl = SimpleNamespace(
        load=load, int32=None, int64=None,
        minimum=lambda x, y: Number(min(x, y)), maximum=lambda x, y: Number(max(x, y)),
        where=lambda c, x, y: x if c else Number(y), cdiv=lambda x, y: Number(-(-x // int(y))),
    )  # fmt: skip
    state = {"gl": gl, "DECAY_WINDOW": Number(0), "RUNS": Number(0), **constants, **place}
    exec(textwrap.dedent(lines), state)
    return state


def drawn_runs(draw, blocks, width):
    """Ends of each row's blocks in any order; of a row without full ones as runs.py has them."""
    found = []
    for _ in range(blocks):
        first, full, full_end, end = sorted(draw.randint(0, width) for _ in range(4))
        found += [first, full, full_end, end] if full < full_end else [first, end, first, end]
    return found


@each_choice(name=KEEPS, consumers=[1, 2, 3])
def test_tiles_of_keys_that_count_are_loaded_and_others_skipped(name, consumers):
    mask_mod, keeps = KEEPS[name]
    structure = problem(
        D=64, score_mod=alibi(32, "cpu"), mask_mod=mask_mod, runs=True, block=(BLOCK, BLOCK)
    ).structure
    config = HopperPrefillConfig(consumers, WIDTH, 2, 240, tile_scheduler="dynamic")
    source = render(structure, config, H200, "test")
    several = "begin_1" in source.text
    draw, skipped = random.Random(consumers), 0
    for _ in range(60):
        q_len, kv_len = draw.randint(200, 900), draw.randint(200, 900)
        width, per = -(-kv_len // BLOCK), BLOCK // WIDTH
        runs = drawn_runs(draw, -(-q_len // BLOCK), width)
        row_start = draw.randrange(0, q_len, ROWS * consumers)
        window = draw.randint(1, 400)
        names = {
            "b": 0, "h": 0, "Hq": 1, "group": 1, "q_len": q_len, "kv_len": kv_len,
            "row_start": row_start, "stride_mask_b": 0, "stride_mask_h": 0,
            "mask_scalar0": {"ahead": 100, "behind": -70}.get(name, 0),
        }  # fmt: skip
        found, whole = (found_by(source, names, runs, each) for each in (window, None))
        assert found["end"] == whole["end"]
        assert found["num_n_blocks"] == max(0, found["end"] - found["begin"])
        for row in range(row_start, min(row_start + ROWS * consumers, q_len)):
            run = (row - row_start) // ROWS if several else 0
            first, full, full_end, end = runs[row // BLOCK * 4 :][:4]
            kept = [
                key
                for key in range(first * BLOCK, min(end * BLOCK, kv_len))
                if full * BLOCK <= key < full_end * BLOCK or keeps(row, key)
            ]
            begin = found[f"begin_{run}"]
            assert begin >= first * per and (begin <= found[f"end_{run}"] or not kept)
            left_out = range(first * per, begin)
            skipped += len(left_out)
            if kept and left_out:
                assert begin * WIDTH - 1 < max(kept) - window
            # What a consumer needs is among what all of them get.
            some = begin < found[f"end_{run}"]
            assert not some or found["begin"] <= begin < found["end"]
    assert skipped


def test_without_a_mask_the_last_key_is_kept_by_all_rows():
    structure = problem(score_mod=alibi(32, "cpu")).structure
    for cross_tile_pipeline in (False, True):
        config = replace(
            HopperPrefillConfig(2, 128, 2, 240, tile_scheduler="static"),
            cross_tile_pipeline=cross_tile_pipeline,
        )
        source = render(structure, config, H200, "test")
        for kv_len in (1, 127, 128, 129, 1000, 4096):
            for window in (None, 0, 1, 127, 128, 129, 900, 2**27):
                names = {"b": 0, "h": 0, "Hq": 1, "kv_len": kv_len}
                found = found_by(source, names, [], window)
                tiles = -(-kv_len // 128)
                needed = [
                    i for i in range(tiles)
                    if window is None or i * 128 + 127 >= kv_len - 1 - window
                ]  # fmt: skip
                assert (found["end"], found["num_n_blocks"]) == (tiles, len(needed))
