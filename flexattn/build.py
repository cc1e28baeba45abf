"""Source -> Kernel: compile for any target, with or without the device; a failure is typed."""

from __future__ import annotations

import importlib.util
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

from flexattn.binary import Binary, binary_of
from flexattn.binary_store import Binaries
from flexattn.compiler_context import (
    anew,
    source_lines,
    with_one_program,
    without_collections,
    without_dumps,
)
from flexattn.cuda_launch import CudaLaunch, loaded
from flexattn.device import Device
from flexattn.errors import BuildError, FlexAttnError
from flexattn.lru import Lru
from flexattn.one_program import block_warps
from flexattn.render.source import Source
from flexattn.settings import current, log, say_once
from flexattn.thread_bits import strays

DESCRIPTOR = re.compile(r"tensordesc<(?P<element>\w+)\[(?P<shape>[\d, ]+)\]>")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel ready to launch on the GPU with this index, or in the interpreter (-1).

    binary: what the CUDA driver launches. compiled: what Triton launches where there is no
    binary, and None for a binary that was loaded from a directory.
    """

    source: Source
    compiled: Any
    index: int
    binary: Binary | None = None

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that the compiled kernel needs; 0 in the interpreter."""
        if self.binary is not None:
            return self.binary.shared
        metadata = getattr(self.compiled, "metadata", None)
        return 0 if metadata is None else int(metadata.shared)

    def prepare(self, programs: int, fixed: Sequence[Any], boxes: Sequence[Any]) -> Launcher:
        """A launcher of `programs` programs that already holds the arguments of every call.

        fixed: all arguments in the order of the source's, None for what each call gives.
        boxes: how each tensor that is read through a descriptor lies in memory.
        """
        if self.binary is not None:
            found = self.source.arguments
            return CudaLaunch(self.binary, found, self.index, programs, fixed, boxes)
        return TritonLaunch(self.compiled, programs, tuple(fixed), self.index)


class Launcher(Protocol):
    """Something that launches a prepared kernel."""

    def launch(self, stream: int, given: Sequence[Any]) -> None:
        """Launch on a stream, with values for the arguments that were not fixed, in order."""


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """Triton's own launcher: for the interpreter, and for GPUs that are not NVIDIA's."""

    compiled: Any
    programs: int
    fixed: tuple[Any, ...]
    index: int

    def launch(self, stream: int, given: Sequence[Any]) -> None:
        """As Launcher.launch."""
        values = iter(given)
        args = [next(values) if value is None else value for value in self.fixed]
        if self.index < 0:
            self.compiled[(self.programs,)](*args)
            return
        compiled = self.compiled
        compiled.run(
            self.programs, 1, 1, stream, compiled.function, compiled.packed_metadata,
            None, None, None, *args,
        )  # fmt: skip


@lru_cache(maxsize=4096)
def load(path: Path) -> Any:
    """The `kernel` function of a rendered file, as triton.jit made it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def compile_source(source: Source, device: Device) -> Any:
    """Compile with Triton for a device that need not be here.

    Returns triton's CompiledKernel. Raises BuildError with the compiler's words and the path.
    """
    warps = block_warps(source.text)
    compiled = _compiled(source, device, warps is not None)
    if warps is None:
        return compiled
    if compiled.metadata.num_warps != warps:
        # Triton 3.6 keeps kernels by their source alone: this one was compiled by somebody else.
        with anew():
            compiled = _compiled(source, device, True)
    found = strays(compiled.asm["ptx"])
    if found or compiled.metadata.num_warps != warps:
        raise BuildError(
            f"{source.path()} for {compiled.metadata.num_warps} warps of {warps}: {found[:3]}",
            "consumers share a program of which a thread knows seven bits of its number",
            'report it; kernel_options={"BACKEND": "TRITON"} takes another kernel',
        )
    return compiled


def _compiled(source: Source, device: Device, shared: bool) -> Any:
    """shared: consumers are one program."""
    import triton
    from triton.backends.compiler import GPUTarget

    path = source.path()
    arch: int | str = device.capability or device.arch
    target = GPUTarget(device.backend, arch, device.warp_size)
    attrs = {
        (i,): [["tt.divisibility", argument.divisible_by]]
        for i, argument in enumerate(source.arguments)
        if argument.divisible_by > 1
    }
    try:
        with (
            source_lines(current().debug > 0),
            without_collections(),
            without_dumps(),
            with_one_program(shared),
        ):
            return triton.compile(
                _syntax(source)(load(path), _signature(source), {}, attrs),
                target=target,
                options={
                    "num_warps": source.num_warps,
                    "num_stages": source.num_stages,
                    # Said aloud because Triton's default changes with release 3.10.
                    "enable_fp_fusion": True,
                    # Asserts that only a debug build keeps take time to write in every other.
                    "sanitize_overflow": False,
                    **({"maxnreg": source.registers} if source.registers else {}),
                },
            )
    except Exception as error:  # whatever the compiler raises is one typed failure here
        raise BuildError(
            f"Triton could not compile {path} for {device.arch}: {type(error).__name__}: {error}",
            "a rendered kernel compiles for every arch that its config is offered for",
            "report the file; kernel_options with smaller blocks may avoid it",
        ) from error


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


def _syntax(source: Source) -> Any:
    """The compiler's class for the language that a source is written in."""
    if source.language == "gluon":
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def unloaded(source: Source, device: Device) -> Kernel:
    """A kernel compiled for a device that need not be here, and launched by nobody."""
    compiled = compile_source(source, device)
    return Kernel(source, compiled, -1, binary_of(compiled, device.arch))


