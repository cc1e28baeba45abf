"""The race of two checkouts: rows as data, a child that knows public names alone, resumed runs."""

from __future__ import annotations

import ast
import json
import weakref
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from bench import (
    chunks,
    inputs,
    random_draw,
    rows,
    serving_inputs,
    serving_rows,
    trees,
    trees_child,
    trees_rows,
)
from bench.results import Gate, Report, RowResult, load, save
from bench.rows import Row
from bench.serving_rows import ServingRow
from bench.trees_rows import RaceRow, race_row, race_rows, shrunk
from flexattn import __all__ as names, catalogue, serving
from flexattn.measure.timing import Samples
from tests.processes import ROOT

CHILD = (
    trees_child, trees_rows, inputs, rows, serving_inputs, serving_rows, random_draw, chunks,
)  # fmt: skip
TIMED = RowResult(
    "host/a", "host", 0.0, 0, {}, {"old": Samples((2.0, 4.0)), "new": Samples((1.0, 2.0))}, {}
)


def test_the_child_knows_public_names_alone():
    trees = [ast.parse(Path(each.__file__).read_text()) for each in CHILD]
    public = {"flexattn": {*names, "catalogue", "serving", "__version__", "__file__"}}
    public |= {"catalogue": {*catalogue.__all__}, "serving": {*serving.__all__}}
    own = {f"{each.__name__}" for each in CHILD}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            assert not any(each.name.startswith(("flexattn.", "bench")) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            assert not module.startswith(("flexattn.", "bench")) or module in own
            if node.module == "flexattn":
                assert {each.name for each in node.names} <= public["flexattn"]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.value.id not in public or node.attr in public[node.value.id]


def test_every_group_has_rows_and_every_row_has_a_size():
    found = race_rows()
    groups = {name.split("/")[0] for name in found}
    assert groups == {
        "prefill", "backward", "decode", "serving", "append", "invariant", "random", "host",
    }  # fmt: skip
    assert sum(name.startswith("random/") for name in found) == 30
    for row in found.values():
        assert asdict(race_row(json.loads(json.dumps(asdict(row))))) == listed(asdict(row))
        small = shrunk(row, 128).of
        if isinstance(small, Row):
            assert small.shape.kv_len <= 1024 and sum(small.documents) == small.shape.kv_len
        for each in (row.of, small) if isinstance(small, ServingRow) else ():
            assert max(small.lens) <= 1024 + 64
            assert all(n >= new for n, new in zip(each.lens, each.rows, strict=True))
            assert each.shared == sum(keys for _, keys in each.nodes)


def listed(x):
    """What JSON makes of tuples."""
    if isinstance(x, dict):
        return {key: listed(each) for key, each in x.items()}
    return [listed(each) for each in x] if isinstance(x, tuple | list) else x


@pytest.mark.parametrize("scale", [1.0, 1.02])
def test_the_check_sees_what_is_off_by_two_percent(scale):
    torch.manual_seed(0)
    q, k, v = (torch.randn(64, 64).bfloat16().double() for _ in "qkv")
    given = (q, k, v, (0, 0), torch.arange(64), None, catalogue.causal)
    exact, rounded = (inputs.attention(*given, coarse=each) for each in (None, torch.bfloat16))
    assert bool(inputs.off("out", (scale * rounded).bfloat16(), exact, rounded)) == (scale != 1)
    holed = rounded.bfloat16()
    holed[3, 4] = torch.nan
    assert inputs.off("out", holed, exact, rounded)


def test_gradients_of_the_reference_are_those_of_the_whole_call():
    row = shrunk(race_rows()["backward/d128-8k-learned"], 128)
    torch.manual_seed(0)
    assert trees_child.case_of(row, "cpu").check() == ""


def test_a_summary_has_means_the_least_and_what_has_no_times():
    slow = replace(TIMED, name="host/b", samples={"old": Samples((1.0,)), "new": Samples((4.0,))})
    red = replace(TIMED, name="host/c", samples={}, refused={"new": "wrong: dq"})
    text = trees.summary([TIMED, slow, red])
    assert "| host | 2 | 0.707 | 0.250 host/b |" in text and "no times: host/c" in text
    assert trees.line(red) == "| host/c | new: wrong: dq |"
    assert trees.line(TIMED) == "| host/a | 3.0 | 1.5 | 2.000 [2.000, 2.000] |"


class Stub:
    """A side that answers as it is told."""

    def __init__(self, built):
        self.built, self.calls = built, 0

    def send(self, **message):
        pass

    def answer(self):
        return self.built

    def us(self, calls):
        self.calls += 1
        return 10.0


@pytest.mark.parametrize("built", [{"wrong": "out[0, 0]: off"}, {"error": "ModError: no"}])
def test_a_side_that_is_wrong_or_fails_leaves_no_times(built):
    sides = {"old": Stub({"wrong": ""}), "new": Stub(built)}
    found = trees.race(RaceRow("a/b", Row("b", "a", rows.Shape(1, 1, 1, 1, 1, 16))), sides, 4)
    assert not found.samples and next(iter(built.values())) in found.refused["new"]
    assert not sides["old"].calls and found.gates["old"] == Gate(True, "")


def test_a_run_is_resumed_and_not_with_other_code(tmp_path):
    out, here = tmp_path / "race.json", {"old": "a", "new": "b"}
    report = Report("trees", {"rounds": 2}, (here,), ())
    assert trees.begun(out, report) is report
    red = replace(TIMED, name="host/c", samples={}, refused={"new": "wrong: dq"})
    save(replace(report, rows=(TIMED, red)), out)
    assert [row.name for row in trees.begun(out, report).rows] == ["host/a"]
    with pytest.raises(ValueError, match="another race"):
        trees.begun(out, replace(report, environments=({**here, "new": "c"},)))


def test_a_side_keeps_the_tensors_of_a_call_whose_graph_is_replayed(monkeypatch):
    """They were free while a graph read them: plans read lengths of 0, 8 us for 8k prompts."""
    found = []

    def case(row, device):
        lens = torch.full((4,), 8192)
        found.append(weakref.ref(lens))
        return trees_child.Case(lens.sum, lambda: "")

    monkeypatch.setattr(trees_child, "case_of", case)
    monkeypatch.setattr(trees_child.Clock, "prepare", lambda *_: lambda calls: 0.0)
    side = trees_child.Side("cpu")
    for _ in range(2):
        side.build(race_row(asdict(race_rows()["append/64-token_head"])))
        assert found[-1]() is not None
    assert found[0]() is None


def test_this_checkout_beside_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLEXATTN_INTERPRET", "1")
    out = tmp_path / "race.json"
    args = [str(ROOT), str(ROOT), "--device", "cpu", "--shrink", "256", "--rounds", "1"]
    assert trees.main([*args, "--out", str(out), "--rows", "^append/64-token_head$"]) == 0
    report = load(out)
    assert [len(row.samples["new"].us) for row in report.rows] == [1]
    assert report.environments[0]["old"] == report.environments[0]["new"]
    assert "| append | 1 |" in capsys.readouterr().out
