"""Biases by distance in Hopper's backward for an H200 without one: what their loops take."""

import re
from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import causal, relative_bias, t5_bias
from flexattn.runtime.resources import _disassembled
from tests.compile.shares import share
from tests.compile.test_hopper_backward import EVEN, ODD, kept
from tests.problems import problem

pytestmark = pytest.mark.oldest

# Additions of a warp, of tiles that lie inside of the table and of others: of diagonals of 16 keys
# and 64 rows; of 32 rows where warpgroups share them, beside those of dq, which each thread adds.
ADDED = {64: 2 * 3, 128: 2 * 3, 256: 2 * 2 + 16}
# The most words that a loop spills, by head dimension.
MOST = {64: 0, 128: 5, 256: 10}
CASES = [(D, sizes, name) for D in MOST for sizes in (EVEN, ODD) for name in ("causal", "full")]


@pytest.mark.parametrize(("D", "sizes", "name"), share(CASES, lambda c: c == (64, EVEN, "full")))
def test_loops_add_once_for_each_diagonal(D, sizes, name):
    kv_len, group = sizes
    mask = {"mask_mod": causal, "runs": True} if name == "causal" else {}
    score_mod = relative_bias(torch.zeros(32, 16384, dtype=torch.bfloat16), 8192)
    wanted = problem("backward", D, kv_len=kv_len, group=group, score_mod=score_mod, **mask)
    wanted = replace(wanted, structure=replace(wanted.structure, grads=(0,)))
    compiled, spilled = kept(wanted)
    assert max(spilled) <= MOST[D], spilled
    # Three products of a tile begin with zeros: scores, dP and dQ.
    code = _disassembled(compiled.asm["cubin"])
    loops, rest = divmod(len(re.findall(r"HGMMA[^;]*RZ, !UPT", code)), 3)
    assert loops and not rest
    assert code.count("REDG.E.ADD.F32") == ADDED[D] * loops, loops
    assert "ATOMG.E.ADD.F32" not in code


@pytest.mark.full_matrix
@pytest.mark.parametrize("D", MOST)
def test_buckets_of_distances_are_served(D):
    score_mod = t5_bias(torch.zeros(32, 32), 128)
    wanted = problem("backward", D, group=1, score_mod=score_mod, mask_mod=causal, runs=True)
    wanted = replace(wanted, structure=replace(wanted.structure, grads=(0,)))
    kept(wanted)
