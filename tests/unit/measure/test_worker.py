"""The worker survives what its child does not: crashes, hangs, floods, kills, lost contexts."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from flexattn.errors import DeviceError, InputError, MeasureError, SettingsError
from flexattn.measure.process import ChildProcess, clipped, failed, is_sticky
from flexattn.measure.worker import Deadlines, Worker, device_lock
from flexattn.records.record import Failed, Gated
from flexattn.settings import override, worker_environment
from tests.processes import ROOT
from tests.unit.measure.runners import RUNNER, config, task

pytestmark = pytest.mark.usefixtures("forked")
SHORT = Deadlines(start=60, open=5, gate=1.5, step=1.5)
GOOD = config()


@pytest.fixture(scope="module")
def worker(forked):
    with Worker(RUNNER, deadlines=SHORT) as made:
        made.open(task())
        yield made


def gone(pid, seconds=10):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("kind", "stage", "says", "respawns"),
    [
        ("raises", "run", "what the kernel said", False),
        ("memory", "memory", "out of memory", False),
        ("compile", "build", "could not compile", False),
        ("sticky", "crash", "illegal memory access", True),
        ("segfault", "crash", "SIGSEGV", True),
        ("exits", "crash", "exit status 3", True),
        ("flood", "crash", "the very last words", True),
        ("hang", "hang", "silent for 1.5 s", True),
    ],
)
def test_a_broken_config_is_a_typed_failure_and_the_next_is_measured(
    worker, kind, stage, says, respawns
):
    before = worker.starts
    got = worker.gate(config(kind))
    assert isinstance(got, Failed) and got.stage == stage
    assert says in got.message and len(got.message) < 4000
    assert isinstance(worker.gate(GOOD), Gated)
    assert worker.starts - before == respawns
    # What killed a child is never tried again.
    assert (worker.gate(config(kind)) == got) and worker.starts - before == respawns
    assert not respawns or worker.sample([config(kind)], 1, 0) == [got]


@pytest.mark.parametrize(("kind", "at"), [("sticky", 1), ("segfault", 8), ("hang", 8)])
def test_the_others_keep_their_times(worker, kind, at):
    """`at` 1 breaks the warm-up, 8 the third round."""
    bad, before = config(kind, at, number=7), worker.starts
    got = worker.sample([GOOD, bad, config(number=2)], 6, 0)
    assert isinstance(got[1], Failed) and got[1].stage == ("hang" if kind == "hang" else "crash")
    assert len(got[0]) == len(got[2]) == 6
    assert worker.starts - before == 1


def test_several_culprits_in_one_race(worker):
    configs = [config("abort", 8, 3), GOOD, config("raises"), config("sticky", 7, 3)]
    got = worker.sample(configs, 5, 0)
    assert len(got[1]) == 5
    assert [got[i].stage for i in (0, 2, 3)] == ["crash", "prepare", "crash"]


def test_a_clock_that_runs_backwards_fails_its_config_alone(worker):
    got = worker.sample([GOOD, config("timeless"), config(number=2)], 4, 0)
    assert [len(got[i]) for i in (0, 2)] == [4, 4]
    assert isinstance(got[1], Failed) and "a time is a finite number above 0" in got[1].message


def test_the_hopeless_give_one_value(worker):
    got = worker.sample([GOOD, config("slow")], 5, 0, limit_us=5_000)
    assert [len(each) for each in got] == [5, 1] and got[1][0] > 5_000
    assert [len(each) for each in worker.sample([GOOD, config("slow")], 2, 0)] == [2, 2]


def test_a_killed_child_costs_its_request_alone(worker):
    worker.gate(GOOD)
    pid = worker.pid
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    got = worker.gate(config("late_answer"))
    assert isinstance(got, Failed) and got.stage == "crash" and "SIGKILL" in got.message
    assert isinstance(worker.gate(GOOD), Gated) and worker.pid != pid


def test_a_child_killed_between_requests_costs_nothing(worker):
    worker.gate(GOOD)
    os.kill(worker.pid, signal.SIGKILL)
    assert gone(worker.pid)
    assert isinstance(worker.gate(GOOD), Gated)


def test_ctrl_c_leaves_no_half_answered_child(worker, monkeypatch):
    pid, receive = worker.pid, ChildProcess.receive

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(ChildProcess, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.gate(GOOD)
    monkeypatch.setattr(ChildProcess, "receive", receive)
    assert gone(pid)
    assert isinstance(worker.gate(GOOD), Gated)


@pytest.mark.parametrize(
    ("title", "error", "says"),
    [
        ("refused", InputError, "fits the device"),
        ("aborts", MeasureError, "SIGABRT"),
        pytest.param("hangs", MeasureError, "silent", marks=pytest.mark.long),
    ],
)
def test_a_task_that_cannot_be_opened_raises(title, error, says):
    with Worker(RUNNER, deadlines=Deadlines(start=60, open=1)) as worker:
        with pytest.raises(error, match=says):
            worker.open(task(title))
        worker.open(task())
        assert isinstance(worker.gate(GOOD), Gated)
    assert worker.pid is None


@pytest.mark.parametrize(
    "runner",
    [
        "tests.unit.measure.runners:Missing",
        pytest.param("no.such.module:Runner", marks=pytest.mark.long),
    ],
)
def test_a_runner_that_cannot_be_loaded_raises(runner):
    with Worker(runner) as worker, pytest.raises(MeasureError, match=runner.split(":")[0]):
        worker.open(task())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_without_a_gpu_the_worker_says_what_to_do(monkeypatch):
    monkeypatch.setattr("flexattn.measure.process.subprocess", subprocess)  # a Python of its own
    with Worker() as worker, pytest.raises(DeviceError, match="FLEXATTN_INTERPRET=1"):
        worker.open(task())


@pytest.mark.parametrize(("child", "error"), [(2, DeviceError), (3, MeasureError)])
def test_a_device_that_lets_no_child_start_is_at_fault(tmp_path, monkeypatch, child, error):
    """The first child opens nothing; whether there is another one says who is to blame."""
    monkeypatch.setenv("FAULTY_LAB_STARTS", str(tmp_path / "starts"))
    monkeypatch.setenv("FAULTY_LAB_LAST", str(child - 1))
    with Worker(RUNNER) as worker:
        worker.start()
        with pytest.raises(MeasureError) as caught:
            worker.open(task("aborts"))
    assert type(caught.value) is error
    assert ("lets nobody start" in str(caught.value)) == (error is DeviceError)


def test_nothing_is_measured_without_a_task():
    with pytest.raises(MeasureError, match="open"):
        Worker(RUNNER).gate(GOOD)


def test_the_child_dies_with_its_parent(tmp_path):
    """Even while it hangs, and whichever thread made it."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, threading, time\n"
        "from flexattn.measure.worker import Worker\n"
        "from tests.unit.measure.runners import RUNNER, config, task\n"
        "worker = Worker(RUNNER)\n"
        "maker = threading.Thread(target=worker.open, args=(task(),))\n"
        "maker.start(); maker.join()\n"
        "print(worker.pid, flush=True)\n"
        "worker.gate(config('hang'))\n"
    )
    environment = worker_environment(0) | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        assert not gone(pid, 0)
        parent.kill()
    assert gone(pid)


