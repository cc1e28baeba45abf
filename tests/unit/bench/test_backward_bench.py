"""What needs no GPU in bench.backward: rows, gates of gradients, refusals, the table."""

from pathlib import Path

import torch

from bench import backward, results
from bench.backward import BACKWARD, allowed
from bench.inputs import make
from bench.peers import (
    BACKWARD_PEERS,
    OURS,
    TORCH_PEERS,
    VARIED,
    Ready,
    of_backwards,
    ours,
    sdpa,
)
from bench.rows import Row, Shape, backward_rows
from bench.runner import Method, run
from bench.table import BAR, markdown
from bench.tasks import call_of
from flexattn.measure.timing import Samples
from flexattn.tuning.workload import read

METHOD = Method(rounds=2, min_ms=0, clock="cpu", device="cpu")
SMALL = Shape(1, 4, 2, 61, 61, 16)
PLAIN = Row("plain", "grid", SMALL, "causal")
LEARNED = Row("learned", "mods", SMALL, "causal", "relative", learned=True)
FORWARD = Row("forward", "forward", SMALL, "causal")


def wrongly(x):
    right = ours(x)
    return Ready(lambda *leaves: right.forward(*leaves) * 1.05, right.leaves)


def test_the_rows_of_the_bar_are_there():
    rows = {row.name: row for row in backward_rows()}
    assert len(rows) == len(backward_rows())
    grid = {name for name, row in rows.items() if row.group == "grid"}
    assert grid == {
        f"d{d}-{n}k-{m}" for d in (64, 128, 256) for n in (4, 16) for m in ("full", "causal")
    }
    for row in rows.values():
        s = row.shape
        heads = 32 if s.d <= 64 else 16 if s.d <= 128 else 8
        assert s.batch * s.q_len == 32 * 1024 and s.hq == heads
    assert {row.shape.d for row in rows.values() if row.group == "dims"} >= {48, 80, 96, 192, 224}
    mods = {name for name, row in rows.items() if row.group == "mods"}
    assert mods == {f"d128-8k-{m}" for m in "window documents softcap alibi learned".split()}
    assert VARIED in rows and rows["d128-8k-learned"].learned


def test_the_grid_is_a_workload_too():
    """What tunes it, `flexattn tune bench/grid.toml --only backward`, says the same shapes."""
    found = [
        row
        for row in read(Path(backward.__file__).with_name("grid.toml")).rows
        if row.kind == "backward"
    ]
    said = {(row.shape, row.mask is not None) for row in found}
    grid = (row for row in backward_rows() if row.group in ("grid", "8k"))
    asked = {(call_of(row).shape, row.mask == "causal") for row in grid}
    assert said == asked and len(found) == 18


def test_a_dry_run_gates_gradients_races_and_prints(tmp_path):
    peers = {
        OURS: ours,
        f"{OURS} wrong": wrongly,
        "sdpa": of_backwards(sdpa(None)),
        "fa4": BACKWARD_PEERS["fa4"],
        "flexattn-without-lse": BACKWARD_PEERS["flexattn-without-lse"],
    }
    report = run("backward", [PLAIN, LEARNED, FORWARD], peers, METHOD, kind=BACKWARD)
    plain, learned, forward = report.rows
    assert plain.gates[OURS].passed and not plain.gates[f"{OURS} wrong"].passed
    assert set(plain.samples) == {OURS, "sdpa"} and plain.flops == 2.5 * PLAIN.flops
    for name in ("dq", "dk", "dv", "dtable"):
        assert f"{name}: max error" in learned.gates[f"{OURS} wrong"].message
    assert learned.gates[OURS].passed and learned.refused["sdpa"] == "SDPA takes no mods"
    assert set(forward.samples) == {OURS, "flexattn-without-lse"}
    assert forward.flops == FORWARD.flops and forward.refused["fa4"].startswith("bench.prefill")
    results.save(report, tmp_path / "r.json")
    # Samples are stored to six digits, which may turn the last one of a printed ratio.
    stored = results.load(tmp_path / "r.json")
    results.save(stored, tmp_path / "again.json")
    assert results.load(tmp_path / "again.json") == stored
    assert "ours vs sdpa" in markdown(stored) and "gate red" in markdown(stored)


def test_a_red_row_shows_no_time():
    peers = {OURS: wrongly, "sdpa": sdpa(None)}
    (row,) = run("backward", [PLAIN], peers, METHOD, kind=BACKWARD).rows
    assert row.samples == {} and not row.gates[OURS].passed
    assert row.refused["sdpa"] == f"{OURS} is red in this row"


def test_no_row_begins_after_the_seconds_that_were_given():
    report = run("backward", [PLAIN], {}, METHOD, kind=BACKWARD, seconds=-1.0)
    assert report.rows == ()


def test_what_a_peer_has_no_form_for_is_refused_in_words():
    x = make(LEARNED, "cpu", torch.float32)
    known = BACKWARD_PEERS | TORCH_PEERS
    assert "derivative" in known["fa4"](x).reason
    for name in ("flexattn-deterministic", "dropout"):
        assert "beside ours in d128-8k-causal" in known[name](x).reason


def test_memory_is_told_beside_what_a_training_may_allocate():
    x = make(LEARNED, "cpu", torch.float32)
    q, k, table = 61 * 4 * 16 * 4, 61 * 2 * 16 * 4, 4 * 122 * 4
    # Given: q, k, v, dout and the table; made: out, the gradients, lse, delta, and an fp32 dq.
    assert allowed(x) == 2 * (2 * q + 2 * k + table) + 2 * 4 * 61 * 4 + q
    samples = {OURS: Samples((1.0,) * 6), "rival": Samples((2.0,) * 6)}
    memory = {BAR: 2**21, OURS: 2**20, "rival": 3 * 2**20}
    row = results.RowResult("a", "grid", 1e9, 1, {}, samples, {}, memory=memory)
    text = markdown(results.Report("backward", {}, ({"device": "A"},), (row,)))
    assert "| a | 2 | 0.500 | 1.500 |" in text and "| 2.000 [" in text


def test_a_config_names_options_or_fields_of_either_template(monkeypatch):
    monkeypatch.setattr(backward, "exactly_trained", lambda given, backend: (backend, given))
    monkeypatch.setattr(backward, "ours_with", lambda given: given)
    assert backward.variant("early_lse=,dq_tma=1") == ("GLUON", {"early_lse": "", "dq_tma": True})
    assert backward.variant("guarded=1,BLOCK_M1=32") == (
        "TRITON", {"guarded": True, "BLOCK_M1": 32}
    )  # fmt: skip
    assert backward.variant("BACKEND=TRITON,num_stages=2")["num_stages"] == 2
    assert backward.variant("nothing=1") == {"nothing": 1}, "which the call refuses in words"
