"""Stand-ins for AWS's nki, torch_neuronx and nrtpy: our interpreter as the device.

They have the calls that AWS documents and nothing else; what they prove is our side of them.
"""

NKI = """
import functools, inspect, json, os, pathlib
import numpy, torch
from flexattn.neuron.interpreter.interpret import interpret
from flexattn.device.neuroncore import CORES

__version__ = "0.7.0"
ARTIFACTS = pathlib.Path(os.environ.get("NKI_ARTIFACTS_DIR", "nowhere"))  # at import, as AWS's


def simulate(kernel):
    return kernel


def jit(function):
    names = list(inspect.signature(function).parameters)

    def kernel(*arguments, lnc=1):
        text = pathlib.Path(inspect.getsourcefile(function)).read_text()
        if os.environ.get("STAND_IN_REFUSES", "nothing at all") in text:
            raise RuntimeError("the compiler refuses this kernel")
        given = [torch.from_numpy(a) if isinstance(a, numpy.ndarray) else a for a in arguments]
        core = CORES[os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"]]
        if any(isinstance(a, torch.Tensor) for a in arguments):
            import torch_neuronx
            return torch_neuronx.on_device(text, given, core, lnc)
        run = interpret(text, given, core, programs=lnc)
        ARTIFACTS.mkdir(parents=True)
        tensors = [n for n, a in zip(names, arguments) if isinstance(a, numpy.ndarray)]
        neff = {"ms": len(text) / 1e6, "inputs": tensors}
        (ARTIFACTS / "kernel.neff").write_text(json.dumps(neff))
        if os.environ.get("STAND_IN_CRASHES", "nothing at all") in text:
            os.write(2, b"the device's last words")
            os.abort()
        wrong = float(os.environ.get("STAND_IN_IS_WRONG_BY", "0"))
        results = tuple(r.numpy() + numpy.float32(wrong) for r in run.results)
        return results if len(results) > 1 else results[0]

    return Kernel(kernel)


class Kernel:
    def __init__(self, function):
        self.function = function

    def __call__(self, *arguments):
        return self[1](*arguments)

    def __getitem__(self, lnc):
        return functools.partial(self.function, lnc=lnc)
"""
TORCH_NEURONX = """
import torch
from torch.library import custom_op, infer_schema
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from flexattn.neuron.interpreter.interpret import interpret

_setup_privateuseone_for_python_backend("neuron")
calls = []


class Neuron(torch.Tensor):
    @staticmethod
    def __new__(cls, data):
        made = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device="neuron:0",
            requires_grad=data.requires_grad,
        )
        made.data_here = data
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, given=(), named=None):
        # An operator of nki_op's gets the tensors; all others run on the data, and copies to the
        # CPU leave it there.
        if function._schema.name in operators:
            return operators[function._schema.name](*given)
        given, named = tree_map_only(Neuron, lambda x: x.data_here, (given, named or {}))
        leaves = str(named.get("device", "neuron")) == "cpu"
        if "device" in named:
            named["device"] = "cpu"
        results = function(*given, **named)
        return results if leaves else tree_map_only(torch.Tensor, Neuron, results)


def strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return Neuron(torch.empty_strided(size, stride, dtype=dtype))


factories = torch.library.Library("aten", "IMPL")
factories.impl("empty_strided", strided, "PrivateUse1")
operators = {}


def nki_op(name, fn=None, mutates_args=()):
    def register(fn):
        made = custom_op(name, fn, mutates_args=mutates_args,
                         schema=infer_schema(fn, mutates_args=mutates_args))
        operators[name] = fn
        return made
    return register if fn is None else register(fn)


def on_device(text, given, core, lnc):
    assert all(a.device.type == "neuron" for a in given if isinstance(a, torch.Tensor))
    calls.append(lnc)
    found = [a.data_here if isinstance(a, Neuron) else a for a in given]
    results = tuple(map(Neuron, interpret(text, found, core, programs=lnc).results))
    return results if len(results) > 1 else results[0]
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
    """The packages in a folder that PYTHONPATH may name."""
    (folder / "nki").mkdir(parents=True)
    (folder / "nki" / "__init__.py").write_text(NKI)
    for name in ("isa", "language"):
        (folder / "nki" / f"{name}.py").write_text("")
    (folder / "torch_neuronx.py").write_text(TORCH_NEURONX)
    if nrtpy:
        (folder / "nrtpy.py").write_text(NRTPY)


def driver(folder, instance_type):
    """What the Neuron driver shows of one device."""
    place = folder / "neuron0" / "info" / "architecture"
    place.mkdir(parents=True)
    (place / "instance_type").write_text(f"{instance_type}\n")
    return folder
