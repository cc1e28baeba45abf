"""Source -> Kernel: compile for any target, with or without the device; a failure is typed."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flexattn.device import Device
from flexattn.errors import BuildError
from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.base.binding import Binding, bind_arguments
from flexattn.kernels.base.source import Source
from flexattn.kernels.ptx.assembler import ptx_version
from flexattn.kernels.ptx.negated_extremes import guarded, merged
from flexattn.kernels.ptx.stages import OWN_STAGES, block_warps, compiled_by
from flexattn.runtime.codecache import (
    anew,
    know_compiler,
    module_of,
    source_lines,
    text_file,
    with_triton_cache,
    without_collections,
    without_dumps,
)
from flexattn.runtime.cuda_launch import CudaLaunch, loaded
from flexattn.runtime.kernel_store import Binary, KernelStore, binary_of
from flexattn.runtime.outcomes import memory
from flexattn.settings import current, log, say_once
from flexattn.util.locks import Lru, Ranked, Turns, renewed

# Triton's interpreter keeps the program that runs in its module, and changes triton.language while
# one does: two threads would read each other's program numbers.
_interpreter = renewed(threading.Lock())
# Triton reads a text in Python, where one thread at a time runs: the longest text is first, as its
# compile goes on longest outside of Python.
_reading = Ranked()
DESCRIPTOR = re.compile(r"tensordesc<(?P<element>\w+)\[(?P<shape>[\d, ]+)\]>")


class Builder:
    """Kernels by source and device, loaded or compiled once, shared by all threads.

    compiled, loaded: how many came from Triton, and how many from the directory of binaries that
    the settings name.
    """

    def __init__(self) -> None:
        self._kernels: Lru[tuple[str, str, int], Kernel] = Lru(512)
        # Sources by what they follow from: filling a template takes tens of milliseconds, and of
        # a new length, or of another number of splits, only the header would differ.
        self.rendered: Lru[tuple[Any, ...], tuple[Source, ...]] = Lru(2048)
        self._turns = Turns()
        self._guard = renewed(threading.Lock())
        self.compiled = self.loaded = 0

    def clear(self) -> None:
        """Forget all kernels and sources."""
        self._kernels.clear()
        self.rendered.clear()
        self.compiled = self.loaded = 0

    def sources(
        self, key: tuple[Any, ...], make: Callable[[], tuple[Source, ...] | None]
    ) -> tuple[Source, ...]:
        """The sources of a key, made once; none where there are none."""
        found = self.rendered.get(key)
        if found is None:
            found = make() or ()
            self.rendered.put(key, found)
        return found

    def kernel(self, source: Source, device: Device, index: int) -> Kernel:
        """The kernel of a source on the GPU with this index (-1: the interpreter)."""
        key = (source.hash, device.arch, index)
        found = self._kernels.get(key)
        if found is not None:
            return found
        with self._turns.of(key):
            found = self._kernels.get(key)
            if found is None:
                begin = time.perf_counter()
                found = self._build(source, device, index)
                if current().debug >= 2:
                    spent = 1e3 * (time.perf_counter() - begin)
                    log.debug("kernel_%s ready in %.0f ms", source.hash[:24], spent)
                self._kernels.put(key, found)
        return found

    def begin(self, source: Source, device: Device, index: int) -> None:
        """Build a kernel in a thread, where it is not there yet; `kernel` waits for it."""
        if self._kernels.get((source.hash, device.arch, index)) is None:
            begin(partial(self.kernel, source, device, index))

    def _build(self, source: Source, device: Device, index: int) -> Kernel:
        if current().debug >= 4:
            log.debug("%s\n%s", path_of(source), source.text)
        if index < 0:
            return Kernel(source, _load(source), index)
        found = self._load(source, device, index)
        if found is None and source.stored:
            raise RenderAnew(source.hash)
        return found or self._compile(source, device, index)

    def _load(self, source: Source, device: Device, index: int) -> Kernel | None:
        """The kernel from the directory that the settings name, if it is there and sound."""
        root = current().binaries
        binary = None if root is None else KernelStore(root).binary(source, device)
        if binary is None:
            return None
        try:
            function = loaded(binary, index)
        except BuildError as error:  # made for a newer driver
            say_once(f"{root}: a binary is not used, the kernel is compiled: {error.got}")
            return None
        if binary.verified:
            memory().trust(source, device)
        with self._guard:
            self.loaded += 1
        return Kernel(source, None, index, binary, function)

    def _compile(self, source: Source, device: Device, index: int) -> Kernel:
        with torch.cuda.device(index):
            compiled = compile_source(source, device)
        binary, function = binary_of(compiled, device.arch), 0
        if binary is not None and binary.shared <= device.shared_memory:
            function = loaded(binary, index)
        with self._guard:
            self.compiled += 1
        if current().debug >= 5:
            log.debug("%s", compiled.asm["ttgir"])
        if current().debug >= 6 and "ptx" in compiled.asm:
            log.debug("%s", compiled.asm["ptx"])
        return Kernel(source, compiled, index, binary, function)


def begin(work: Callable[[], object]) -> None:
    """Build kernels in a thread: half of a compile runs outside Python.

    The process ends after the thread. An error is dropped: the caller that needs the kernel builds
    it again, and gets the error.
    """
    know_compiler()

    def run() -> None:
        with suppress(Exception):
            work()

    threading.Thread(
        target=copy_context().run, args=(run,), name="kernel_begun", daemon=False
    ).start()


class RenderAnew(Exception):
    """A source that was read from a directory has no binary there that this process can load.

    Its text may be anybody's: it is not executed.
    """


def compile_source(source: Source, device: Device) -> Any:
    """Compile with Triton for a device that need not be here.

    Returns triton's CompiledKernel. Raises BuildError with the compiler's words and the path.
    """
    compiled = _compiled(source, device)
    warps = block_warps(source.stages, source.text)
    other_warps = warps is not None and compiled.metadata.num_warps != warps
    if other_warps or _unguarded(compiled, device):
        # Triton 3.6 keeps kernels by their source alone: this one was compiled without the passes.
        with anew():
            compiled = _compiled(source, device)
    return compiled


def _unguarded(compiled: Any, device: Device) -> bool:
    """True if ptxas may have dropped a negation, as it does without the pass that hides them."""
    ptx = compiled.asm.get("ptx", "")
    return bool(guarded(OWN_STAGES, device.capability).passes) and merged(ptx) != ptx


def _compiled(source: Source, device: Device) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    path = path_of(source)
    version = ptx_version(source.stages.ptxas)
    arch: int | str = device.capability or device.arch
    target = GPUTarget(device.backend, arch, device.warp_size)
    attrs = {
        (i,): promised
        for i, argument in enumerate(source.arguments)
        if (promised := _promises(argument))
    }
    try:
        with (
            source_lines(current().debug > 0),
            without_collections(),
            without_dumps(),
            compiled_by(guarded(source.stages, device.capability)),
        ):
            return with_triton_cache(
                triton.compile,
                _read_in_turn(
                    _syntax(source)(_load(source), _signature(source), {}, attrs), source
                ),
                target=target,
                options={
                    "num_warps": source.num_warps,
                    "num_stages": source.num_stages,
                    # Said aloud because Triton's default changes with release 3.10.
                    "enable_fp_fusion": True,
                    # Asserts that only a debug build keeps take time to write in every other.
                    "sanitize_overflow": False,
                    **({"maxnreg": source.registers} if source.registers else {}),
                    **dict(source.hints),
                    **({"ptx_version": version} if version else {}),
                },
            )
    except Exception as error:  # whatever the compiler raises is one typed failure here
        raise BuildError(
            f"Triton could not compile {path} for {device.arch}: {type(error).__name__}: {error}",
            "a rendered kernel compiles for every arch that its config is offered for",
            "report the file; kernel_options with smaller blocks may avoid it",
        ) from error


def _promises(argument: Argument) -> list[list[Any]]:
    """The facts of an argument that Triton's compiler may rely on, by the compiler's names."""
    found: list[list[Any]] = []
    if argument.divisible_by > 1:
        found.append(["tt.divisibility", argument.divisible_by])
    return [*found, ["tt.pointer_range", 32]] if argument.near else found


def _signature(source: Source) -> dict[str, str]:
    """Argument types for the compiler: Gluon's descriptors say how a tile is laid out."""
    types = {argument.name: argument.type for argument in source.arguments}
    if source.language != "gluon":
        return types
    from triton.experimental.gluon import language as gl

    for name, described in types.items():
        found = DESCRIPTOR.match(described)
        if found:
            shape = [int(size) for size in found["shape"].split(",")]
            element = gl.dtype(found["element"])
            layout = gl.NVMMASharedLayout.get_default_for(shape, element)
            types[name] = f"{described[:-1]},{layout!r}>"
    return types


