"""Launch a kernel through the CUDA driver, with the arguments packed once.

Triton's launcher converts every argument of every call, and with Triton 3.6 is compiled by a C
compiler for each new signature. Here the arguments that never change between calls stay in a
buffer, each call writes the few that do, and nothing is compiled.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from flexattn.device import cuda_driver
from flexattn.errors import BuildError, InputError
from flexattn.kernels.base.binding import Binding
from flexattn.runtime.kernel_store import Binary

MAP_BYTES = 128
RANK = 4
# Every argument has 8 bytes, of which a shorter one takes the first.
_FORMATS = {"fp32": "f4x", "fp64": "d", "i32": "i4x"}


class Frame:
    """One thread's arguments of a launch: 8-byte slots, tensor maps, and pointers to both."""

    def __init__(self, count: int, maps: int) -> None:
        # ctypes would make a type for each length: 100 us of a launch's first time.
        self.slots = array("Q", bytes(8 * count))
        self._memory = array("Q", bytes(MAP_BYTES * (maps + 1)))
        start = _address(self._memory)
        first = start + -start % MAP_BYTES
        self.maps = [first + MAP_BYTES * i for i in range(maps)]
        self.mapped: list[int] = [0] * maps
        self.params = array("Q")
        self.config = cuda_driver.LaunchConfig()
        self.start: tuple[Any, ...] = ()
        self.stream = -1


class CudaLaunch:
    """A kernel with its fixed arguments; `launch` takes the others.

    function: the kernel's CUfunction on the GPU with this index. bound: where each argument gets
    its value; a box of it is (shape, strides) of a tensor. launch_pdl: it may begin while the
    kernel before it runs, for whose end it waits itself.
    """

    def __init__(
        self,
        binary: Binary,
        function: int,
        bound: Binding,
        index: int,
        programs: int,
        launch_pdl: bool = False,
    ) -> None:
        self._function = function
        self._index = index
        self._blocks = programs
        self._attribute = cuda_driver.pdl_attribute() if launch_pdl else None
        self._threads = binary.num_warps * 32
        self._shared = binary.shared
        self._maps = binary.maps
        self._boxes = bound.boxes
        self._local = threading.local()
        self._types = bound.types
        self._passed = bound.passed
        order = _order_of(bound.types, bound.given)
        self._order, self._given = order.slots, len(bound.given)
        self._fixed = [bound.fixed[i] for i in order.slots[self._given :]]
        self._elements = order.elements
        self._tensors, self._numbers, self._behind = order.tensors, order.numbers, order.behind
        self._described, self._pack, self._pack_kept = order.described, order.pack, order.pack_kept
        self._driver = cuda_driver.launch_kernel()
        self._check(binary)

    def _check(self, binary: Binary) -> None:
        """Each argument, a descriptor's shape and strides, and Triton's two scratch pointers."""
        known = len(self._types) + 2 * RANK * len(self._boxes) + 2
        if known != binary.parameters or not (
            len(self._maps) == len(self._boxes) == len(self._described)
        ):
            raise BuildError(
                f"the kernel takes {binary.parameters} parameters with {len(binary.maps)} "
                f"descriptors, {known} with {len(self._described)} are known",
                "Triton's calling convention is that of releases 3.6 to 3.9",
                "install one of these Triton releases",
            )

    def launch(self, stream: int, given: Sequence[Any]) -> None:
        """Launch on a stream, with the values whose names it was prepared for, in their order."""
        frame: Frame | None = getattr(self._local, "frame", None)
        if frame is None:
            frame = self._local.frame = self._frame()
        if len(given) != self._passed:
            raise ValueError(f"{len(given)} values for {self._passed} names")
        slots = frame.slots
        for slot, place in self._tensors:
            slots[slot] = given[place].data_ptr()
        for which, slot in self._described:
            if frame.mapped[which] != slots[slot]:
                self._encode(frame, which, slots[slot])
        if self._numbers:
            try:
                self._pack(slots, self._behind, *[given[place] for place in self._numbers])
            except struct.error as error:
                raise self._too_large(given) from error
        if frame.stream != stream:
            frame.config.stream = frame.stream = stream
        status = self._driver(*frame.start)
        if status == cuda_driver.INVALID_CONTEXT:  # a thread that never worked on this GPU
            cuda_driver.make_current(self._index)
            status = self._driver(*frame.start)
        if status:
            raise BuildError(f"cuLaunchKernel failed with CUDA error {status}")

    def _frame(self) -> Frame:
        """The fixed arguments, and pointers in the order of the kernel's parameters."""
        types, boxes = self._types, self._boxes
        frame = Frame(len(types) + 2 * RANK * len(boxes) + 2, len(boxes))
        extra = [number for box in boxes for number in (*box.shape, *box.strides)]
        self._pack_kept(frame.slots, 8 * self._given, *self._fixed, *extra)
        base = _address(frame.slots)
        place = {argument: base + 8 * slot for slot, argument in enumerate(self._order)}
        after = base + 8 * len(types)
        pointers: list[int] = []
        maps = iter(frame.maps)
        for i, kind in enumerate(types):
            if kind[0] != "t":
                pointers.append(place[i])
                continue
            pointers += [next(maps), *range(after, after + 16 * RANK, 8)]
            after += 16 * RANK
        pointers += [after, after + 8]
        frame.params = array("Q", pointers)
        config = frame.config
        config.grid[:], config.block[:] = (self._blocks, 1, 1), (self._threads, 1, 1)
        config.shared = self._shared
        if self._attribute is not None:
            config.attributes, config.count = ctypes.addressof(self._attribute), 1
        start = ctypes.addressof(config), self._function, _address(frame.params), None
        frame.start = tuple(map(cuda_driver.address_argument, start))
        return frame

    def _too_large(self, given: Sequence[Any]) -> InputError:
        """An error that names the values too large for slots: sizes have 32 bits, numbers 64."""
        kinds = [self._types[i] for i in self._order[len(self._tensors) : self._given]]
        numbers = [
            str(given[place]) for place, kind in zip(self._numbers, kinds, strict=True)
            if isinstance(given[place], int) and abs(given[place]) >> (31 if kind == "i32" else 63)
        ]  # fmt: skip
        return InputError(
            f"a mod captures something of size or value {', '.join(numbers)}",
            "each size of a captured tensor is below 2**31, and a captured number below 2**63",
            "view the tensor in more dimensions",
        )

    def _encode(self, frame: Frame, which: int, address: int) -> None:
        """Describe a tensor to the copy engine."""
        box, tensor_map = self._boxes[which], self._maps[which]
        status = cuda_driver.encode_descriptor(
            frame.maps[which], self._elements[which], address,
            box.shape, box.strides, tensor_map.block, tensor_map.swizzle,
        )  # fmt: skip
        if status:
            raise BuildError(
                f"cuTensorMapEncodeTiled failed with CUDA error {status} for {box}",
                "K and V are 16-byte aligned with strides that are multiples of 16 bytes",
                'pass kernel_options={"USE_TMA": False} and report this',
            )
        frame.mapped[which] = address


