"""Where warps walk alone: which plans start so, what cannot, and where each word lies."""

from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import causal
from flexattn.device import KNOWN, named
from flexattn.mods import bind
from flexattn.render.serving import render_serving
from flexattn.render.serving_layouts import serving_layouts
from flexattn.serving.request import Maxima, form_of
from flexattn.space.serving import ServingConfig, reasons, serving_candidates, space

H200, BF16 = named("nvidia-h200"), torch.bfloat16
WARPS = ServingConfig(8, 128, 4, 1, walk="warp")


def form(B=64, q_len=1, total_q=0, heads=(32, 8), D=(128, 128), kv=BF16, page=16, **options):
    dtype = torch.float32 if kv == torch.float32 else BF16
    maxima = Maxima(B, q_len, total_q, 8192, *heads, *D, dtype, kv, page, "NHD")
    mask = bind(options.pop("mask", None), "mask")
    return form_of(maxima, None, mask, **options)


@pytest.mark.parametrize(
    ("about", "walk", "deal", "rows"),
    [
        ({}, "warp", "even", 8),
        ({"B": 1}, "warp", "round", 8),
        ({"B": 1, "mask": causal}, "warp", "even", 8),
        ({"q_len": 2}, "warp", "even", 8),
        ({"q_len": 4}, "program", "even", 16),
        ({"q_len": 8}, "program", "even", 32),
        ({"total_q": 512}, "program", "even", 64),
        ({"kv": torch.float8_e4m3fn}, "program", "even", 16),
        ({"kv": torch.float32}, "program", "even", 16),
        ({"D": (80, 80)}, "program", "even", 16),
        ({"D": (576, 512), "heads": (128, 1), "shared_kv": True}, "program", "even", 64),
        ({"B": 2048}, "program", "even", 16),
    ],
    # A function's name holds its address: two workers would collect different tests.
    ids=range(12),
)
def test_the_default(about, walk, deal, rows):
    found = next(serving_candidates(form(**about), H200))
    assert (found.walk, found.deal, found.BLOCK_M) == (walk, deal, rows)


@pytest.mark.parametrize("name", KNOWN)
def test_devices(name):
    """An A100 may; nothing but Hopper, where it was measured, starts so."""
    device = KNOWN[name]
    found = [each for each in space(form(), device) if each.walk == "warp"]
    assert bool(found) is (80 <= device.capability <= 90)
    first = next(serving_candidates(form(), device))
    assert (first.walk == "warp") is (device.capability == 90)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"BLOCK_M": 32}, "8 or 16"),
        ({"BLOCK_N": 32}, "each warp has 8"),
        ({"BLOCK_N": 256, "per_sm": 2}, "registers"),
        ({"num_warps": 8, "per_sm": 2}, "registers"),
        ({"deal": "round"}, "one request"),
        ({"deal": "heads", "combine": "launch"}, "programs of their own"),
        ({"fetch": 100}, "256 bytes"),
    ],
    ids=str,
)
def test_what_cannot_run_says_why(change, word):
    found = reasons(replace(WARPS, **change), form(), H200)
    assert found and any(word in each for each in found)
    assert not reasons(WARPS, form(), H200)


def test_only_warps_deal_round():
    for change in ({"deal": "round"}, {"deal": "heads"}, {"combine": "await"}, {"fetch": 128}):
        assert reasons(ServingConfig(16, 64, 4, 3, **change), form(1), H200)
    alone = form(1, heads=(8, 1))
    assert reasons(replace(WARPS, deal="heads"), alone, H200), "one head has all programs anyway"
    assert not reasons(replace(WARPS, deal="round"), form(1), H200)
    assert reasons(replace(WARPS, deal="round", combine="launch"), form(1), H200)


@pytest.mark.parametrize("page", [0, 1, 3, 16, 24, 256])
@pytest.mark.parametrize("D", [(64, 128), (128, 64)])
@pytest.mark.parametrize(("warps", "own", "rows"), [(1, 64, 8), (4, 32, 8), (8, 16, 16)])
def test_each_word_has_one_place(warps, own, rows, D, page):
    """The bases of a layout are all bits of its shape, each once; lanes may read alike."""
    config = ServingConfig(rows, warps * own, warps, 1, 1, walk="warp")
    layouts = dict(serving_layouts(form(D=D, page=page), config)["layouts"])
    about = {"tl": _Recorder()}
    for name in ("K_LOAD", "V_LOAD", "Q_LOAD", "K_PAGES", "V_PAGES"):
        registers, lanes, warp, _, shape = eval(layouts[name], about)
        bases = [tuple(each) for each in (*registers, *lanes, *warp) if any(each)]
        wanted = [
            tuple(1 << bit if axis == at else 0 for axis in range(3))
            for at, size in enumerate(shape)
            for bit in range(size.bit_length() - 1)
        ]
        assert sorted(bases) == sorted(wanted), name
        assert len(lanes) == 5


class _Recorder:
    @staticmethod
    def DistributedLinearLayout(*about):
        return about


@pytest.mark.parametrize("fetch", [0, 64, 128, 256])
def test_reads_say_how_much_l2_asks_for(fetch):
    text = render_serving(form(), replace(WARPS, fetch=fetch), H200, "").text
    assert (f"L2::{fetch}B.v4" in text) is (text.count("= fetched(") == 4) is bool(fetch)


def test_older_kernels_are_what_they_were():
    """A plan whose program walks together names nothing of the warps that walk alone."""
    config = ServingConfig(16, 64, 4, 3)
    text = render_serving(form(), config, H200, "").text
    assert "gluon" not in text and "OWN" not in text and "walk=program" in text
