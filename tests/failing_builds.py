"""Builds that fail in every way, and a builder that compiles nothing."""

import subprocess
from types import SimpleNamespace

from flexattn.errors import BuildError, DriverError, RenderError
from flexattn.kernels.choose.options import NONE
from flexattn.runtime.build import Kernel
from flexattn.runtime.dispatch import Dispatcher
from tests.problems import H200, problem

WANTED = problem()


def caused(cause):
    """As build wraps what Triton raised."""
    error = BuildError("Triton could not compile /a/kernel.py for sm_90", "it compiles", "report")
    error.__cause__ = cause
    return error


def ptxas(status):
    """As Triton raises where ptxas ended with a status."""
    inner = subprocess.CalledProcessError(status, ["/bin/ptxas", "-v"])
    outer = RuntimeError(f"`ptxas` failed with error code {status}\nRepro command: /bin/ptxas -v")
    outer.__context__ = inner
    return caused(outer)


def nested(error):
    """As Triton wraps an error of a function that others call."""
    outer = RuntimeError("at 210:4:\n    gl.warp_specialize(\n    ^")
    outer.__cause__ = error
    return outer


SPOKEN = "at 12:34:\n  x = sigmoid(s)\n      ^\nNameError('sigmoid is not defined')"
LASTING = {
    "a called function": (caused(nested(RuntimeError(SPOKEN))), "compiler", "sigmoid is not"),
    "the compiler": (caused(RuntimeError(SPOKEN)), "compiler", "sigmoid is not defined"),
    "ptxas": (ptxas(255), "compiler", "error code 255"),
    "a check": (BuildError("a thread knows seven bits", "rule", "do"), "check", "seven bits"),
    "a pass": (caused(RenderError("the PTX is not as known")), "check", "not as known"),
    "the loader": (DriverError("cuModuleLoadData", "CUDA_ERROR_INVALID_IMAGE"), "loader", "IMAGE"),
    "registers": (
        DriverError("kernel for 512 threads", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
        "loader",
        "OUT_OF_RESOURCES",
    ),
}
PASSING = {
    "memory": (caused(MemoryError("no memory")), "no memory"),
    "a killed ptxas": (ptxas(-9), "killed"),
    "a killed shell's ptxas": (ptxas(137), "killed"),
    "a full disk": (caused(OSError(28, "No space left on device")), "No space left"),
    "a full disk before the compiler": (OSError(28, "No space left on device"), "No space left"),
    "a timeout": (caused(subprocess.TimeoutExpired("ptxas", 60)), "TimeoutExpired"),
    "ptxas' memory": (
        caused(RuntimeError("ptxas fatal : Memory allocation failure")),
        "llocation",
    ),
    "the GPU's memory": (DriverError("cuModuleLoadData", "CUDA_ERROR_OUT_OF_MEMORY"), "MEMORY"),
}


class Builder:
    """Compiles nothing. fault: of a source, the error that building it raises, or None.

    shared, spills: of a source's kernel, in bytes, and (words in loops, bytes of stack).
    """

    def __init__(self, fault=None, shared=None, spills=None):
        self.fault = fault or (lambda source: None)
        self.shared = shared or (lambda source: 0)
        self.spills = spills or (lambda source: (0, 0))
        self.built = []

    def kernel(self, source, device, index):
        self.built.append(source)
        if (error := self.fault(source)) is not None:
            raise error
        metadata = SimpleNamespace(shared=self.shared(source))
        asm = {"cubin": self.spills(source)}
        return Kernel(source, SimpleNamespace(metadata=metadata, asm=asm), index)

    @property
    def languages(self):
        return [each.language for each in self.built]


def served(builder, wanted=WANTED, options=NONE, device=H200):
    return Dispatcher(builder).choose(wanted, device, 0, options)


def gluon(error):
    return lambda source: error if source.language == "gluon" else None


def spills(**words):
    """Words that kernels of a language spill in loops."""
    return lambda source: (words[source.language], 8 * words[source.language])
