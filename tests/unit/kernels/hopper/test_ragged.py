"""Rows of requests, keys in pages or of packed sequences: Hopper's kernel, in plain Python."""

from dataclasses import replace

import numpy as np
import pytest

from flexattn.catalogue import alibi, causal, sliding_window, softcap
from flexattn.device import named
from flexattn.kernels.base.ragged import packed_heads
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.hopper.config import RaggedPrefillConfig
from flexattn.kernels.hopper.ragged import ragged_defaults, tiles_of_rows
from tests.emulated_ragged import emulated as on_requests, holes, prefix, tilted
from tests.families import violated
from tests.problems import plan_of

H200 = replace(named("nvidia-h200"), num_sms=3)
CONFIG = RaggedPrefillConfig(
    2, 128, 2, 232, ping_pong=False, tile_scheduler="dynamic", order="sections", l2_swizzle=2,
    cross_tile_pipeline=False, v_box=64, merge_consumers=False,
)  # fmt: skip


def emulated(*given, config=CONFIG, **more):
    return on_requests(config, H200, *given, **more)


def check(*given, **more):
    got, wanted = emulated(*given, **more)
    for each, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(each, right, atol=2e-5, rtol=2e-5)


BATCHES = {
    16: ([130, 1, 64], [300, 45, 64]),
    32: ([64, 0, 70], [64, 90, 129]),
    64: ([200], [333]),
    128: ([129, 3], [129, 260]),
    256: ([70, 256], [513, 300]),
    # Key by key, where the copy engine has no boxes.
    1: ([130, 1, 64, 0], [300, 45, 64, 0]),
    8: ([64, 0, 70], [64, 90, 129]),
    24: ([129, 3], [129, 260]),
}


@pytest.mark.parametrize("page", BATCHES)
def test_pages(page):
    """Whole and partial tiles of rows, over pages of less than a tile of keys and of more."""
    check(page, *BATCHES[page], seed=page)


@pytest.mark.parametrize("number", [-1, 10**6, 2**31 - 1])
@pytest.mark.parametrize("page", [1, 8])
def test_numbers_of_no_page_read_nothing_past_the_cache(page, number):
    """TMA fills what is past the cache; threads that copied keys read there once."""
    got, wanted = emulated(page, [70, 64], [90, 129], lost=[(0, number)], mask_mod=None)
    for each, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(each[70:], right[70:], atol=2e-5, rtol=2e-5)