class RenderAnew(Exception):
    """A source that was read from a directory has no binary there that this process can load."""


class Builder:
    """Kernels by source and device, loaded or compiled once, shared by all threads.

    compiled, loaded: how many came from Triton, and how many from the directory of binaries that
    the settings name.
    """

    def __init__(self, capacity: int = 512) -> None:
        self._kernels: Lru[tuple[str, str, int], Kernel] = Lru(capacity)
        self._locks: Lru[tuple[str, str, int], threading.Lock] = Lru(capacity)
        self._guard = threading.Lock()
        self.compiled = self.loaded = 0

    def kernel(self, source: Source, device: Device, index: int) -> Kernel:
        """The kernel of a source on the GPU with this index (-1: the interpreter)."""
        key = (source.hash, device.arch, index)
        found = self._kernels.get(key)
        if found is not None:
            return found
        with self._guard:
            lock = self._locks.get(key) or threading.Lock()
            self._locks.put(key, lock)
        with lock:
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
        """Build a kernel in a thread, where it is not there yet; `kernel` waits for it.

        Half of a compile runs outside Python. A process that ends waits for it. What fails does so
        again where it is asked for.
        """
        if self._kernels.get((source.hash, device.arch, index)) is None:
            run = partial(copy_context().run, self._begun, source, device, index)
            threading.Thread(target=run, name=f"kernel_{source.hash[:24]}", daemon=False).start()

    def _begun(self, source: Source, device: Device, index: int) -> None:
        with suppress(FlexAttnError):
            self.kernel(source, device, index)

    def _build(self, source: Source, device: Device, index: int) -> Kernel:
        if current().debug >= 4:
            log.debug("%s\n%s", source.path(), source.text)
        if index < 0:
            return Kernel(source, load(source.path()), index)
        found = self._load(source, device, index)
        if found is None and source.stored:
            raise RenderAnew(source.hash)
        return found or self._compile(source, device, index)

    def _load(self, source: Source, device: Device, index: int) -> Kernel | None:
        """The kernel from the directory that the settings name, if it is there and sound."""
        root = current().binaries
        binary = None if root is None else Binaries(root).find(source, device)
        if binary is None:
            return None
        try:
            loaded(binary, index)
        except BuildError as error:  # made for a newer driver
            say_once(f"{root}: a binary is not used, the kernel is compiled: {error.got}")
            return None
        with self._guard:
            self.loaded += 1
        return Kernel(source, None, index, binary)

    def _compile(self, source: Source, device: Device, index: int) -> Kernel:
        import torch

        with torch.cuda.device(index):
            compiled = compile_source(source, device)
        binary = binary_of(compiled, device.arch)
        if binary is not None and binary.shared <= device.shared_memory:
            loaded(binary, index)
        with self._guard:
            self.compiled += 1
        if current().debug >= 5:
            log.debug("%s", compiled.asm["ttgir"])
        if current().debug >= 6 and "ptx" in compiled.asm:
            log.debug("%s", compiled.asm["ptx"])
        return Kernel(source, compiled, index, binary)


@lru_cache(maxsize=1)
def builder() -> Builder:
    """The process's builder."""
    return Builder()
