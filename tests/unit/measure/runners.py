"""A runner whose configs misbehave in every way a kernel can, for workers' tests without a GPU.

`config("segfault")` does so at once; `config("segfault", at=9)` at its ninth call.
"""

import ctypes
import os
import signal
import sys
import time
from collections import Counter
from functools import partial

from flexattn.device import named
from flexattn.errors import BuildError, InputError
from flexattn.kernels.triton.config import PrefillConfig
from flexattn.measure.task import Task
from flexattn.measure.timing import CpuClock, race
from flexattn.records.record import Gated, Policy
from tests.problems import problem

KINDS = (
    "good",
    "slow",
    "abort",
    "segfault",
    "sticky",
    "hang",
    "memory",
    "compile",
    "flood",
    "raises",
    "exits",
    "late_answer",
    "timeless",
    "killed",
)
RUNNER = f"{__name__}:FaultyRunner"


def config(kind="good", at=1, number=1):
    """A config of this kind; `number` tells configs of one kind apart."""
    return PrefillConfig(at, KINDS.index(kind), number, 1)


def task(title="a task"):
    return Task(title, problem(), named("nvidia-h200"), Policy(False, False, 5, 0.0), 1.0)


class Steady(CpuClock):
    """Gives every kind a time of its own, whatever else the machine is doing."""

    US = {"timeless": -10.0, "slow": 20_000.0}

    def sample(self, call, calls):
        super().sample(call, calls)
        return self.US.get(KINDS[call.args[0].BLOCK_N], 10.0)


class FaultyRunner:
    device = ""

    def __init__(self):
        self.calls = Counter()
        if starts := os.environ.get("FAULTY_LAB_STARTS"):
            with open(starts, "a+") as file:
                file.write("x")
                if file.tell() > int(os.environ["FAULTY_LAB_LAST"]):
                    raise RuntimeError("this device lets nobody start")
        print("this goes nowhere", flush=True)

    def open(self, given):
        if given.title == "refused":
            raise InputError("this task", "it fits the device")
        if given.title == "aborts":
            os.abort()
        if given.title == "hangs":
            time.sleep(60)

    def gate(self, chosen):
        self.run(chosen)
        return Gated("out max", 1.0, 2.0, 1.0, True)

    def race(self, configs, rounds, min_ms, limit_us):
        calls = [partial(self.run, each) for each in configs]
        return race(calls, rounds=rounds, min_ms=min_ms, clock=Steady(), limit_us=limit_us)

    def recover(self):
        return True

    def run(self, chosen):
        self.calls[chosen] += 1
        if self.calls[chosen] >= chosen.BLOCK_M:
            getattr(self, KINDS[chosen.BLOCK_N])()

    def good(self):
        pass

    def timeless(self):
        pass

    def slow(self):
        time.sleep(0.02)

    def abort(self):
        os.abort()

    def segfault(self):
        ctypes.string_at(0)

    def killed(self):
        # As the kernel's out-of-memory killer does.
        os.kill(os.getpid(), signal.SIGKILL)

    def exits(self):
        os._exit(3)

    def sticky(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def hang(self):
        end = time.monotonic() + 20
        while time.monotonic() < end:
            pass

    def memory(self):
        raise MemoryError("CUDA out of memory. Tried to allocate 2000.00 GiB")

    def compile(self):
        raise BuildError("Triton could not compile it")

    def raises(self):
        raise ValueError("what the kernel said")

    def flood(self):
        for _ in range(200):
            os.write(2, b"noise " * 10_000)
        print("the very last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    def late_answer(self):
        time.sleep(2)