def _read_in_turn(asked: Any, source: Source) -> Any:
    """Triton's source of a kernel, whose text is read after all longer ones that wait."""
    read = asked.make_ir

    def make_ir(*given: Any, **named: Any) -> Any:
        with _reading.of(len(source.text)):
            return read(*given, **named)

    asked.make_ir = make_ir
    return asked


def _syntax(source: Source) -> Any:
    """The compiler's class for the language that a source is written in."""
    if source.language == "gluon":
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _load(source: Source) -> Any:
    """The function of a source that is launched, as triton.jit made it of the rendered text.

    Raises RenderAnew for a text that was read.
    """
    if source.stored:
        raise RenderAnew(source.hash)
    return getattr(module_of(path_of(source), source.text), source.entry)


def path_of(source: Source) -> Path:
    """The file of a source, for people and profilers; it is written if need be."""
    return text_file(f"kernel_{source.hash[:24]}.py", source.text)


def unloaded(source: Source, device: Device) -> Kernel:
    """A kernel compiled for a device that need not be here, and launched by nobody."""
    compiled = compile_source(source, device)
    return Kernel(source, compiled, -1, binary_of(compiled, device.arch))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel ready to launch on the GPU with this index, or in the interpreter (-1).

    binary, function: what the CUDA driver launches, and its CUfunction. compiled: what Triton
    launches where there is no binary, and None for a binary that was loaded from a directory.
    """

    source: Source
    compiled: Any
    index: int
    binary: Binary | None = None
    function: int = 0

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that the compiled kernel needs; 0 in the interpreter."""
        if self.binary is not None:
            return self.binary.shared
        metadata = getattr(self.compiled, "metadata", None)
        return 0 if metadata is None else int(metadata.shared)

    def prepare(
        self,
        programs: int,
        fixed: Mapping[str, Any],
        given: Sequence[str],
        boxes: Mapping[str, Any] | None = None,
        spare: Collection[str] = (),
    ) -> Launcher:
        """A launcher of `programs` programs that already holds the arguments of every call.

        fixed: their values by name. given: the names of what each call passes, in order. boxes:
        how each tensor that is read through a descriptor lies in memory, by name. spare: names
        that this kernel may lack. Raises ArgumentError, as bind_arguments does.
        """
        bound = bind_arguments(self.source.arguments, fixed, given, boxes, spare)
        if self.binary is not None:
            return CudaLaunch(
                self.binary, self.function, bound, self.index, programs, self.source.launch_pdl
            )
        return TritonLaunch(self.compiled, programs, bound, self.index)


