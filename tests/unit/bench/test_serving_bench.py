"""The rows of the serving bench, their bytes, and the tensors that they are made of."""

from dataclasses import replace

import pytest
import torch

from bench import serving
from bench.serving_inputs import check_requests, make_served
from bench.serving_rows import serving_rows
from flexattn.reference import attention

ROWS = {row.name: row for row in serving_rows()}


def test_rows_are_unique_and_have_the_bytes_of_the_issue():
    assert len(ROWS) == len(serving_rows())
    assert ROWS["b64-16k"].kv_bytes == 2 * 64 * 16384 * 8 * 128 * 2
    assert ROWS["b8-8k-window"].kv_bytes == ROWS["b8-8k"].kv_bytes
    assert ROWS["b64-16k-fp8"].kv_bytes * 2 == ROWS["b64-16k"].kv_bytes
    cascade = ROWS["b32-8k-256-cascade"]
    assert cascade.kv_bytes == (8192 + 32 * 256) * 8 * 256 * 2
    assert ROWS["b32-8k-256-plain"].kv_bytes == 32 * (8192 + 256) * 8 * 256 * 2
    tree = ROWS["b64-3-levels-tree"]
    assert tree.kv_bytes == (8192 + 4 * 4096 + 16 * 2048 + 64 * 256) * 8 * 256 * 2
    assert ROWS["b64-3-levels-plain"].kv_bytes == 64 * (14336 + 256) * 8 * 256 * 2
    assert ROWS["b8-1m"].kv_bytes == 8 * ROWS["b1-1m"].kv_bytes == 2**35
    # Read at 3.95 TB/s the ragged batch takes the 240 us of the issue.
    assert ROWS["ragged-b64"].kv_bytes / 3.95e6 == pytest.approx(240, rel=0.01)


@pytest.mark.parametrize(
    "name", ["b8-8k", "b8-8k-contiguous", "b32-8k-256-cascade", "b1-8k-fp8-token-head"]
)
def test_the_judge_sees_one_wrong_request(name):
    row = ROWS[name]
    lens = (48,) * 3 if row.shared else (33, 70, 90)
    row = replace(row, lens=lens, shared=32 if row.shared else 0, hq=4, hkv=2, d=16, dv=16)
    x = make_served(row, "cpu")
    outs = []
    for b in range(3):
        q, k, v = (each.transpose(0, 1)[None] for each in (x.q[b], *x.keys(b)))
        outs.append(attention(q, k, v).out[0].transpose(0, 1))
    out = torch.stack(outs)
    assert check_requests(out, x) == ""
    out[2] *= 1.05
    assert "out[2, 0]: max error" in check_requests(out, x)
    if row.shared:
        assert torch.equal(x.keys(0)[0][:32], x.keys(2)[0][:32])
        assert not torch.equal(x.keys(0)[0][32:], x.keys(2)[0][32:])


def test_a_tree_of_three_levels_shares_its_pages():
    """By a level's node, and pages of a request's own by nobody."""
    levels = ((1, 32), (2, 16), (4, 48))
    row = replace(
        ROWS["b64-3-levels-tree"], lens=(110,) * 8, shared=96, levels=levels, hq=4, hkv=2, d=16,
        dv=16,
    )  # fmt: skip
    x = make_served(row, "cpu")
    assert len(x.k) == 2 + 2 + 4 * 3 + 8 and len(x.table.unique()) == len(x.k)
    for a in range(8):
        for b in range(a):
            same = (x.table[a] == x.table[b]).tolist()
            tool, conversation = a // 4 == b // 4, a // 2 == b // 2
            assert same == [True] * 2 + [tool] + [conversation] * 3 + [False]


def test_a_variant_is_of_fields_and_may_be_batch_invariant(monkeypatch):
    monkeypatch.setattr(serving, "served_with", lambda *given: given)
    assert serving.variant("BLOCK_N=64,own.per_sm=1") == ({"BLOCK_N": 64, "own.per_sm": 1}, False)
    assert serving.variant("batch_invariant=1,per_sm=2") == ({"per_sm": 2}, True)


def test_the_command_lists_rows_of_all_groups(capsys):
    assert serving.run(["--list", "--rows", "^(paged/b1-1k|random/)"]) == 0
    assert capsys.readouterr().out.split()[0] == "b1-1k"


def test_rows_that_choose_read_their_keys_alone():
    row = replace(
        ROWS["quest-b32-32k"], lens=(33, 70, 90), hq=4, hkv=2, d=16, dv=16, chosen=(2, 16),
        dtype="float32",
    )  # fmt: skip
    assert row.kv_bytes == (32 + 32 + 32) * 2 * (16 + 16) * 2
    x = make_served(row, "cpu")
    out = torch.zeros(3, 1, 4, 16)
    for b, h in ((b, h) for b in range(3) for h in range(4)):
        k, v = (each[:, h // 2] for each in x.keys(b))
        kept = x.mask(b, h // 2)(b, h, 0, torch.arange(len(k)))
        assert len(x.chosen[b, h // 2].unique()) == 2 and kept.sum() in (17, 22, 26, 32)
        scores = (k @ x.q[b, 0, h] / 4).masked_fill(~kept, -torch.inf)
        out[b, 0, h] = scores.softmax(0) @ v
    assert check_requests(out, x) == ""
    x.chosen[2, 0] = (x.chosen[2, 0] + 1) % 6
    assert "out[2, 0]" in check_requests(out, x)
