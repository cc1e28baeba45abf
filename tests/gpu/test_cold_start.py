"""A fresh process with an exported directory compiles and traces nothing, and gives the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Of one process, which is then killed.
SECONDS = 250
# Seconds of a first call, imports and CUDA context not counted: the 0.3 for a quiet
# machine is what bench.cold measures; a shared one gets three times that.
LIMIT = 0.9


def child(folder, *arguments, **environment):
    environment = {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "FLEXATTN_CACHE_DIR": str(folder),
        "FLEXATTN_MODE": "replay",
    } | environment
    done = subprocess.run(
        [sys.executable, "-m", "bench.cold_child", *arguments],
        env=dict(os.environ) | environment, cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=["prefill", "decode"])
def exported(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    child(folder, "export", request.param, str(folder / "out"))
    return request.param, folder


def test_first_call_loads_and_does_nothing_else(exported, tmp_path):
    kind, folder = exported
    binaries, records = str(folder / "out"), str(folder / "records")
    found = child(
        tmp_path, "run", kind, "none", FLEXATTN_BINARIES=binaries, FLEXATTN_CACHE=records
    )
    print(kind, {name: f"{1e3 * each:.0f} ms" for name, each in found["seconds"].items()})
    # Attention and the block mask's kernel; decode's second one only where splits are merged.
    assert (found["compiled"], found["traces"]) == (0, 0) and found["loaded"] == 2
    assert not (tmp_path / "triton").exists(), "Triton wrote to its empty cache"
    assert found["seconds"]["first call"] < LIMIT
    # The other tests judge what is compiled; what is loaded is the same to the last bit.
    compiled = child(folder, "run", kind, "compiler", FLEXATTN_CACHE=records)
    assert found["how"] == compiled["how"] == "hit"
    assert compiled["compiled"] == 2 and compiled["checksum"] == found["checksum"]


def test_a_damaged_directory_compiles_and_is_right(exported, tmp_path):
    kind, folder = exported
    damaged = tmp_path / "out"
    for path in (folder / "out").rglob("*.*"):
        copy = damaged / path.relative_to(folder / "out")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes()[:-100])
    records = str(folder / "records")
    found = child(
        folder, "run", kind, "none", FLEXATTN_BINARIES=str(damaged), FLEXATTN_CACHE=records
    )
    assert found["compiled"] == 2 and found["loaded"] == 0 and found["traces"] >= 1
