"""interpret(): run the source of an NKI kernel on tensors, under the rules of a NeuronCore."""

from __future__ import annotations

import builtins
import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from flexattn.device.neuroncore import BANK_BYTES, NeuronCore
from flexattn.errors import KernelError
from flexattn.neuron.interpreter import engines
from flexattn.neuron.interpreter.machine import (
    NKI_DTYPES,
    OPERATORS,
    Machine,
    Storage,
    Tensor,
    current_machine,
    fault,
    running,
)

Engine = enum.Enum("Engine", "unknown tensor scalar gpsimd dma vector sync")
ReduceCmd = enum.Enum("ReduceCmd", "idle reset reduce reset_reduce load_reduce")
BUFFERS = ("sbuf", "psum", "hbm", "shared_hbm", "private_hbm")
_NAMES = {dtype: name for name, dtype in NKI_DTYPES.items()}


@dataclass(frozen=True)
class Interpreted:
    """The results of a run as tensors. sbuf_bytes: of one partition. psum_banks: of eight."""

    results: tuple[torch.Tensor, ...]
    sbuf_bytes: int
    psum_banks: int


def interpret(
    source: str,
    arguments: Sequence[Any],
    core: NeuronCore,
    *,
    programs: int = 1,
) -> Interpreted:
    """Run the function `kernel` of the source with these arguments; tensors become HBM tensors.

    programs: physical cores that run it, one after the other here, each with memory of its own
    except the results. Raises KernelError for whatever breaks a rule.
    """
    kernel = _load(source)["kernel"]
    machines = [Machine(core, program, programs) for program in range(programs)]
    written = [_run(kernel, machine, arguments) for machine in machines]
    return Interpreted(
        tuple(map(_merged, zip(*written, strict=True))),
        max(machine.live["sbuf"] for machine in machines),
        max(machine.live["psum"] for machine in machines) // BANK_BYTES,
    )


def _run(
    kernel: Callable[..., Any], machine: Machine, arguments: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    """The results as one core leaves them, poisoned where it wrote nothing."""
    with running(machine), _one_thread():
        try:
            given = kernel(*(_hbm(each) for each in arguments))
        except (TypeError, AttributeError, NameError) as error:
            raise KernelError(
                f"{type(error).__name__}: {error}", "this subset has no such thing"
            ) from error
    outputs = given if isinstance(given, tuple) else (given,)
    for each in outputs:
        if not isinstance(each, Tensor) or each.buffer != "shared_hbm":
            raise fault(f"the result {each!r}", "results are tensors in nl.shared_hbm")
    return tuple(each.data.clone() for each in outputs)


def _merged(written: Sequence[torch.Tensor]) -> torch.Tensor:
    """One result of all cores."""
    first, *others = written
    for each in others:
        mine = ~each.isnan()
        if bool((mine & ~first.isnan()).any()):
            raise fault("an element of a result that two cores write", "it has one core")
        first = torch.where(mine, each, first)
    return first


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tiles are small: a second thread waits more than it works."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _load(source: str) -> dict[str, Any]:
    """A kernel source's names, with this interpreter in the place of the package nki."""
    nki = _package()
    modules = {"nki": nki, "nki.isa": nki.isa, "nki.language": nki.language}

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in modules:
            raise fault(f"import {name}", f"a kernel imports {', '.join(modules)} alone")
        return modules[name] if args and len(args) > 2 and args[2] else nki

    scope: dict[str, Any] = {
        "__builtins__": {**vars(builtins), "__import__": importing},
        "__name__": "kernel",
    }
    exec(compile(source, "<nki kernel>", "exec"), scope)
    return scope


def _package() -> Any:
    language: dict[str, Any] = {name: name for name in NKI_DTYPES}
    language |= {name: name for name in BUFFERS} | dict(OPERATORS)
    language["ndarray"] = _ndarray
    language["program_id"] = lambda axis=0: current_machine().program
    language["num_programs"] = lambda axes=0: current_machine().programs
    names = vars(engines).items()
    instructions = {name: each for name, each in names if hasattr(each, "__wrapped__")}
    isa: dict[str, Any] = {"engine": Engine, "reduce_cmd": ReduceCmd, **instructions}
    return SimpleNamespace(
        jit=_jit, language=SimpleNamespace(**language), isa=SimpleNamespace(**isa)
    )


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """nki.jit takes no options; keyword-only parameters are not supported by the compiler."""
    if not callable(function):
        raise fault("nki.jit with options", "since 0.3 it takes none")
    return function


def _ndarray(
    shape: Sequence[int], dtype: str, buffer: str = "sbuf", address: Any = None
) -> Tensor:
    if buffer not in BUFFERS:
        raise fault(f"the buffer {buffer!r}", f"it is one of {BUFFERS}")
    if address is not None:
        raise fault(f"address={address}", "this subset leaves addresses to the allocator")
    return Tensor(current_machine().allocate(tuple(int(size) for size in shape), dtype, buffer))


def _hbm(value: Any) -> Any:
    if isinstance(value, list | dict | set):
        raise fault(f"a {type(value).__name__} as argument", "compile-time arguments are tuples")
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype not in _NAMES:
        raise fault(f"a tensor of {value.dtype}", f"kernels take {', '.join(NKI_DTYPES)}")
    if value.numel() == 0:
        raise fault(f"a tensor of shape {tuple(value.shape)}", "kernels take no empty tensors")
    whole = value.contiguous().reshape(tuple(value.shape) or (1,))
    return Tensor(Storage(whole, _NAMES[value.dtype], "hbm"))
