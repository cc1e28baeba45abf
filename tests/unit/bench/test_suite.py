"""The suite of GPU tests and benches: its steps exist, and one that hangs costs no other."""

import importlib.util
import shlex
import time
from pathlib import Path

import pytest

from bench.suite import LATE, Step, main, read_steps, run_step, suite
from tests.processes import ROOT

STEPS = read_steps()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module that a step can run by its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_what_a_step_runs_is_there(step):
    first, *words = shlex.split(step.run)
    if first == "pytest":
        files = [word for word in words if word.startswith("tests/")]
        assert files and all((ROOT / each).is_file() for each in files)
    else:
        assert importlib.util.find_spec(first) is not None
    assert 0 < step.seconds <= 600


def test_every_file_of_gpu_tests_is_in_a_step():
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
    named = [word for step in STEPS for word in shlex.split(step.run) if word in files]
    assert sorted(named) == sorted(files - {"tests/gpu/test_random_mods.py"})


def test_a_step_leaves_its_log_and_its_last_lines(tmp_path, module):
    name = module("talks", "print('a long story'); print('the end'); raise SystemExit(3)")
    outcome = run_step(Step("one", name, 60), tmp_path, 1)
    assert (outcome.status, outcome.tail) == (3, ("the end",))
    assert "a long story" in (tmp_path / "one.log").read_text()
    assert str(outcome).startswith("FAIL 3   one, ")


def test_a_step_that_hangs_is_ended_with_its_children(tmp_path, module, monkeypatch):
    name = module(
        "hangs",
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n",
    )
    monkeypatch.setattr("bench.suite.GRACE", 0.5)
    begin = time.monotonic()
    outcome = run_step(Step("stuck", name, 4), tmp_path, 1)
    assert outcome.status == LATE and time.monotonic() - begin < 50
    # Killed with its parent, it may be gone a moment later.
    child, until = int(outcome.tail[-1]), time.monotonic() + 20
    while _runs(child) and time.monotonic() < until:
        time.sleep(0.1)
    assert not _runs(child)


def _runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_a_step_whose_time_is_not_left_does_not_begin(tmp_path, module):
    short, long = (Step(n, module("quick", "print(1)"), s) for n, s in (("a", 9), ("b", 90)))
    found = list(suite([short, long, short], tmp_path, 60, 1))
    assert found[1] is long and [each.status for each in (found[0], found[2])] == [0, 0]


def test_the_command_line_lists_and_refuses(capsys):
    assert main(["--list", "--steps", "^first-traffic$"]) == 0
    assert capsys.readouterr().out.split()[:4] == [
        "300",
        "s",
        "first-traffic:",
        "bench.first_traffic",
    ]
    assert main(["--steps", "nothing of the kind"]) == 2
    assert "matches no step" in capsys.readouterr().err
    assert main(["--steps", "("]) == 2
