"""Shipped records: each is sound, replays, can run, and serves the preset it was made for."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from flexattn.device import KNOWN, named
from flexattn.kernels.choose.defaults import default, reasons
from flexattn.presets import files
from flexattn.records import layers
from flexattn.records.codec import decode_record
from flexattn.records.environment import serving_policy
from flexattn.records.layers import outdated
from flexattn.records.record import SCHEMA, Sizes, key_of, slug
from flexattn.records.store import Store
from flexattn.settings import override
from flexattn.tuning.race import replay_study
from flexattn.tuning.tasks import task_of
from flexattn.tuning.workload import read

CONFIGS = Path(__file__).parents[3] / "configs"
# Of every folder but the studies', which are no records.
FOLDERS = sorted(p for p in CONFIGS.iterdir() if p.is_dir() and p.name != "studies")
SHIPPED = [(folder.name, path) for folder in FOLDERS for path in Store(folder).paths()]
# What may differ from where a record was made; each record is asked for one of them.
FIELDS = ("template", "triton", "torch", "driver")
each = pytest.mark.parametrize(
    ("device", "path"), SHIPPED, ids=[f"{path.parent.name[:6]}-{path.stem}" for _, path in SHIPPED]
)


@lru_cache(maxsize=1)
def rows():
    return [row for path in files().values() for row in read(path).rows]


def made(row, target):
    return task_of(row, target, torch.device("cpu"))


def looked_up(problem, target):
    found = layers.find(problem, target)
    return found and found.stored


@lru_cache(maxsize=1024)
def claimed(device, path):
    """The preset rows whose problem has the record's key, as (title, problem)."""
    record = decode_record(path.read_bytes())
    key, target = record.key, named(device)
    found = []
    for row in rows():
        shape = row.shape
        sizes = Sizes(shape.B, shape.q_len, shape.kv_len)
        near = (shape.Hq, shape.Hkv, shape.D) == (key.Hq, key.Hkv, key.head_dim_qk)
        near = near and (row.served is not None) == (key.kind == "serving")
        # The rows of a mixed batch are counted together.
        near = near and (row.served is not None or sizes.rounded() == key.sizes)
        if near and row.dtype == key.dtype and bool(row.mask) == bool(key.mask):
            task = made(row, target)
            if key_of(task.problem) == key:
                found.append((row.title, task.problem))
    return tuple(found)


@pytest.fixture
def only_shipped(tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "configs_folder", lambda: CONFIGS)
    layers._memory.clear()
    with override(cache=(), cache_dir=tmp_path):
        yield
    layers._memory.clear()


def test_each_folder_is_a_device_and_holds_records_alone():
    assert [folder.name for folder in FOLDERS] == sorted({device for device, _ in SHIPPED})
    assert {folder.name for folder in FOLDERS} <= {slug(name) for name in KNOWN}
    for folder in FOLDERS:
        (version,) = (path for path in folder.iterdir())
        kept = {path for path in version.rglob("*") if path.is_file() and path.name != ".lock"}
        manifests = {path / "manifest.json" for path in version.iterdir()}
        assert version.name == f"v{SCHEMA}" and kept == manifests | set(Store(folder).paths())


@each
def test_it_loads_and_stands_where_its_key_says(device, path):
    record = decode_record(path.read_bytes())
    store = Store(CONFIGS / device)
    assert store.path(record.environment, record.key) == path
    assert store.read(record.environment, record.key) == record
    assert slug(record.environment.device) == device
    policy = record.policy.graph, record.policy.cold_l2
    assert policy == (record.environment.graph, record.environment.cold_l2)
    assert policy == serving_policy(record.key.kind, named(device)), "dispatch looks for another"


@each
def test_its_decision_replays(device, path):
    record = decode_record(path.read_bytes())
    assert replay_study(record) == record.decision
    winner = record.trials[record.decision.winner]
    assert winner.failed is None and winner.gate is not None and winner.gate.passed


@each
def test_a_preset_claims_it_and_it_can_run_there(device, path):
    record = decode_record(path.read_bytes())
    problems = claimed(device, path)
    assert record.title in [title for title, _ in problems], "no preset has this problem: remake"
    for _, problem in problems:
        assert reasons(record.config, problem.structure, named(device)) == []


@each
@pytest.mark.parametrize("elsewhere", [False, True])
def test_its_own_problem_hits_it(device, path, elsewhere, only_shipped, monkeypatch):
    """Exactly in the environment it was made in, as a hint in one that differs in any field.

    As a hint only where the static default that it was raced against is still the default.
    """
    record = decode_record(path.read_bytes())
    here = record.environment
    changed = FIELDS[SHIPPED.index((device, path)) % len(FIELDS)] if elsewhere else ""
    if changed:
        here = replace(here, **{changed: "another"})
    monkeypatch.setattr(layers, "environment", lambda kind, device: here)
    for _, problem in claimed(device, path):
        found = looked_up(problem, named(device))
        if changed and outdated(record, default(problem, named(device))):
            assert found is None or found.path != path
            continue
        # For a Triton that is neither's, records of two releases are as near.
        assert found.path == path or (changed, found.path.parts[-2:]) == (
            "triton",
            path.parts[-2:],
        )
        expected = ("hint", (changed,)) if changed else ("hit", ())
        assert (found.how, found.differing) == expected
