"""Stand-ins for the compiler, in a module that a new process can import."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from flexattn.records.record import Failed
from flexattn.runtime.resources import Resources

CRASHES, HANGS, RAISES, REFUSED, SPILLS, SCALAR = 3, 4, 5, 6, 7, 8


def troubled(order):
    """What num_stages asks for: trouble, or a kernel whose code depends on BLOCK_N alone."""
    stages = order.config.num_stages
    if stages == CRASHES:
        os.kill(os.getpid(), signal.SIGSEGV)
    if stages == HANGS:
        # As ptxas hangs: the process waits for a child, which must not outlive it.
        with open(order.cache_dir / "pid", "w") as file:
            child = subprocess.Popen(["sleep", "600"])
            file.write(str(child.pid))
        child.wait()
    if stages == RAISES:
        raise RuntimeError("out of luck")
    if stages == REFUSED:
        return Failed("build", "CompilationError", "unsupported")
    spills = 9 if stages == SPILLS else 0
    taken = Resources(100, spills, spills, 4096, 0 if stages == SCALAR else 4, 64 * spills)
    return taken, f"{order.config.BLOCK_N:064}", 0.5


@dataclass(frozen=True)
class Order:
    """A request to a pool: `kind` decides its outcome, `tag` tells two apart."""

    tag: int
    kind: str = "fine"
    folder: str = ""

    @property
    def name(self):
        return self.tag


def ordered(order):
    """Notes that it ran, and where `kind` says so dies at its first time."""
    log = Path(order.folder) / "log"
    before = log.read_text().split() if log.exists() else []
    with log.open("a") as file:
        file.write(f"{order.tag}\n")
    if order.kind == "dies once" and str(order.tag) not in before:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return 10 * order.tag


def number(task):
    """For the pool's own tests: where the task ran, after a pause."""
    time.sleep(0.01)
    return task, os.getpid()
