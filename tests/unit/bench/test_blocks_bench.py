"""The block mask bench: a row on the CPU, and the limits that make it red."""

from dataclasses import replace

import pytest

from bench import blocks
from bench.runner import Method, run_row

ROWS = {row.name: row for row in blocks.ROWS}
METHOD = Method(rounds=1, device="cpu")


@pytest.mark.long
def test_a_row_on_the_cpu():
    row = replace(ROWS["causal-64k"], limit_ms=1e6)
    x = blocks.BLOCKS.make(row, METHOD)
    assert int(x().kv_num_blocks.sum()) == 512
    assert len(run_row(row, {"flexattn": None}, METHOD, blocks.BLOCKS).samples["flexattn"].us) == 1


@pytest.mark.parametrize(
    ("ms", "over", "row", "passed"),
    [
        (4.9, 10**6, "causal-64k", True),
        (5.1, 10**6, "causal-64k", False),
        (4.9, 51_000_000, "causal-64k", False),
        (19.0, 51_000_000, "causal-1m", True),
        (21.0, 0, "causal-1m", False),
    ],
)
def test_limits(monkeypatch, ms, over, row, passed):
    monkeypatch.setattr(blocks, "wall_us", lambda call: ms * 1e3)
    monkeypatch.setattr(blocks, "beyond", lambda x: over)
    x = blocks.Masked(ROWS[row], None, "cpu")
    assert blocks._judge(x, x).passed == passed
