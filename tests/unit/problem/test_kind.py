"""Decode or prefill by lengths alone: what each kind's tiles would do with the SMs of a GPU."""

import json
from pathlib import Path
from statistics import mean

import pytest

from flexattn.problem import Shape, Sparsity, kind_for

SMS = 132
CHUNKS = Path(__file__).parents[3] / "bench/results/h200-chunks.json"


def kind(B, Hq, Hkv, q_len, kv_len, D=128, **more):
    return kind_for(Shape(B, Hq, Hkv, q_len, kv_len, D, D), SMS, **more)[0]


@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (71, 1)])
def test_a_handful_of_rows_decodes(heads):
    for B, keys in ((1, 1), (1, 2**20), (128, 4096)):
        assert kind(B, *heads, 16, keys) == "decode"
        assert kind(B, *heads, 16, keys, fp8=True) == "prefill"


def test_blocks_of_few_rows_fill_tiles_with_heads():
    few, own = (Sparsity(1, 64, True, per_head) for per_head in (False, True))
    assert kind(4, 16, 1, 65536, 65536, sparsity=few) == "decode"
    assert kind(4, 16, 1, 65536, 65536, sparsity=own) == "prefill"
    assert kind(4, 16, 1, 65536, 65536, sparsity=Sparsity(16, 64, True, False)) == "prefill"


@pytest.mark.parametrize(
    ("B", "heads", "q_len"),
    [(1, (32, 8), 64), (1, (32, 8), 128), (1, (8, 1), 256), (1, (8, 1), 512), (1, (1, 1), 2048),
     (4, (32, 8), 17), (1, (64, 8), 60), (8, (64, 8), 17), (32, (32, 8), 32)],
)  # fmt: skip
def test_a_chunk_decodes_where_prefills_tiles_are_few_or_empty(B, heads, q_len):
    """512 rows of 8 heads were 32 tiles over 128k keys, on 132 SMs; 17 rows were tiles of 128."""
    assert kind(B, *heads, q_len, 128 * 1024) == "decode"
    assert kind(B, *heads, q_len, 2 * q_len) == "prefill", "it is no chunk"


@pytest.mark.parametrize(
    ("B", "heads", "q_len"),
    [(4, (32, 8), 128), (1, (128, 8), 128), (1, (100, 100), 17), (1, (64, 8), 256),
     (1, (32, 8), 1024), (8, (32, 8), 64), (16, (32, 32), 17), (3, (40, 40), 25)],
)  # fmt: skip
def test_a_chunk_that_fills_prefills_tiles_takes_them(B, heads, q_len):
    """128 rows of 128 heads decoded because 128 tiles are fewer than 132 SMs."""
    assert kind(B, *heads, q_len, 128 * 1024) == "prefill"


@pytest.mark.parametrize(
    ("sizes", "D", "packs", "faster"),
    [((4, 64, 8, 33, 8192), 64, True, "prefill"), ((4, 64, 8, 33, 8192), 64, False, "decode"),
     ((16, 32, 8, 33, 4096), 128, True, "prefill"), ((16, 32, 8, 33, 4096), 128, False, "decode"),
     ((16, 25, 25, 64, 4096), 64, True, "decode"), ((16, 40, 40, 17, 4096), 128, True, "prefill"),
     ((4, 16, 8, 64, 8192), 256, True, "prefill"), ((1, 16, 8, 64, 32768), 256, True, "decode"),
     ((1, 40, 40, 128, 32768), 128, True, "decode"), ((1, 64, 8, 512, 4096), 64, True, "prefill"),
     ((8, 64, 8, 17, 57547), 64, True, "decode"), ((3, 40, 40, 25, 58304), 128, True, "prefill")],
)  # fmt: skip
def test_the_kind_that_was_faster_on_an_h200(sizes, D, packs, faster):
    """packs: heads of a group share a tile of prefill's; else it took twice the time."""
    assert kind(*sizes, D, packs=packs) == faster


def taken(B, Hq, Hkv, q_len, kv_len, D, us):
    """Of a chunk's times on an H200: that of the kind chosen over the faster one's."""
    prefill = min(us[each] for each in ("prefill", "packed") if each in us)
    decode = min(time for name, time in us.items() if name.startswith("decode"))
    chosen = kind(B, Hq, Hkv, q_len, kv_len, D, packs=True)
    return {"prefill": prefill, "decode": decode}[chosen] / min(prefill, decode)


def test_chunks_take_the_kind_that_was_faster():
    """Those that the numbers were fitted to, and those that they had not seen."""
    stored = json.loads(CHUNKS.read_text())
    assert mean(taken(*row) for row in stored["chunks"]) < 1.01
    assert max(taken(*row) for row in stored["unseen"]) < 1.02


def test_the_reason_is_told():
    def why(q_len):
        return kind_for(Shape(1, 32, 8, q_len, 2**17, 128, 128), SMS)[1]

    assert why(1) == "q_len 1 is at most 16"
    assert why(100) == "32 prefill tiles would be empty or leave SMs of 132 idle"
    assert why(257) == "q_len 257 fills prefill tiles"
    assert why(4096) == "q_len 4096 fills prefill tiles"