class Launcher(Protocol):
    """Something that launches a prepared kernel."""

    def launch(self, stream: int, given: Sequence[Any]) -> None:
        """Launch on a stream, with the values whose names it was prepared for, in their order."""


class Scratch(NamedTuple):
    """Memory that one kernel of a launch writes for another: the name of their argument for it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def empty(self, index: int) -> Tensor:
        """The memory, for one launch; index: as `blank` has it."""
        steps = accumulate(self.shape[:0:-1], mul, initial=1)
        found: Tensor = blank(index)(self.shape, tuple(steps)[::-1], self.dtype)
        return found


def blank(index: int) -> Any:
    """torch's fastest allocator of uninitialised memory, a function of (shape, strides, dtype).

    index: -1 for the CPU, else the index of a GPU, which must be the current one. Inductor's
    compiled graphs use the same function. It takes a third of torch.empty's time.
    """
    own: Any = torch._C._dynamo.guards
    return own._empty_strided_cpu if index < 0 else own._empty_strided_cuda


@dataclass(frozen=True, slots=True)
class InOrder:
    """Prepared kernels that are launched one after the other, each with the same values."""

    kernels: tuple[Launcher, ...]

    def launch(self, stream: int, given: Sequence[Any]) -> None:
        """Launches the kernels in order; see Launcher.launch."""
        for each in self.kernels:
            each.launch(stream, given)


class Before(NamedTuple):
    """Kernels that are launched before attention's, and the memory that these then read."""

    kernels: tuple[Launcher, ...] = ()
    scratch: tuple[Scratch, ...] = ()


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """Triton's own launcher: for the interpreter, and for GPUs that are not NVIDIA's."""

    compiled: Any
    programs: int
    bound: Binding
    index: int

    def launch(self, stream: int, given: Sequence[Any]) -> None:
        """Launches the kernel by Triton's launcher, or in the interpreter; see Launcher.launch."""
        bound = self.bound
        if len(given) != bound.passed:
            raise ValueError(f"{len(given)} values for {bound.passed} names")
        args = list(bound.fixed)
        for argument, place in bound.given:
            args[argument] = given[place]
        if self.index < 0:
            _interpret(self.compiled, self.programs, bound.types, args)
            return
        compiled = self.compiled
        compiled.run(
            self.programs, 1, 1, stream, compiled.function, compiled.packed_metadata,
            None, None, None, *args,
        )  # fmt: skip


# Of a number in a kernel's signature, numpy's name.
_NUMPY = {
    "i1": "bool", "i32": "int32", "u32": "uint32", "i64": "int64",
    "fp32": "float32", "fp64": "float64",
}  # fmt: skip


def _interpret(function: Any, programs: int, types: Sequence[str], args: Sequence[Any]) -> None:
    """Run a kernel in Triton's interpreter.

    It takes a number's type from its value: each is given that of the signature, or offsets would
    wrap at 2^31 and captured floats would be rounded where a GPU's are not. Minus infinity less
    itself, the logarithm of 0 and the like are what kernels mean: a GPU says nothing of them, and
    numpy warns.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    typed = list(args)
    for place, kind in enumerate(types):
        stored = _NUMPY.get(kind)
        if stored is not None:
            dtype = tl.str_to_ty(kind, None)
            typed[place] = tl.tensor(TensorHandle(np.array([args[place]], stored), dtype), dtype)
    with _interpreter, np.errstate(all="ignore"):
        function[(programs,)](*typed)


_builder = Builder()


def builder() -> Builder:
    """The process's builder."""
    return _builder