def test_timing_waits_for_another_tuner_and_says_so(tmp_path):
    said, order = [], []
    with override(cache_dir=tmp_path):
        with device_lock("gpu-1", alone=False), device_lock("gpu-1", alone=False):
            order.append("gates share")

        def timing():
            with override(cache_dir=tmp_path), device_lock("gpu-1", alone=True, say=said.append):
                order.append("second")

        with device_lock("gpu-1", alone=True), device_lock("gpu-2", alone=True):
            other = threading.Thread(target=timing)
            other.start()
            while not said:
                time.sleep(0.01)
            order.append("first")
        other.join(timeout=10)
    assert order == ["gates share", "first", "second"]
    assert len(said) == 1 and "gpu-1" in said[0]


def test_without_a_directory_for_locks_it_is_measured_all_the_same(caplog):
    """A tuner in a container with a read-only HOME stopped before it measured anything."""
    with override(cache_dir=Path("/dev/null/cache")):
        for _ in range(2):
            with device_lock("gpu-1", alone=True):
                pass
    assert len(caplog.records) == 1 and "may time on gpu-1 too" in caplog.text


def test_another_users_lock_is_held_as_well(tmp_path, monkeypatch):
    """Two users share a cache directory; the lock is the file of who came first."""
    said = []
    with override(cache_dir=tmp_path), device_lock("gpu-1", alone=False):
        opened = os.open

        def refusing(path, flags, *args, **kwargs):
            if flags & (os.O_RDWR | os.O_WRONLY):
                raise PermissionError(13, "Permission denied", str(path))
            return opened(path, flags, *args, **kwargs)

        def timing():
            with override(cache_dir=tmp_path), device_lock("gpu-1", alone=True, say=said.append):
                said.append("timed")

        monkeypatch.setattr(os, "open", refusing)
        monkeypatch.setattr(Path, "open", lambda path, mode: os.open(path, os.O_RDWR))
        other = threading.Thread(target=timing)
        other.start()
        while not said and other.is_alive():
            time.sleep(0.01)
    other.join(timeout=10)
    assert len(said) == 2 and "waiting for gpu-1" in said[0]