ASKED = {
    "no mask": {"mask_mod": None},
    "window": {"mask_mod": sliding_window(90)},
    "prefix by request": {"mask_mod": prefix},
    "holes": {"mask_mod": holes},
    "soft cap": {"score_mod": softcap(4.0)},
    "alibi": {"score_mod": alibi(4, "cpu")},
    "score by request": {"score_mod": tilted, "mask_mod": sliding_window(150)},
    "sinks": {"sinks": [0.5, -1.0, 3.0, 0.0], "mask_mod": sliding_window(64)},
    "lazy": {"config": replace(CONFIG, lazy_rescale=True)},
    "ping pong": {"config": replace(CONFIG, ping_pong=True)},
    "packed": {"config": replace(CONFIG, pack_gqa=True)},
    "two heads in a tile": {"config": replace(CONFIG, packed_heads=2)},
    "seven heads in a tile": {"heads": (14, 2), "config": replace(CONFIG, packed_heads=8)},
    "some of five heads": {
        "heads": (10, 2),
        "mask_mod": sliding_window(40),
        "sinks": [i / 4 for i in range(10)],
        "config": replace(CONFIG, packed_heads=4),
        "score_mod": softcap(4.0),
    },
    "five heads in slices": {
        "heads": (10, 2),
        "config": replace(CONFIG, pack_gqa=True, lazy_rescale=True, ping_pong=True),
    },
    "seven heads in slices": {
        "heads": (14, 2),
        "mask_mod": sliding_window(40),
        "score_mod": alibi(14, "cpu"),
        "sinks": [i / 4 for i in range(14)],
        "config": replace(CONFIG, pack_gqa=True),
    },
    "two heads of three consumers": {
        "mask_mod": holes,
        "config": replace(CONFIG, pack_gqa=True, consumers=3, consumer_regs=160, BLOCK_N=64),
    },
    "sixteen heads": {
        "heads": (16, 1),
        "config": replace(CONFIG, packed_heads=16),
        "mask_mod": holes,
    },
    "forty-eight heads": {"heads": (48, 1), "config": replace(CONFIG, packed_heads=64)},
    "three consumers": {"config": replace(CONFIG, consumers=3, consumer_regs=160, BLOCK_N=64)},
    "64 columns": {"dims": (64, 64)},
    "96 columns": {"dims": (96, 96)},
    "256 columns": {"dims": (256, 256), "config": replace(CONFIG, BLOCK_N=64)},
    "192 and 128": {"dims": (192, 128), "config": replace(CONFIG, BLOCK_N=64)},
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_a_plan_asks(asked):
    """Masks and scores stand at positions in the request, and a mask's bounds end the loop."""
    check(16, [130, 70, 3], [130, 300, 40], **ASKED[asked])
    if asked in ("window", "packed"):
        check(64, [65, 130], [500, 140], **ASKED[asked], seed=3)
    if asked in ("holes", "lazy", "96 columns", "256 columns", "192 and 128", "sixteen heads") or (
        "slices" in asked
    ):
        check(1, [65, 130, 3], [300, 140, 40], **ASKED[asked], seed=4)


def near(b, h, q_idx, kv_idx):
    """A request's first keys, and a window."""
    return (q_idx >= kv_idx) & ((kv_idx < 4) | (q_idx - kv_idx < 40))


GAPS = {
    "one head a tile": {},
    "heads in a tile": {"config": {"packed_heads": 2}},
    "slices": {"heads": (10, 2), "config": {"pack_gqa": True}},
    "parts": {"config": {"splits": True}, "parts": 3},
    "ping pong": {"config": {"ping_pong": True, "lazy_rescale": True}},
}


@pytest.mark.parametrize("asked", GAPS)
def test_keys_between_the_first_and_a_window_are_not_read(asked):
    """A loop over all keys took the time of causal attention and of the mask."""
    more = dict(GAPS[asked])
    config = replace(CONFIG, **more.pop("config", {}))
    unread = [(0, page) for page in range(2, 8)]  # rows begin at 563, and their windows at 524
    check(64, [130, 70, 3], [693, 100, 520], config=config, mask_mod=near, unread=unread, **more)
    check(16, [300], [300], config=config, mask_mod=near, **more)


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("causal_too", [False, True])
def test_a_number_alone_that_bounds_the_keys(page, causal_too):
    """A second one in a process is an argument of the kernel: its bounds did not have it."""

    def first_keys(n):
        return lambda b, h, q_idx, kv_idx: (kv_idx < n) | (causal_too & (q_idx >= kv_idx))

    for n in (30, 41):
        check(page, [70, 3], [130, 40], mask_mod=first_keys(n))


CUT = {
    "causal": {},
    "no mask": {"mask_mod": None},
    "sinks": {"sinks": [0.5, -1.0, 3.0, 0.0], "mask_mod": sliding_window(64)},
    "heads in a tile": {"heads": (14, 2), "config": {"packed_heads": 8}},
    "heads of consumers": {"config": {"pack_gqa": True, "lazy_rescale": True}, "mask_mod": holes},
    "heads in slices": {
        "heads": (10, 2),
        "config": {"pack_gqa": True},
        "mask_mod": sliding_window(300),
        "sinks": [i / 4 for i in range(10)],
    },
    "alibi": {"score_mod": alibi(4, "cpu"), "mask_mod": prefix},
    "96 columns": {"dims": (96, 96), "config": {"packed_heads": 2}},
    "256 columns": {"dims": (256, 256), "config": {"BLOCK_N": 64}},
}


@pytest.mark.parametrize("asked", CUT)
def test_keys_in_parts(asked):
    """Parts of a tile's keys are left in float32; some have no key that the tile's rows see."""
    more = dict(CUT[asked])
    config = replace(CONFIG, splits=True, **more.pop("config", {}))
    check(16, [70, 33, 3], [700, 300, 40], config=config, parts=3, **more)
    if asked in ("sinks", "heads in a tile"):
        check(1, [70, 33, 3], [700, 300, 40], config=config, parts=3, **more)


def test_programs_without_tiles():
    """They leave their SMs to the decodes beside this kernel, and no tile is lost."""
    check(16, [130, 70, 3], [130, 300, 40], workers=1)


def test_requests_of_equal_rows():
    """Their rows begin at multiples of q_rows; no cu_seqlens is read."""
    check(16, [70] * 3, [70, 300, 129], uniform=True)


def test_no_keys_and_too_few():
    """A request without keys has zeros; of fewer keys than rows, rows begin at position 0."""
    (out, lse), wanted = emulated(32, [10, 70], [0, 40])
    assert not out[:10].any() and np.isneginf(lse[:10]).all()
    np.testing.assert_allclose(out[10:], wanted[0][10:], atol=2e-5)


PACKS = {
    "odd lengths": ([130, 1, 70, 3], [130, 1, 70, 3], {}),
    "none, one, and whole tiles": ([0, 1, 128, 0, 256], [0, 1, 128, 0, 256], {}),
    "more keys than queries": ([70, 3, 1], [333, 130, 257], {}),
    "more queries than keys": ([200, 70], [40, 1], {}),
    "queries or keys alone": ([0, 70, 33], [40, 0, 50], {}),
    "all keys": ([70, 130], [300, 45], {"mask_mod": None}),
    "window": ([300, 70, 140], [300, 70, 140], {"mask_mod": sliding_window(90)}),
    "a bound by sequence": ([130, 260, 40], [130, 260, 40], {"mask_mod": prefix}),
    "no bounds": ([130, 70], [130, 70], {"mask_mod": holes}),
    "sinks": ([130, 40], [130, 40], {"sinks": [0.5, -1.0, 3.0, 0.0]}),
    "alibi": (
        [130, 40],
        [130, 40],
        {"score_mod": alibi(4, "cpu"), "config": {"pack_gqa": True}},
    ),
    "soft cap in a window": (
        [130, 40],
        [130, 40],
        {"score_mod": softcap(4.0), "mask_mod": sliding_window(64)},
    ),
    "score by sequence": ([130, 40], [130, 40], {"score_mod": tilted}),
    "heads in a tile": (
        [30, 1, 17, 90],
        [30, 1, 17, 90],
        {"heads": (14, 2), "config": {"packed_heads": 8, "ping_pong": True}},
    ),
    "heads of one's own": ([130, 40], [130, 40], {"heads": (3, 3)}),
    "keys in parts": ([70, 33, 3], [700, 300, 40], {"config": {"splits": True}, "parts": 3}),
    "64 columns": ([130, 40], [130, 40], {"dims": (64, 64)}),
    "80 columns": ([130, 40], [130, 40], {"dims": (80, 80)}),
    "96 columns": ([130, 40], [130, 40], {"dims": (96, 96)}),
    "192 columns": ([70, 40], [70, 40], {"dims": (192, 192), "config": {"BLOCK_N": 64}}),
    "192 and 128": ([70, 40], [70, 40], {"dims": (192, 128), "config": {"BLOCK_N": 64}}),
    "256 columns": ([70, 40], [70, 40], {"dims": (256, 256), "config": {"BLOCK_N": 64}}),
}


@pytest.mark.parametrize("pack", PACKS)
def test_packed_sequences(pack):
    """Keys of a sequence begin at any row; those of the next one count for nothing."""
    q_lens, kv_lens, asked = PACKS[pack]
    asked = {**asked, "config": replace(CONFIG, **asked.get("config", {}))}
    check(0, q_lens, kv_lens, **asked, seed=len(pack))


def test_rows_behind_the_last_sequence_see_the_keys_there():
    check(0, [40, 3, 70], [50, 130, 90], behind=True)
    check(0, [40], [50], behind=True, mask_mod=sliding_window(20))


@pytest.mark.parametrize("mask_mod", [None, causal])
def test_a_sequence_of_nan_spoils_no_other(mask_mod):
    """The last tile of keys of the one before it reads its first rows."""
    q_lens = kv_lens = [70, 90, 131]
    (out, lse), wanted = emulated(0, q_lens, kv_lens, bad=(1,), mask_mod=mask_mod)
    for got, right in ((out, wanted[0]), (lse, wanted[1])):
        assert np.isnan(got[70:160]).all()
        kept = np.r_[:70, 160:291]
        np.testing.assert_allclose(got[kept], right[kept], atol=2e-5, rtol=2e-5)


TILED = {  # query positions of a request, heads of a group: heads of a tile
    (2048, 8): 8, (2048, 7): 1, (52, 7): 8, (294, 48): 16, (26, 5): 8, (2048, 5): 1, (9, 71): 32,
    (2048, 1): 1, (500, 2): 2,
}  # fmt: skip


@pytest.mark.parametrize("rows", TILED)
def test_heads_of_a_tile(rows):
    assert packed_heads(*rows, 128) == TILED[rows]


@pytest.mark.parametrize(
    "batch, total_q, group, tiled",
    [
        (64, 4096, 5, (True, 1)), (2, 128, 7, (True, 1)), (64, 256, 5, (False, 8)),
        (64, 4096, 4, (False, 4)), (64, 4096, 6, (False, 2)), (64, 4096, 1, (False, 1)),
    ],
)  # fmt: skip
def test_heads_of_a_tile_of_a_servers_plan(batch, total_q, group, tiled):
    """Five heads of a group by two are a fifth more tiles of prompts, and one head a tile two
    thirds more tiles of 64 rows: consumers take slices of heads and rows in turn."""
    found = plan_of(batch, total_q=total_q, keys=32768, heads=(8 * group, 8), page=1)
    first = next(ragged_defaults(found, H200))
    assert (first.pack_gqa, first.packed_heads) == tiled
    assert first.sliced(group) == (tiled == (True, 1))
    assert not violated(first, found.structure, H200)


@pytest.mark.parametrize("rows, tiles", [(1, 24), (64, 24), (65, 40), (512, 160), (4096, 1280)])
def test_slices_fill_tiles(rows, tiles):
    """Of 8 groups of five heads, 64 rows of each: as many as rows and heads fill."""
    form = plan_of(total_q=4096, keys=32768, heads=(40, 8)).structure
    assert tiles_of_rows(form, replace(CONFIG, pack_gqa=True), rows) == tiles


def test_mods_that_read_the_head_keep_one_head_a_consumer():
    for mod, tiled in (
        (softcap(4.0), (False, 4)),
        (alibi(8, "cpu"), (True, 1)),
        (tilted, (True, 1)),
    ):
        found = plan_of(1, total_q=999, keys=1024, heads=(8, 2), score=mod)
        first = next(ragged_defaults(found, H200))
        assert (first.pack_gqa, first.packed_heads) == tiled
        assert not violated(first, found.structure, H200)


REFUSED = {
    "mods of a head": {"score": alibi(4, "cpu"), "config": replace(CONFIG, packed_heads=2)},
    "pages of 8": {
        "page": 8,
        "config": replace(CONFIG, consumers=3, BLOCK_N=64, consumer_regs=160),
    },
    "a contiguous cache": {"page": 0},
    "batch-invariant rows": {"batch_invariant": True},
    "scales of 16 bits": {"scaled": True},
    "packed_heads=3": {"config": replace(CONFIG, packed_heads=3)},
    "packed_heads beside pack_gqa": {"config": replace(CONFIG, packed_heads=2, pack_gqa=True)},
    "a v_box other than 64": {"config": replace(CONFIG, v_box=32)},
    "sections": {"config": replace(CONFIG, order="heads")},
    "dynamic": {"config": replace(CONFIG, tile_scheduler="static")},
    "a cross_tile_pipeline": {"config": replace(CONFIG, BLOCK_N=64, cross_tile_pipeline=True)},
}


@pytest.mark.parametrize("lacking", REFUSED)
def test_what_the_template_has_not(lacking):
    asked = dict(REFUSED[lacking])
    config = asked.pop("config", CONFIG)
    found = plan_of(2, total_q=128, keys=1024, heads=(4, 2), **asked).structure
    (rule,) = violated(config, found, H200)
    assert rule.name == "serving"
    assert lacking in " ".join(family_of(config).limits.reasons(config, found, H200))