def _address(memory: array[int]) -> int:
    return memory.buffer_info()[0]


class _Order(NamedTuple):
    """The places of a kernel's arguments in a frame, which their types and places decide.

    slots: the argument of each slot. tensors, numbers: places of what a call gives, the first
    with their slots. described: the slot of each tensor descriptor, numbered, and elements its
    dtype. behind: bytes before the numbers. pack writes the numbers, pack_kept all that is kept,
    and the shapes and strides of tensor descriptors.
    """

    slots: tuple[int, ...]
    tensors: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...]
    described: tuple[tuple[int, int], ...]
    elements: tuple[str, ...]
    behind: int
    pack: Callable[..., None]
    pack_kept: Callable[..., None]


@lru_cache(maxsize=1024)
def _order_of(types: tuple[str, ...], given: tuple[tuple[int, int], ...]) -> _Order:
    """Addresses that calls give lie first and are written one by one, which takes less time than a
    pack; then the numbers that calls give, and behind them what is kept."""
    passed = dict(given)
    kept = [i for i in range(len(types)) if i not in passed]
    tensors = [(i, place) for i, place in given if types[i][0] in "*t"]
    numbers = [(i, place) for i, place in given if types[i][0] not in "*t"]
    described = (slot for slot, (i, _) in enumerate(tensors) if types[i][0] == "t")
    elements = tuple(kind.split("<")[1].split("[")[0] for kind in types if kind[0] == "t")
    extra = ["i64"] * (2 * RANK * len(elements))
    return _Order(
        tuple(i for i, _ in tensors + numbers) + tuple(kept),
        tuple((slot, place) for slot, (_, place) in enumerate(tensors)),
        tuple(place for _, place in numbers),
        tuple(enumerate(described)),
        elements,
        8 * len(tensors),
        _packer([types[i] for i, _ in numbers]),
        _packer([*(types[i] for i in kept), *extra]),
    )


def _packer(types: Sequence[str]) -> Callable[..., None]:
    """Writes arguments of these types, as Triton's signature spells them."""
    kinds = ("Q" if kind[0] in "*t" else _FORMATS.get(kind, "q") for kind in types)
    return struct.Struct("=" + "".join(kinds)).pack_into


def loaded(binary: Binary, index: int) -> int:
    """Load a binary onto a GPU; returns its CUfunction."""
    threads = 32 * binary.num_warps
    return cuda_driver.load_function(binary.code, binary.name, binary.shared, threads, index)