@pytest.mark.parametrize(
    ("name", "visible", "gpu", "expected"),
    [
        ("CUDA_VISIBLE_DEVICES", None, 2, "2"),
        ("CUDA_VISIBLE_DEVICES", "5,GPU-abc", 1, "GPU-abc"),
        ("HIP_VISIBLE_DEVICES", "3", 0, "3"),
    ],
)
def test_a_child_sees_one_gpu(monkeypatch, name, visible, gpu, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv(name, visible)
    assert worker_environment(gpu)[name] == expected


def test_a_gpu_that_is_not_visible_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(SettingsError, match="GPU 1"):
        worker_environment(1)


@pytest.mark.parametrize(
    ("error", "message", "stage", "sticky"),
    [
        ("AcceleratorError", "CUDA error: an illegal memory access was encountered", "crash", 1),
        ("RuntimeError", "Triton Error [CUDA]: misaligned address", "crash", 1),
        ("BuildError", "cuLaunchKernel failed with CUDA error 700", "crash", 1),
        ("BuildError", "cuLaunchKernel failed with CUDA error 701", "run", 0),
        ("RuntimeError", "CUDA error: unspecified launch failure", "crash", 1),
        ("RuntimeError", "CUDA error: an illegal instruction was encountered", "crash", 1),
        ("RuntimeError", "CUDA error: hardware stack error", "crash", 1),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", "memory", 0),
        ("BuildError", "cuLaunchKernel failed with CUDA error 2", "memory", 0),
        ("OutOfResources", "out of resource: shared memory, Required: 300000", "resources", 0),
        ("ConfigError", "every config needs more shared memory than 9 bytes", "resources", 0),
        ("ConfigError", "kernel_options ask for x", "infeasible", 0),
        ("BuildError", "Triton could not compile /x/y.py", "build", 0),
        ("DriverError", "cuModuleLoadData failed: CUDA_ERROR_INVALID_IMAGE", "build", 0),
        ("ValueError", "anything else", "run", 0),
    ],
)
def test_failures_are_typed_by_their_class_and_text(error, message, stage, sticky):
    found = failed(error, message, "run")
    assert (found.stage, found.error, is_sticky(found)) == (stage, error, bool(sticky))


def test_a_long_text_keeps_both_ends():
    text = clipped("start" + "x" * 9000 + "end")
    assert text.startswith("start") and text.endswith("end") and len(text) < 2100
