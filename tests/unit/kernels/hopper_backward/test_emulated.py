"""The pipelines of Hopper's backward, run in plain Python: their gradients are float64's."""

import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flexattn import create_block_mask
from flexattn.catalogue import causal, sliding_window, softcap
from flexattn.frontend.gradients import AskedGradients, _problem
from flexattn.kernels.choose.options import NONE, Options
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.hopper_backward.config import (
    HopperBackwardConfig,
    at_sizes,
    columns,
    multiplied_columns,
    value_columns,
)
from flexattn.kernels.hopper_backward.family import defaults
from flexattn.mods import bind as bound
from flexattn.problem.inputs import Dropout
from flexattn.reference import attention
from flexattn.runtime import backward, decay_skip
from flexattn.runtime.build import Before, Scratch
from flexattn.runtime.candidates import Candidate
from flexattn.runtime.key_lists import BothLists
from tests.emulated_gluon import run
from tests.emulated_memory import Descriptor, Pointer
from tests.launches import Recorded
from tests.problems import H200, problem

DESCRIBED = ("Q", "DO", "K", "V", "DK", "DV")


class Emulated(Recorded):
    """A kernel of one launch, run on arrays by the names of its arguments."""

    def __init__(self, source, config, structure, seen):
        super().__init__(source)
        self.config, self.seen = config, seen
        self.width = multiplied_columns(structure.head_dim_qk)
        self.widths = columns(structure), value_columns(structure, config)

    def launch(self, stream, given):
        super().launch(stream, given)
        self.run(self.programs, self.launched[-1])

    def run(self, programs, told):
        names, rows, seen = told.keys(), self.config.BLOCK_M, self.seen
        if "DECAY_WINDOW" in names:
            for name, found in zip(("M_BLOCK_MAX", "N_BLOCK_MIN"), seen["tiles"], strict=True):
                told[name].copy_(found)
        if "mask_heads" in names:
            told["M_RUNS"].view(torch.int32).copy_(self.trimmed(told))
        if "OUT" in names:
            told["DELTA"].copy_((told["OUT"] * told["DO"]).double().sum(-1))
        if "STATS" in names and "Q" not in names:
            tiles, length = told["num_queries"], told["q_len"]
            stats = np.zeros((*told["LSE"].shape[:2], tiles * rows, 2), np.float32)
            stats[..., 0] = np.inf
            lse = told["LSE"].double().numpy() * np.log2(np.e)
            stats[:, :, :length, 0] = np.where(np.isneginf(lse), np.inf, lse)
            stats[:, :, :length, 1] = told["DELTA"].numpy()
            if "keep_scale" in names:
                stats[..., 0] -= np.log2(told["keep_scale"])
                stats[..., 1] /= told["keep_scale"]
            stats = stats.reshape(-1, rows, 2).transpose(0, 2, 1).reshape(1, 1, -1, 2 * rows)
            flags = self.flags(told)
            sums = np.full((stats.shape[2], rows, self.width), 0.0 if flags is None else np.nan)
            seen["stats"], seen["sums"] = stats, sums
            if flags is not None:
                flags.zero_()
            if self.config.persistent:
                told["WORK_COUNTER"].view(torch.int32)[0] = 0
        elif "DQ" in names and "Q" not in names:
            heads = told["DQ"].shape[:2]
            sums, flags = seen["sums"], self.flags(told)
            if flags is not None:
                sums = np.where(flags[0, 0, :, :1, None].numpy() != 0, self.by_row(sums), 0.0)
            sums = sums.reshape(*heads, -1, self.width) * told["sm_scale"]
            told["DQ"].copy_(torch.from_numpy(sums)[:, :, : told["q_len"], : told["DQ"].shape[3]])
        elif "Q" in names:
            run(self.source, programs, {n: self.argument(n, x) for n, x in told.items()})

    def trimmed(self, told):
        """Runs of tiles by what the mask keeps of each, as the kernel finds them one by one."""
        seen, (rows, keys) = self.seen, (self.config.BLOCK_M, self.config.BLOCK_N)
        q_idx, kv_idx = torch.arange(told["q_len"])[:, None], torch.arange(told["kv_len"])[None]
        found = torch.zeros(told["M_RUNS"].shape, dtype=torch.int32)
        for b, h, tile in product(*map(range, found.shape[:3])):
            kept = seen["mask_mod"](torch.tensor(b), torch.tensor(h), q_idx, kv_idx)
            kept = kept[:, tile * keys : (tile + 1) * keys].split(rows)
            row = (b * told["stride_q_mask_b"] + h * told["stride_q_mask_h"]) + tile * keys // 128
            run = told["Q_RUNS"].view(-1, 4)[row].tolist()
            begin, full_begin, full_end, end = (x * (128 // rows) for x in run)
            end = min(end, len(kept))
            full_begin, full_end = min(full_begin, end), min(full_end, end)
            some_full = full_begin < full_end
            while begin < (full_begin if some_full else end) and not kept[begin].any():
                begin += 1
            while end > (full_end if some_full else begin) and not kept[end - 1].any():
                end -= 1
            middle = (full_begin, full_end) if some_full else (end, begin)
            found[b, h, tile] = torch.tensor([begin, *middle, end])
        return found

    def flags(self, told):
        """What says which tiles of dq have sums; None where those begin with zeros."""
        return told[self.config.flags] if self.config.dq_tma else None

    def by_row(self, sums):
        """Tiles in the order of rows, of those in the order in which threads hold them."""
        tall = self.config.BLOCK_M == 128
        if self.width < self.widths[0]:
            sums = sums.reshape(-1, 1 + tall, self.width // 8, 4, 8, 4, 2, 2)
            sums = sums.transpose(0, 1, 3, 6, 4, 2, 5, 7)
            return sums.reshape(len(sums), self.config.BLOCK_M, self.width)
        groups = (2, 1) if tall else (1, 2)
        sums = sums.reshape(-1, *groups, self.width // groups[1] // 8, 4, 8, 4, 2, 2)
        sums = sums.transpose(0, 1, 4, 7, 5, 2, 3, 6, 8)
        return sums.reshape(len(sums), self.config.BLOCK_M, self.width)

    def argument(self, name, value):
        if name in DESCRIBED:
            (kind,) = (each.type for each in self.source.arguments if each.name == name)
            block = tuple(map(int, re.search(r"\[([\d, ]+)\]", kind)[1].split(",")))
            return Descriptor(value.numpy(), block, 2)
        if name == "STATS":
            return Descriptor(self.seen["stats"], (1, 1, 1, 2 * self.config.BLOCK_M), 4)
        if name == "DQ_ACC" and self.config.dq_tma:
            sums = self.seen["sums"].reshape(value.shape)
            (kind,) = (each.type for each in self.source.arguments if each.name == name)
            rows = int(re.search(r"\[1, 1, (\d+), 32\]", kind)[1])
            return Descriptor(sums, (1, 1, rows, value.shape[3]), 4)
        if name == "DQ_ACC":
            return Pointer(self.seen["sums"])
        if name in ("M_RUNS", "WORK_COUNTER"):
            value = value.view(torch.int32)
        return Pointer(value.view(-1).numpy()) if isinstance(value, torch.Tensor) else value


def gradients(
    config, q, k, v, dout, mask_mod, monkeypatch, dropout=None, score_mod=None, learned=(),
    tiles=None, block=128,
):  # fmt: skip
    """dq, dk and dv of the kernels that a launch has, and those of learned tensors.

    tiles: what the kernel would find that looks for tiles with weights. block: of the mask.
    """
    mask = mask_mod and create_block_mask(
        mask_mod, None, None, q.shape[2], k.shape[2], "cpu", block
    )
    lists = None if mask is None else BothLists.of(mask)
    score = bound(score_mod, "score")
    slots = tuple(range(len(learned)))
    asked = AskedGradients(score, bound(mask_mod, "mask"), mask, 0.1, NONE, slots, dropout)
    like = [x.bfloat16() for x in (q, k, v)]
    problem = _problem(asked, like, lists, H200)
    seen = {"tiles": tiles, "mask_mod": mask_mod}
    config, structure = at_sizes(config, problem), problem.structure
    # Fewer than there are tiles of keys.
    device = replace(H200, num_sms=3) if config.persistent else H200
    assert not family_of(config).limits.reasons(config, problem.structure, H200)

    def choose(problem, target, index, options):
        choice = Candidate(problem, device, config, "forced", "test").choice()
        return replace(choice, kernels=(Emulated(choice.source, config, structure, seen),))

    def build(source, *_):
        return Emulated(source, config, structure, seen)

    for each in (backward, decay_skip):
        monkeypatch.setattr(each, "builder", lambda: SimpleNamespace(kernel=build))
    windows = Before((), (Scratch("DECAY_WINDOW", (1,)),))
    monkeypatch.setattr(decay_skip, "pays", lambda problem: tiles is not None)
    monkeypatch.setattr(decay_skip, "LEAST_BACKWARD_KEYS", 0)
    monkeypatch.setattr(decay_skip, "decay_window", lambda *_: windows)
    out, lse, _ = attention(
        q, k, v, score_mod=score_mod, block_mask=mask, scale=0.1, dropout=dropout
    )
    prepared = backward.prepare_backward(
        problem, device, q.device, SimpleNamespace(choose=choose), Options(), (q, k, v), out,
        dout, lists,
    )  # fmt: skip
    rest = prepared.rest_of(lists, score, asked.mask, dropout)
    given = [x.float() for x in (q, k, v)]
    found = prepared.run(
        tuple(given), out.float(), lse.float(), (dout.float(), None), 0.1, rest, learned
    )
    return (*found[:3], *found.captured), mask


def holes(b, h, q_idx, kv_idx):
    return ((q_idx // 128 + kv_idx // 128) % 2 == 0) & (q_idx >= 70)


PIPELINES = {
    "plain": {},
    "dk": {"pipelined": "dk"},
    "dq_tma": {"dq_tma": True},
    "halves": {"dq_tma": True, "dq_halves": True, "early_lse": "half"},
    "two buffers": {"dq_tma": True, "ds_stages": 2, "early_lse": "all"},
    "ds first": {"dq_tma": True, "ds_stages": 2, "ds_first": True, "early_lse": "half"},
    "ds first halves": {
        "dq_tma": True,
        "dq_halves": True,
        "ds_stages": 2,
        "ds_first": True,
        "early_lse": "all",
    },
    "dq_tma dk": {"dq_tma": True, "pipelined": "dk"},
    "dk halves": {
        "dq_tma": True,
        "dq_halves": True,
        "ds_stages": 2,
        "pipelined": "dk",
        "early_lse": "all",
    },
    "deterministic": {"dq_tma": True, "deterministic": True},
    "deterministic dk": {
        "dq_tma": True,
        "deterministic": True,
        "pipelined": "dk",
    },
    "by product": {"by_product": True, "early_lse": "all"},
    "held": {"dq_tma": True, "dp_rs": True},
    "persistent held": {"dq_tma": True, "ds_stages": 2, "persistent": True, "dp_rs": True},
    "shifted": {"shift_rows": True, "remat": True},
    "trimmed": {"dq_tma": True, "ds_stages": 2, "trimmed": True, "waves": 4},
    "persistent": {"dq_tma": True, "ds_stages": 2, "persistent": True, "early_lse": "all"},
    "persistent trimmed": {
        "dq_tma": True,
        "ds_stages": 2,
        "persistent": True,
        "trimmed": True,
        "waves": 4,
    },
    "trimmed dk": {"pipelined": "dk", "trimmed": True},
}
DOCUMENTS = torch.arange(210) // 75


def documents(b, h, q_idx, kv_idx):
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


def packed(b, h, q_idx, kv_idx):
    """Of the first rows of the second block nothing is kept in the first one's keys."""
    return (q_idx >= kv_idx) & ((q_idx >= 140) == (kv_idx >= 140))


ENDS = torch.tensor([[60, 210, 128, 140], [210, 0, 65, 150]])


def by_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx < ENDS[b, h])


MASKS = {
    "documents": documents,
    "packed": packed,
    "by head": by_head,
    "full": None,
    "causal": causal,
    "window": sliding_window(90),
    "holes": holes,
}
MHA, GQA = (2, 2), (4, 2)
CASES = [
    *(("plain", mask, (64, 128, 2), heads) for mask, heads in (("full", GQA), ("causal", MHA))),
    ("plain", "documents", (64, 128, 2), GQA),
    *(("dk", mask, (64, 128, 2), heads) for mask, heads in (("causal", GQA), ("window", MHA))),
    *(("shifted", "full", (64, 128, 3), heads) for heads in (MHA, GQA)),
    ("dk", "causal", (64, 64, 3), MHA),
    ("plain", "causal", (128, 128, 1), MHA),
    *(
        ("by product", mask, (64, 64, 2), heads)
        for mask, heads in (("full", GQA), ("causal", MHA), ("holes", GQA), ("window", MHA))
    ),
    *(("dq_tma", mask, (64, 128, 2), heads) for mask, heads in (("full", GQA), ("holes", MHA))),
    *(("dq_tma dk", mask, (64, 64, 3), heads) for mask, heads in (("window", GQA), ("full", MHA))),
    ("dq_tma", "causal", (128, 64, 1), MHA),
    ("ds first", "causal", (128, 128, 2), MHA),
    *(("held", mask, (128, 128, 2), heads) for mask, heads in (("full", MHA), ("causal", GQA))),
    ("ds first", "full", (64, 128, 2), GQA),
    ("dk halves", "causal", (128, 128, 2), MHA),
    ("dk halves", "holes", (64, 128, 3), GQA),
    ("halves", "causal", (128, 64, 2), MHA),
    *(("halves", mask, (64, 128, 3), heads) for mask, heads in (("full", MHA), ("window", GQA))),
    *(
        ("two buffers", mask, (64, 128, 2), heads)
        for mask, heads in (("full", GQA), ("holes", MHA))
    ),
    *(
        ("trimmed", mask, (64, 128, 2), heads)
        for mask in ("documents", "packed", "by head", "window", "holes", "full")
        for heads in (MHA, GQA)
    ),
    *(("persistent", mask, (64, 128, 2), heads) for mask in MASKS for heads in (MHA, GQA)),
    ("persistent", "causal", (128, 128, 1), MHA),
    ("persistent", "full", (64, 128, 3), MHA),
    *(("persistent trimmed", mask, (64, 128, 2), MHA) for mask in ("packed", "by head")),
    *(("trimmed dk", mask, (64, 64, 2), MHA) for mask in ("packed", "documents")),
    *(("deterministic", mask, (64, 128, 2), MHA) for mask in MASKS),
    *(("deterministic dk", mask, (64, 64, 2), GQA) for mask in MASKS),
]


def drawn(widths, heads=MHA, lengths=(210, 200), batches=(1, 1)):
    """(q, k, v) and the gradient of the output, of so many rows and keys."""
    torch.manual_seed(0)
    (B, Bkv), (L, S) = batches, lengths
    q, dout = (torch.randn(B, heads[0], L, d, dtype=torch.float64) for d in widths)
    k, v = (torch.randn(Bkv, heads[1], S, d, dtype=torch.float64) for d in widths)
    return (q, k, v), dout


def assert_gradients(
    config, tensors, dout, mask, monkeypatch, *, score_mod=None, dropout=None, learned=(),
    block=128,
):  # fmt: skip
    """Hold those of an emulated kernel to autograd's of q, k, v and what is learned."""
    found, block_mask = gradients(
        config, *tensors, dout, mask, monkeypatch, dropout, score_mod, learned, block=block
    )
    leaves = [x.requires_grad_() for x in (*tensors, *learned)]
    out, _, _ = attention(
        *tensors, score_mod=score_mod, block_mask=block_mask, scale=0.1, dropout=dropout
    )
    for ours, wanted in zip(found, torch.autograd.grad(out, leaves, dout), strict=True):
        torch.testing.assert_close(ours.double(), wanted.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "mask", "tile", "heads"), CASES, ids=str)
def test_gradients(name, mask, tile, heads, monkeypatch):
    """Rows and keys that no tile divides, 40 columns for values of 24: of the tile 64 are read."""
    config, batch = HopperBackwardConfig(*tile, **PIPELINES[name]), 2 if heads == MHA else 1
    given = drawn((40, 24), heads, batches=(2, batch))
    assert_gradients(config, *given, MASKS[mask], monkeypatch)


def chosen(b, h, q_idx, kv_idx):
    """As of a Selection: blocks of 64 here and there, in the past."""
    return ((q_idx // 64 * 5 + kv_idx // 64 + h) % 3 == 0) & (q_idx >= kv_idx)


@pytest.mark.parametrize("heads", [MHA, GQA], ids=str)
@pytest.mark.parametrize("place", range(3))
def test_blocks_of_64_keys(place, heads, monkeypatch):
    """Triton's backward took them: 123 TFLOP/s where blocks of 128 ran at 497 (H200)."""
    wanted = problem("backward", 40, 24, mask_mod=chosen, block=(64, 64), group=heads[0] // 2)
    config = list(defaults(wanted))[place]
    assert config.BLOCK_N == 64 and not family_of(config).limits.reasons(
        config, wanted.structure, H200
    )
    given = drawn((40, 24), heads, batches=(2, 2 if heads == MHA else 1))
    assert_gradients(config, *given, chosen, monkeypatch, block=64)


OF_ROWS = torch.rand(2, 210, 4, generator=torch.Generator().manual_seed(3)) < 0.4


def of_rows(b, h, q_idx, kv_idx):
    """As of a Selection of single rows: blocks of 64 keys that each row chose."""
    return OF_ROWS[h // 2, q_idx, kv_idx // 64] & (q_idx >= kv_idx)


@pytest.mark.parametrize("place", range(3))
def test_blocks_that_rows_choose(place, monkeypatch):
    """A tile of 64 keys asks once for each row; Triton's backward asks for each weight."""
    wanted = problem("backward", 40, 24, mask_mod=of_rows, has_full=False, group=2)
    config = list(defaults(wanted))[place]
    assert config.BLOCK_N == 64 and not family_of(config).limits.reasons(
        config, wanted.structure, H200
    )
    wide = replace(config, BLOCK_N=128, by_product=False)
    assert family_of(wide).limits.violated(wide, wanted.structure, H200)[0].name == "mods"
    assert_gradients(config, *drawn((40, 24), GQA, batches=(2, 1)), of_rows, monkeypatch)


@pytest.mark.parametrize(("name", "mask"), [("ds first", "full"), ("plain", "causal")])
def test_heads_above_128_columns_in_tiles_of_128_keys(name, mask, monkeypatch):
    """dQ in two parts, where values have fewer columns than keys."""
    form = replace(HopperBackwardConfig(64, 128, 2, **PIPELINES[name]), dq_tma=False)
    torch.manual_seed(0)
    q, dout = (torch.randn(1, 2, 210, d, dtype=torch.float64) for d in (184, 120))
    k, v = (torch.randn(1, 2, 200, d, dtype=torch.float64) for d in (184, 120))
    assert_gradients(form, (q, k, v), dout, MASKS[mask], monkeypatch)


@pytest.mark.parametrize(("name", "mask"), [("held", "full"), ("persistent held", "causal")])
def test_half_of_v_is_held(name, mask, monkeypatch):
    """Of 128 columns registers have room for 64 of V, and dP is the sum of two products."""
    config = HopperBackwardConfig(64, 128, 2, **PIPELINES[name])
    assert_gradients(config, *drawn((120, 104)), MASKS[mask], monkeypatch)


TALL, WIDE, SPLIT, ODD = (128, 128, 2), (64, 128, 2), (64, 64, 2), (64, 96, 2)
NARROW = [
    ((48, 48), "persistent", "causal", TALL, MHA),
    ((40, 64), "ds first halves", "full", TALL, GQA),
    ((48, 24), "halves", "window", WIDE, MHA),
    ((80, 80), "ds first halves", "full", WIDE, MHA),
    ((80, 80), "persistent held", "causal", WIDE, GQA),
    ((96, 96), "persistent held", "full", WIDE, MHA),
    ((96, 96), "deterministic", "causal", WIDE, GQA),
    ((96, 96), "dk halves", "window", WIDE, GQA),
    ((112, 112), "halves", "packed", WIDE, MHA),
    ((112, 80), "persistent trimmed", "documents", WIDE, MHA),
    ((64, 104), "halves", "causal", WIDE, GQA),
    ((160, 160), "by product", "full", SPLIT, GQA),
    ((192, 192), "by product", "causal", SPLIT, MHA),
    ((192, 192), "dk", "causal", SPLIT, GQA),
    ((224, 224), "by product", "window", SPLIT, MHA),
    ((192, 192), "by product", "full", ODD, GQA),
    *(((184, 120), "by product", mask, ODD, MHA) for mask in ("causal", "window")),
    ((192, 128), "by product", "full", SPLIT, MHA),
    ((192, 128), "by product", "holes", SPLIT, GQA),
    ((144, 176), "by product", "causal", SPLIT, MHA),
    ((96, 192), "by product", "causal", SPLIT, MHA),
]


@pytest.mark.parametrize(("widths", "name", "mask", "tile", "heads"), NARROW, ids=str)
def test_products_as_narrow_as_heads(widths, name, mask, tile, heads, monkeypatch):
    """Lengths that no tile divides; each product takes the steps and columns that it announces."""
    monkeypatch.setattr("flexattn.kernels.hopper_backward.limits.bounds_views", lambda: False)
    config = HopperBackwardConfig(*tile, **PIPELINES[name])
    assert_gradients(config, *drawn(widths, heads), MASKS[mask], monkeypatch)


CAPPED = [
    ((96, 96), "persistent held", WIDE, MHA),
    ((80, 112), "ds first halves", WIDE, GQA),
    ((192, 192), "by product", SPLIT, GQA),
    ((192, 128), "dk", SPLIT, MHA),
    ((48, 48), "persistent", TALL, MHA),
]


@pytest.mark.parametrize(("widths", "name", "tile", "heads"), CAPPED, ids=str)
def test_capped_scores_of_narrow_products(widths, name, tile, heads, monkeypatch):
    """A score_mod beside a mask: what is not multiplied has no part in either derivative."""
    config, given = HopperBackwardConfig(*tile, **PIPELINES[name]), drawn(widths, heads)
    assert_gradients(config, *given, causal, monkeypatch, score_mod=softcap(3.0))


@pytest.mark.parametrize("meets", [False, True])
def test_documents_in_either_form(meets, monkeypatch):
    """What a mask reads by row, unchecked but in the last tile, and its two conditions at once."""
    monkeypatch.setattr("flexattn.kernels.hopper_backward.source.waits_meet", lambda: meets)
    config = HopperBackwardConfig(64, 128, 2, **PIPELINES["persistent trimmed"])

    def in_order(b, h, q_idx, kv_idx):
        return documents(b, h, q_idx, kv_idx) & (q_idx >= kv_idx)

    given = drawn((40, 40), lengths=(210, 210))
    assert_gradients(config, *given, in_order, monkeypatch)


@pytest.mark.parametrize("early", ["", "half", "all"])
def test_scores_that_are_no_number_behind_the_last_row(early, monkeypatch):
    """Of the last tile's rows some are none: 0 / 0 there made all of dk and dv NaN."""
    config = HopperBackwardConfig(64, 128, 2, early_lse=early)

    def nearer_the_end(score, b, h, q_idx, kv_idx):
        return score / (210 - q_idx)

    given = drawn((64, 64), lengths=(210, 290))
    assert_gradients(config, *given, None, monkeypatch, score_mod=nearer_the_end)


DROPPING = [
    ("plain", "full", (64, 128, 2), MHA, 0.3),
    ("plain", "full", (64, 128, 2), MHA, 1.0),
    ("plain", "causal", (128, 128, 1), GQA, 0.5),
    ("dk", "window", (64, 64, 3), MHA, 0.3),
    ("shifted", "full", (64, 128, 3), GQA, 0.3),
    ("dq_tma", "window", (64, 128, 2), MHA, 0.8),
    ("halves", "full", (64, 128, 2), MHA, 0.3),
    ("ds first halves", "causal", (64, 128, 2), MHA, 0.6),
    ("ds first halves", "window", (64, 128, 2), GQA, 0.3),
    ("deterministic", "causal", (64, 64, 2), MHA, 0.3),
    ("deterministic dk", "holes", (64, 128, 2), GQA, 0.3),
]


@pytest.mark.parametrize(("name", "mask", "tile", "heads", "p"), DROPPING, ids=str)
def test_gradients_of_the_weights_that_are_kept(name, mask, tile, heads, p, monkeypatch):
    """Of every tile the bits that the warps beside it draw are those of the reference."""
    config, batch = HopperBackwardConfig(*tile, **PIPELINES[name]), 2 if heads == MHA else 1
    dropout = Dropout.of(p)._replace(seed=torch.tensor([2**62 + 12345]))
    given = drawn((40, 24), heads, batches=(2, batch))
    assert_gradients(config, *given, MASKS[mask], monkeypatch, dropout=dropout)
