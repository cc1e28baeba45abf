"""Launch a compiled kernel through the CUDA driver, with the arguments packed once.

Triton's launcher converts every argument of every call, and with Triton 3.6 is compiled by a C
compiler for each new signature. Here the arguments that never change between calls stay in a
buffer, each call writes the few that do, and nothing is compiled.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from flexattn.errors import BuildError
from flexattn.render.arguments import Argument

MAP_BYTES = 128
RANK = 4
# CUtensorMapDataType by Triton's signature type.
_ELEMENTS = {"fp16": 6, "fp32": 7, "bf16": 9}
_L2_PROMOTION_128B = 2


class Frame:
    """One thread's copy of a launch's arguments: 8-byte slots, tensor maps, and pointers to both.

    slots, floats and doubles are views of the same memory.
    """

    def __init__(self, count: int, maps: int) -> None:
        self.slots = (ctypes.c_uint64 * count)()
        self.floats = (ctypes.c_float * (2 * count)).from_buffer(self.slots)
        self.doubles = (ctypes.c_double * count).from_buffer(self.slots)
        self._memory = ctypes.create_string_buffer(MAP_BYTES * (maps + 1))
        start = ctypes.addressof(self._memory)
        first = start + -start % MAP_BYTES
        self.maps = [first + MAP_BYTES * i for i in range(maps)]
        self.mapped: list[int] = [0] * maps
        self.params: Any = None


class CudaLaunch:
    """A kernel with its fixed arguments; `launch` takes the others.

    fixed: the arguments in the order of `arguments`, None where a call gives the value.
    boxes: for each tensor descriptor in order, (shape, strides, block) of its tensor.
    """

    def __init__(
        self,
        compiled: Any,
        arguments: Sequence[Argument],
        index: int,
        programs: int,
        fixed: Sequence[Any],
        boxes: Sequence[Any],
    ) -> None:
        metadata = compiled.metadata
        self._function = loaded(compiled, index)
        self._programs = programs
        self._threads = metadata.num_warps * 32
        self._shared = metadata.shared
        self._arguments = tuple(arguments)
        self._fixed = tuple(fixed)
        self._boxes = tuple(boxes)
        self._swizzles = tuple((meta["swizzle"], tuple(meta["block_size"])) for meta in
                               metadata.tensordesc_meta or ())  # fmt: skip
        self._given = [i for i, value in enumerate(self._fixed) if value is None]
        self._local = threading.local()
        expected = entry_parameters(compiled.asm["ptx"])
        if self._parameter_count() != expected:
            raise BuildError(
                f"the kernel takes {expected} parameters, {self._parameter_count()} are known",
                "Triton's calling convention is that of releases 3.6 to 3.9",
                "install one of these Triton releases",
            )

    def _parameter_count(self) -> int:
        """Each argument, a descriptor's shape and strides, and Triton's two scratch pointers."""
        return len(self._arguments) + 2 * RANK * len(self._boxes) + 2

    def launch(self, stream: int, given: Sequence[Any]) -> None:
        """Launch on a stream, with values for the arguments that are None in `fixed`, in order."""
        frame: Frame | None = getattr(self._local, "frame", None)
        if frame is None:
            frame = self._local.frame = self._frame()
        self._write(frame, given)
        status = _launch_kernel()(
            self._function, self._programs, 1, 1, self._threads, 1, 1, self._shared, stream,
            frame.params, None,
        )  # fmt: skip
        if status:
            raise BuildError(f"cuLaunchKernel failed with CUDA error {status}")

    def _write(self, frame: Frame, given: Sequence[Any]) -> None:
        slots, described = frame.slots, 0
        for i, value in zip(self._given, given, strict=True):
            kind = self._arguments[i].type
            if isinstance(value, Tensor):
                address = value.data_ptr()
                if kind[0] == "t":
                    if frame.mapped[described] != address:
                        self._encode(frame, described, address)
                    described += 1
                else:
                    slots[i] = address
            elif kind == "fp32":
                frame.floats[2 * i] = value
            elif kind == "fp64":
                frame.doubles[i] = value
            else:
                slots[i] = value

    def _frame(self) -> Frame:
        boxes = self._boxes
        count = len(self._arguments)
        frame = Frame(count + 2 * RANK * len(boxes) + 2, len(boxes))
        base = ctypes.addressof(frame.slots)
        pointers: list[int] = []
        described, extra = 0, count
        for i, argument in enumerate(self._arguments):
            value = self._fixed[i]
            if argument.type[0] != "t":
                if value is not None and argument.type == "fp32":
                    frame.floats[2 * i] = value
                elif value is not None:
                    frame.slots[i] = value
                pointers.append(base + 8 * i)
                continue
            pointers.append(frame.maps[described])
            for number in (*boxes[described].shape, *boxes[described].strides):
                frame.slots[extra] = number
                pointers.append(base + 8 * extra)
                extra += 1
            described += 1
        pointers += [base + 8 * extra, base + 8 * (extra + 1)]
        frame.params = (ctypes.c_void_p * len(pointers))(*pointers)
        return frame

    def _encode(self, frame: Frame, which: int, address: int) -> None:
        """Describe a tensor to the copy engine: dimensions innermost first, strides in bytes."""
        box = self._boxes[which]
        swizzle, block = self._swizzles[which]
        argument = [each for each in self._arguments if each.type[0] == "t"][which]
        element = argument.type.split("<")[1].split("[")[0]
        itemsize = 4 if element == "fp32" else 2
        status = _encode_tiled()(
            frame.maps[which], _ELEMENTS[element], RANK, address,
            (ctypes.c_uint64 * RANK)(*reversed(box.shape)),
            (ctypes.c_uint64 * (RANK - 1))(*(each * itemsize for each in box.strides[-2::-1])),
            (ctypes.c_uint32 * RANK)(*reversed(block)),
            (ctypes.c_uint32 * RANK)(*[1] * RANK),
            0, swizzle, _L2_PROMOTION_128B, 0,
        )  # fmt: skip
        if status:
            raise BuildError(
                f"cuTensorMapEncodeTiled failed with CUDA error {status} for {box}",
                "K and V are 16-byte aligned with strides that are multiples of 16 bytes",
                'pass kernel_options={"USE_TMA": False} and report this',
            )
        frame.mapped[which] = address


def entry_parameters(ptx: str) -> int:
    """How many parameters the kernel of a PTX text takes."""
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", ptx, re.DOTALL)
    return 0 if entry is None else len(re.findall(r"\.param", entry.group(1)))


def can_launch(compiled: Any) -> bool:
    """Whether a compiled kernel needs nothing that only Triton's own launcher provides."""
    metadata = compiled.metadata
    return (
        "ptx" in compiled.asm
        and metadata.num_ctas == 1
        and not metadata.global_scratch_size
        and not metadata.profile_scratch_size
        and not metadata.launch_cooperative_grid
    )


@lru_cache(maxsize=4096)
def loaded(compiled: Any, index: int) -> int:
    """Load a binary onto a GPU, once; returns its CUfunction."""
    from triton.runtime import driver

    found = driver.active.utils.load_binary(
        compiled.name, compiled.kernel, compiled.metadata.shared, index
    )
    return int(found[1])


@lru_cache(maxsize=1)
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@lru_cache(maxsize=1)
def _launch_kernel() -> Any:
    function = _cuda().cuLaunchKernel
    number, pointer = ctypes.c_uint, ctypes.c_void_p
    function.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    return function


@lru_cache(maxsize=1)
def _encode_tiled() -> Any:
    function = _cuda().cuTensorMapEncodeTiled
    number, pointer = ctypes.c_uint, ctypes.c_void_p
    function.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    return function
