"""The bench of packed sequences: its rows, and its gate."""

from dataclasses import replace

import pytest
import torch

from bench import packed, packed_backward
from bench.peers import Refusal
from bench.runner import Method

ON_CPU = Method(device="cpu", dtype=torch.float32)
SMALL = packed.PackRow("small", "table", (30, 1, 50), 4, 2, 16)


def test_rows_are_the_same_in_every_run():
    rows = packed.packed_rows()
    assert rows == packed.packed_rows() and len({row.name for row in rows}) == len(rows)
    assert [row.group for row in rows] == ["table"] * 16 + ["mods"] * 6 + ["random"] * 20
    for row in rows:
        assert sum(row.lengths) % 1024 == 0 and min(row.lengths) > 0


def test_work_is_that_of_kept_pairs():
    assert SMALL.flops == 4 * 16 * 4 * (900 + 1 + 2500) / 2
    assert replace(SMALL, window=100).flops == SMALL.flops
    assert replace(SMALL, lengths=(10,), window=3).flops == 4 * 16 * 4 * (8 + 6 * 4)


@pytest.mark.parametrize(
    "row", [SMALL, replace(SMALL, window=7), replace(SMALL, score="softcap")], ids=str
)
def test_ours_passes_the_gate_and_another_document_does_not(row):
    x = packed.make_pack(row, ON_CPU)
    for peer in (packed.ours, packed.documents):
        out = peer(x)()
        assert packed.check(out, x) == ""
        assert "document 2" in packed.check(out.roll(1, 0), x)


def test_flash_attention_refuses_mods():
    x = packed.make_pack(replace(SMALL, score="alibi"), ON_CPU)
    assert isinstance(packed.flash("flash_attn_interface")(x), Refusal)
    assert isinstance(packed.flash("no_such_module")(packed.make_pack(SMALL, ON_CPU)), Refusal)


@pytest.mark.parametrize(
    "row", [SMALL, replace(SMALL, window=7), replace(SMALL, score="bias")], ids=str
)
def test_gradients_pass_the_gate_and_others_do_not(row):
    x = packed.make_pack(row, ON_CPU)
    run = packed_backward._prepare(packed.ours, x)
    found = run()
    assert packed_backward.check(found, run.dout, x) == ""
    assert "dk of document 0" in packed_backward.check(
        (found[0], -found[1], found[2]), run.dout, x
    )
    assert len(found) == 3 + (row.score == "bias")
