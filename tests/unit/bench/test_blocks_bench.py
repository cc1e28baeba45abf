"""The block mask bench: it runs on a CPU, and says which limit was passed."""

import json

import pytest

from bench.blocks import failures, main, table

GOOD = {
    "first": 0.4, "seconds": [0.003, 0.004, 0.009], "beyond": 1_000_000,
    "result": 2_000_000, "partial": 3, "full": 4,
}  # fmt: skip


@pytest.mark.long
def test_a_row_on_the_cpu(tmp_path, capsys):
    out = tmp_path / "blocks.json"
    main(["--rows", "causal-64k", "--device", "cpu", "--rounds", "1", "--out", str(out)])
    found = json.loads(out.read_text())["samples"]["causal-64k"]
    assert (found["partial"], found["full"]) == (512, 512 * 511 // 2)
    assert "| causal-64k |" in capsys.readouterr().out
    assert main(["--rows", "causal-1m", "--device", "cpu"]) == 2


def test_limits():
    assert failures({"causal-64k": GOOD, "causal-1m": GOOD}, "cuda") == []
    slow = GOOD | {"first": 0.6, "seconds": [0.021], "beyond": 60_000_000}
    assert len(failures({"causal-64k": slow}, "cuda")) == 3
    assert len(failures({"causal-1m": slow}, "cuda")) == 2
    assert failures({"causal-64k": slow}, "cpu") == []
    assert "| causal-64k | 400.00 | 4.00 | 9.00 | 5 | 2.0 | 1.0 | 3 | 4 |" in table(
        {"causal-64k": GOOD}, "cuda"
    )
