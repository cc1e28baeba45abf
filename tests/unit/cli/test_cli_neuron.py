"""Neuron from the command line: surveyed and rendered with no device, and said for what it is."""

import json
import re
import sys
from pathlib import Path

import pytest

from flexattn.device.neuroncore import CORES

WORKLOAD = """
dtype = "bfloat16"
[[layers]]
heads = [2, 1]
head_dim = 64
[[layers.calls]]
name = "wave"
score = { mod = "waves_of_test_cli_neuron:wave" }
mixes = [[1, 128, 128]]
[[layers.calls]]
name = "plain"
mixes = [[1, 128, 128], [1, 1, 300]]
"""
ALLOW = ("--allow-module", "waves_of_test_cli_neuron")
TITLES = ("w plain B1 300", "w plain B1 128x128")
WAVE = "import torch\n\ndef wave(score, b, h, q, k):\n    return torch.sin(score)\n"


@pytest.fixture
def workload(tmp_path, monkeypatch):
    """Two problems that NKI can express, and one that it cannot."""
    (tmp_path / "waves_of_test_cli_neuron.py").write_text(WAVE)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "w.toml"
    path.write_text(WORKLOAD)
    yield path
    sys.modules.pop("waves_of_test_cli_neuron", None)


@pytest.mark.parametrize("target", CORES)
def test_a_dry_run_counts_what_fits_and_names_what_cannot_be_expressed(flexattn, workload, target):
    arguments = ("tune", workload, *ALLOW, "--device", target, "--dry-run")
    full, quick = (
        json.loads(flexattn(*arguments, "--json", "--effort", effort).stdout)["problems"]
        for effort in ("full", "quick")
    )
    assert [each["status"] for each in full] == ["cannot", "to tune", "to tune"]
    assert "sin of float32" in full[0]["message"] and target in full[0]["message"]
    assert all(a["configs"] > b["configs"] > 0 for a, b in zip(full[1:], quick[1:], strict=True))
    shown = flexattn(*arguments).stdout
    assert f"{target}, effort full: nothing is built" in shown and "sin of float32" in shown


def test_an_export_has_a_folder_for_each_kernel_and_names_what_has_none(
    flexattn, workload, tmp_path
):
    arguments = ("export", tmp_path / "out", "--workload", workload, *ALLOW, "--device", "trn2")
    told = flexattn(*arguments, status=1)
    (refused,) = (line for line in told.stderr.splitlines() if line.startswith("refused: "))
    assert "wave" in refused and "sin of float32" in refused
    folders = list((tmp_path / "out").iterdir())
    assert len(folders) == 2 and "2 kernels written" in told.stdout
    for folder in folders:
        assert {"kernel.py", "arguments.py", "tables.pt"} <= {p.name for p in folder.iterdir()}
        assert "@nki.jit" in (folder / "kernel.py").read_text()
    assert "2 kernels written" in flexattn(*arguments, "--only", "plain").stdout
    for more in (("--with-binaries",), ()):
        named = arguments[2:] if more else ("--device", "trn2")
        said = flexattn("export", tmp_path / "more", *named, *more, status=2).stderr
        assert "no records" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tune", "--preset", "sd21", "--effort", "exhaustive"], ["full leaves none out"]),
        (["tune", "--preset", "sd21"], ["times come from the device itself", "--dry-run"]),
        (["tune", "--preset", "sd21", "--storage", "sqlite://"], ["one instance tunes"]),
        (["why", "causal"], ["is a Neuron device", "flexattn tune and flexattn render"]),
        (["build", "causal"], ["is a Neuron device"]),
        (["render", "causal", "--option", "BLOCK_M=64"], ["none of Triton's options"]),
        (["render", "causal", "--show", "ptx"], ["no compiler of it is installed"]),
        (["render", "waves_of_test_cli_neuron:wave"], ["sin of float32", "trn2"]),
    ],
    ids=lambda value: "-".join(value[:1] + value[-2:]) if value[0].islower() else None,
)
def test_requests_that_are_refused(flexattn, workload, arguments, words):
    result = flexattn(*arguments, "--device", "trn2", status=2)
    assert result.stderr.startswith("error: ") and "Traceback" not in result.output
    for word in words:
        assert word in result.stderr


def _code(text):
    return [line for line in text.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_render_shows_the_kernel_of_a_target(flexattn, tmp_path, kind):
    arguments = ("render", "alibi_causal_document", "--kind", kind, "--device")
    sources = set()
    for target in CORES:
        found = json.loads(flexattn(*arguments, target, "--json").stdout)
        assert found["device"] == f"{target} (NKI)" and "mask_mod" in found
        # Cores whose kernels are equal share a file, under the header of the first.
        stored = Path(found["path"]).read_text()
        assert _code(stored) == _code(found["source"]) and len(_code(stored)) > 20
        assert found["path"].startswith(str(tmp_path)) and "import nki.isa" in found["source"]
        sources.add(found["source"])
    assert len(sources) == len(CORES)
    shown = flexattn(*arguments, "trn2").stdout
    assert "flexattn tune --device trn2" in shown and "score_mod (score + " in shown


def test_devices_lists_the_limits_of_a_core(flexattn):
    lines = flexattn("devices").stdout.splitlines()
    for core in CORES.values():
        (line,) = (line for line in lines if core.name in line)
        for number in (core.sbuf_bytes // 1024, core.moving_max):
            assert str(number) in line


def test_doctor_says_which_rungs_are_here(flexattn, tmp_path, monkeypatch):
    (tmp_path / "nki.py").write_text('raise ImportError("not the package you want")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nki", raising=False)
    shown = flexattn("doctor").stdout
    monkeypatch.delitem(sys.modules, "nki", raising=False)
    names = re.findall(r"^neuron +(\w+): ", shown, re.MULTILINE)
    assert names == ["lint", "interpreter", "simulator", "device"]
    assert "neuron      simulator: not here: nki is a placeholder" in shown
    assert "pip.repos.neuron.amazonaws.com" in shown and "FAULT" not in shown
