"""On a Neuron instance the same command builds and measures: our side of it, with stand-ins."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from flexattn.catalogue import alibi
from flexattn.errors import MeasureError
from flexattn.neuron import plugin
from flexattn.neuron.config import NkiDecodeConfig, NkiPrefillConfig
from flexattn.neuron.instance import Instance, instance
from flexattn.neuron.plugin import NeuronMeasurer, measured
from flexattn.problem import Shape
from flexattn.records.codec import decode_record, encode_record
from flexattn.records.record import Failed, Gated
from flexattn.settings import override
from flexattn.tuning.evaluator import method_for
from flexattn.tuning.race import replay_study
from tests import neuron_stand_ins as stand_ins
from tests.nki import task_of
from tests.processes import ROOT

HERE = Instance("trn2", "nki 0.7.0")
SMALL = NkiPrefillConfig(128, 128, 128)
WIDE = NkiPrefillConfig(128, 256, 256)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """AWS's packages in name, for the processes that a test starts."""
    stand_ins.install(tmp_path / "packages")
    paths = [str(tmp_path / "packages"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    sys.modules.pop("nki", None)
    with override(cache_dir=tmp_path / "cache"):
        yield tmp_path / "packages"
    sys.modules.pop("nki", None)


def task(kind="prefill", **mods):
    shape = Shape(1, 2, 1, 40 if kind == "prefill" else 1, 150, 16, 16)
    return task_of(kind, shape, dtype=torch.float32, **mods)


@pytest.mark.parametrize(
    ("kind", "target"),
    [("Trn1", "trn1"), ("Inf2", "trn1"), ("trn2", "trn2"), ("Trn3pds98", "trn3")],
)
def test_an_instance_is_known_by_its_driver(tmp_path, packages, kind, target):
    found, why = instance(stand_ins.driver(tmp_path / "sys", kind))
    assert found == Instance(target, "nki 0.7.0") and not why


def test_what_is_missing_is_said(tmp_path):
    assert "no Neuron instance" in instance(tmp_path)[1]
    assert "no such target" in instance(stand_ins.driver(tmp_path / "old", "Inf1"))[1]
    found, why = instance(stand_ins.driver(tmp_path / "new", "Trn2"))
    assert found is None and "pip.repos.neuron.amazonaws.com" in why, "the package is not here"
    (tmp_path / "bare" / "neuron0").mkdir(parents=True)
    assert "instance_type" in instance(tmp_path / "bare")[1]


@pytest.mark.long
def test_a_config_is_built_gated_and_timed_in_processes_of_their_own(packages, tmp_path):
    with NeuronMeasurer(tmp_path) as measurer:
        measurer.start()
        measurer.open(task(score_mod=alibi(2, "cpu")))
        for config in (SMALL, WIDE):
            found = measurer.gate(config)
            assert isinstance(found, Gated) and found.passed
        times = measurer.sample([SMALL, WIDE], 4, 0.01)
        assert [len(each) for each in times] == [4, 4] and min(map(min, times)) > 0
        hopeless = measurer.sample([SMALL, WIDE], 4, 0.01, limit_us=1e-6)
        assert [len(each) for each in hopeless] == [1, 1]
    assert not (ROOT / "nowhere").exists()
    with pytest.raises(MeasureError, match="no task is open"):
        measurer.gate(SMALL)


@pytest.mark.slow
@pytest.mark.long
def test_splits_of_decode_are_two_programs_that_are_timed_together(packages, tmp_path):
    one, two = (NkiDecodeConfig(32, 128, n, 128) for n in (1, 2))
    with NeuronMeasurer(tmp_path) as measurer:
        measurer.open(task("decode"))
        assert all(measurer.gate(config).passed for config in (one, two))
        assert [len(measurer._programs[config]) for config in (one, two)] == [1, 2]
        single, split = measurer.sample([one, two], 2, 0.01)
        assert min(split) > min(single)


@pytest.mark.parametrize(
    ("variable", "value", "stage", "says"),
    [
        ("STAND_IN_REFUSES", "nc_matmul", "build", "the compiler refuses this kernel"),
        ("STAND_IN_CRASHES", "nc_matmul", "crash", "the device's last words"),
        ("STAND_IN_IS_WRONG_BY", "0.5", "gate", ""),
    ],
)
def test_what_breaks_on_the_device_is_a_typed_failure(
    packages, tmp_path, monkeypatch, variable, value, stage, says
):
    monkeypatch.setenv(variable, value)
    with NeuronMeasurer(tmp_path) as measurer:
        measurer.open(task())
        found = measurer.gate(SMALL)
    if stage == "gate":
        assert isinstance(found, Gated) and not found.passed
    else:
        assert isinstance(found, Failed) and found.stage == stage and says in found.message
    wrong = NkiPrefillConfig(160, 128)
    with NeuronMeasurer(tmp_path) as measurer:
        measurer.open(task())
        assert measurer.gate(wrong).stage == "infeasible"


def test_without_nrtpy_the_error_names_the_variable(tmp_path, monkeypatch):
    with NeuronMeasurer(tmp_path) as measurer, override(nrtpy_python=Path("/no/such/python")):
        measurer.open(task())
        measurer._programs[SMALL] = []
        with pytest.raises(MeasureError, match="FLEXATTN_NRTPY_PYTHON"):
            measurer.sample([SMALL], 1, 0.01)


@pytest.mark.slow
@pytest.mark.long
def test_some_configs_are_measured_and_the_record_says_so(packages, monkeypatch):
    monkeypatch.setattr(plugin, "_BUILT", {"quick": 3, "full": 3})
    record = measured(task(), HERE, method_for("quick", 300.0), "quick")
    assert record.provenance == "measured" and record.environment.triton == "nki 0.7.0"
    assert "on the device" in record.note and len(record.trials) == 3
    assert dict(record.rejected)["not tried"] > 0
    assert all(trial.gate.passed and trial.screening for trial in record.trials)
    assert replay_study(record) == record.decision
    assert decode_record(encode_record(record).encode()) == record


@pytest.mark.slow
@pytest.mark.long
def test_the_command_measures_on_an_instance_alone(flexattn, packages, tmp_path, monkeypatch):
    monkeypatch.setattr(plugin, "_BUILT", {"quick": 2, "full": 2})
    workload = tmp_path / "w.toml"
    workload.write_text(
        'dtype = "float32"\n[[layers]]\nheads = [2, 1]\nhead_dim = 16\n'
        '[[layers.calls]]\nname = "plain"\nmixes = [[1, 128, 128]]\n'
    )
    command = ("tune", workload, "--device", "trn2", "--effort", "quick", "--json")
    said = flexattn(*command, status=2).stderr
    assert "tuning for trn2: the Neuron driver lists no device" in said and "--dry-run" in said
    monkeypatch.setattr(plugin, "instance", lambda: (HERE, ""))
    (tuned,) = json.loads(flexattn(*command, "--budget", "60").stdout)["problems"]
    assert tuned["status"] == "tuned" and tuned["provenance"] == "measured"
    (kept,) = json.loads(flexattn(*command).stdout)["problems"]
    assert kept["status"] == "kept" and kept["provenance"] == "measured"
    assert "one instance" in flexattn(*command, "--storage", "sqlite:///x.db", status=2).stderr
