"""Biases by distance in Hopper's backward: read, and summed, once for a warp's diagonals."""

import ast
from dataclasses import replace

import numpy as np
import pytest
import torch

from flexattn.catalogue import causal, relative_bias, softcap, t5_bias
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from flexattn.kernels.hopper_backward.source import render
from tests.emulated_diagonals import broadcast_diagonals, lanes_run, reduce_diagonals, threads
from tests.problems import H200, problem
from tests.unit.kernels.hopper_backward.test_emulated import (
    GQA,
    MASKS,
    MHA,
    PIPELINES,
    assert_gradients,
    drawn,
)


def assembly(source, name):
    """The value of a constant of a kernel that is text."""
    start = source.text.index(f"\n{name} = gl.constexpr(") + len(f"\n{name} = gl.constexpr(")
    return ast.literal_eval("(" + source.text[start : source.text.index("\n)\n", start)] + ")")


@pytest.mark.parametrize(("D", "tile", "span"), [(64, (128, 128), 128), (128, (64, 128), 64),
                                                 (256, (64, 64), 32)], ids=str)  # fmt: skip
def test_assembly_of_a_warp(D, tile, span):
    """Lanes that run one instruction after another read and add up what the definition says."""
    table = torch.zeros(4, 900)
    wanted = problem("backward", D, score_mod=relative_bias(table, 450))
    wanted = replace(wanted, structure=replace(wanted.structure, grads=(0,)))
    source = render(wanted.structure, HopperBackwardConfig(*tile, 2), H200, "")
    rows, keys = tile
    draw = np.random.default_rng(0)
    values = draw.integers(-99, 99, (keys, rows)).astype(np.float32)
    sums = np.stack([lanes_run(assembly(source, "REDUCE_DIAGONALS"), each)
                     for each in threads(values, span)])  # fmt: skip
    held = threads(reduce_diagonals(values), span // 2)
    np.testing.assert_array_equal(sums[..., : span // 4], held)
    assert not sums[..., span // 4 :].any()
    read = draw.integers(-99, 99, (keys, rows // 2)).astype(np.float32)
    twice = np.concatenate([threads(read, span // 2)] * 2, -1)
    found = np.stack([lanes_run(assembly(source, "BROADCAST_DIAGONALS"), each) for each in twice])
    np.testing.assert_array_equal(found, threads(broadcast_diagonals(read), span))


def distance(table):
    return relative_bias(table, 250)


def at_edges(table):
    # Tiles at both ends read outside: places before the first count from the end, as in torch.
    return relative_bias(table, 100)


def capped_before(table):
    bias = relative_bias(table, 250)
    return lambda score, *at: softcap(3.0)(bias(score, *at), *at) * 0.5


def scaled_by_distance(table):
    return lambda score, b, h, q_idx, kv_idx: score * (1 + table[h, kv_idx - q_idx + 250])


def last_of_few(table):
    # Most distances lie outside of the table, where torch would fail and nothing is read here.
    return lambda score, b, h, q_idx, kv_idx: score + table[h, torch.clamp(q_idx - kv_idx, -9, 40)]


SCORES = {
    "distance": (distance, (4, 500)),
    "edges": (at_edges, (4, 310)),
    "capped": (capped_before, (4, 500)),
    "scaled": (scaled_by_distance, (4, 500)),
    "wrapped": (last_of_few, (4, 60)),
    "buckets": (lambda table: t5_bias(table, 100), (32, 4)),
}
CASES = [
    ("distance", "plain", "full", (64, 128, 2), GQA),
    ("distance", "two buffers", "causal", (64, 128, 2), MHA),
    ("edges", "two buffers", "full", (64, 128, 2), MHA),
    ("edges", "plain", "causal", (64, 64, 2), GQA),
    ("capped", "dq_tma", "holes", (64, 128, 2), GQA),
    ("scaled", "halves", "window", (64, 128, 3), MHA),
    ("wrapped", "dk", "causal", (64, 64, 3), MHA),
    ("wrapped", "dk", "full", (64, 128, 2), GQA),
    ("buckets", "two buffers", "documents", (64, 128, 2), GQA),
    ("distance", "plain", "causal", (128, 128, 1), MHA),
]


@pytest.mark.parametrize(("score", "name", "mask", "tile", "heads"), CASES, ids=str)
def test_gradients_of_what_is_learned(score, name, mask, tile, heads, monkeypatch):
    make, shape = SCORES[score]
    torch.manual_seed(0)
    table = torch.randn(shape, dtype=torch.float32)
    config, batch = HopperBackwardConfig(*tile, **PIPELINES[name]), 2 if heads == MHA else 1
    given = *drawn((64, 64), heads, batches=(2, batch)), MASKS[mask], monkeypatch
    assert_gradients(config, *given, score_mod=make(table), learned=(table,))


def test_what_is_not_read_along_diagonals_is_not_served():
    """A bias of each key, and one of each score, are another family's."""
    reasons = family_of(HopperBackwardConfig(64, 128, 2)).limits.reasons
    for make in (
        lambda x: lambda score, b, h, q_idx, kv_idx: score + x[h, kv_idx],
        lambda x: lambda score, b, h, q_idx, kv_idx: score + x[h, q_idx + kv_idx],
    ):
        wanted = problem("backward", 128, score_mod=make(torch.zeros(4, 9000)))
        wanted = replace(wanted, structure=replace(wanted.structure, grads=(0,)))
        said = reasons(HopperBackwardConfig(64, 128, 2), wanted.structure, H200)
        assert any("along q_idx - kv_idx" in each for each in said)
    wanted = problem("backward", 128, score_mod=distance(torch.zeros(4, 500)), mask_mod=causal)
    wanted = replace(wanted, structure=replace(wanted.structure, grads=(0,)))
    ordered = HopperBackwardConfig(64, 128, 2, dq_tma=True, deterministic=True)
    assert not reasons(replace(ordered, deterministic=False), wanted.structure, H200)
    assert any("any order" in each for each in reasons(ordered, wanted.structure, H200))
