"""The table of what e4m3 costs in accuracy, on the CPU at short lengths."""

import json

from bench.eight_bit_errors import KINDS, main
from bench.rows import HEADS


def test_every_kind_has_its_errors(tmp_path, capsys):
    path = tmp_path / "errors.json"
    assert main(["--length", "40", "--out", str(path)]) == 0
    rows = json.loads(path.read_text())["errors"]
    assert [row["row"] for row in rows] == [f"d{d}-{kind}" for d in HEADS for kind in KINDS]
    for row in rows:
        assert row["bf16"] < 0.005 < 0.01 < row["exact blocks"] < 0.3
        # What K has in common costs no bits where it is taken away.
        assert "biased" not in row["row"] or row["exact blocks"] < 0.9 * row["exact heads"]
    assert "flash_attn" in capsys.readouterr().out  # it says why there is no number
