"""Stand-ins for AWS's nki and nrtpy: our interpreter as the device, its timeline as the clock.

They have the calls that AWS documents and nothing else; what they prove is our side of them.
"""

NKI = """
import inspect, json, os, pathlib
import numpy, torch
from flexattn.neuron.interpreter.interpret import interpret
from flexattn.device.neuroncore import CORES

__version__ = "0.6.0"
ARTIFACTS = pathlib.Path(os.environ.get("NKI_ARTIFACTS_DIR", "nowhere"))  # at import, as AWS's


def simulate(kernel):
    return kernel


def jit(function):
    names = list(inspect.signature(function).parameters)

    def kernel(*arguments):
        text = pathlib.Path(inspect.getsourcefile(function)).read_text()
        if os.environ.get("STAND_IN_REFUSES", "nothing at all") in text:
            raise RuntimeError("the compiler refuses this kernel")
        given = [torch.from_numpy(a) if isinstance(a, numpy.ndarray) else a for a in arguments]
        run = interpret(text, given, CORES[os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"]])
        ARTIFACTS.mkdir(parents=True)
        tensors = [n for n, a in zip(names, arguments) if isinstance(a, numpy.ndarray)]
        neff = {"ms": run.nanoseconds / 1e6, "inputs": tensors}
        (ARTIFACTS / "kernel.neff").write_text(json.dumps(neff))
        if os.environ.get("STAND_IN_CRASHES", "nothing at all") in text:
            os.write(2, b"the device's last words")
            os.abort()
        wrong = float(os.environ.get("STAND_IN_IS_WRONG_BY", "0"))
        results = tuple(r.numpy() + numpy.float32(wrong) for r in run.results)
        return results if len(results) > 1 else results[0]

    return kernel
"""
NRTPY = """
import json, types


class NrtpyTensor:
    @classmethod
    def from_numpy(cls, array, name=None, core_id=0):
        made = cls()
        made.name = name
        return made


class NrtpyModel:
    @classmethod
    def load_from_neff(cls, neff_path, name=None, core_id=0):
        made = cls()
        with open(neff_path) as file:
            made.neff = json.load(file)
        made.input_tensors_info = dict.fromkeys(made.neff["inputs"])
        made.calls = 0
        return made

    def benchmark(self, inputs, outputs=None, warmup_iter=5, benchmark_iter=5, mode="device"):
        assert mode == "device" and sorted(inputs) == sorted(self.input_tensors_info)
        self.calls += 1
        return types.SimpleNamespace(mean_ms=self.neff["ms"] * (1 + 1e-3 * (self.calls % 3)))
"""


def install(folder, nrtpy=True):
    """Both packages in a folder that PYTHONPATH may name."""
    (folder / "nki").mkdir(parents=True)
    (folder / "nki" / "__init__.py").write_text(NKI)
    for name in ("isa", "language"):
        (folder / "nki" / f"{name}.py").write_text("")
    if nrtpy:
        (folder / "nrtpy.py").write_text(NRTPY)


def driver(folder, instance_type):
    """What the Neuron driver shows of one device."""
    place = folder / "neuron0" / "info" / "architecture"
    place.mkdir(parents=True)
    (place / "instance_type").write_text(f"{instance_type}\n")
    return folder
