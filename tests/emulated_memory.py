"""Tensors, pointers, descriptors and shared memory of a kernel that runs in plain Python."""

import math
from types import SimpleNamespace

import numpy as np


class Tile(np.ndarray):
    """A tensor in registers."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        if bitcast:
            kind = np.int32 if dtype == "int32" else np.float32
            return np.ascontiguousarray(self, self.dtype.kind + "4").view(kind).view(Tile)
        if dtype == "uint32":
            return (self.astype(np.int64) & 0xFFFFFFFF).view(Tile)
        if dtype == "uint64":
            return np.where(self < 0, 2**63 - 1, self).view(Tile)
        if str(dtype).startswith("int") and self.dtype.kind == "f":
            return np.trunc(self).astype(np.int64).view(Tile)
        return self

    def permute(self, order):
        return self.transpose(order)


class Number(int):
    """A number of a kernel's arguments, and what is computed of it."""

    def to(self, dtype):
        return self


def _kept(name):
    def method(self, other):
        found = getattr(int, name)(self, other)
        return Number(found) if type(found) is int else found

    return method


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "rshift"):
    setattr(Number, f"__{_name}__", _kept(f"__{_name}__"))


def tile(values, dtype=np.float32):
    return np.asarray(values, dtype).view(Tile)


class Pointer:
    """An address in a flat array."""

    def __init__(self, array, offset=0):
        self.array, self.offset = array, offset

    def __add__(self, more):
        return Pointer(self.array, self.offset + more)

    def to(self, dtype, bitcast=False):
        """Its address, of which a kernel asks only whether it is 0; bitcast: of such elements."""
        if not bitcast:
            return 1
        array = self.array.view(dtype)
        return Pointer(array, self.offset * (len(array) // len(self.array)))


class Descriptor:
    """A tensor as the copy engine sees it: outside of it zeros are read, and nothing written."""

    layout = None

    def __init__(self, array, block, itemsize):
        self.array, self.block, self.dtype = array, block, None
        self.bytes = itemsize * math.prod(block)

    def _inside(self, at):
        ends = [
            min(a + n, size) for a, n, size in zip(at, self.block, self.array.shape, strict=True)
        ]
        kept = tuple(slice(int(a), max(int(a), int(z))) for a, z in zip(at, ends, strict=True))
        return kept, tuple(slice(0, max(0, int(z - a))) for a, z in zip(at, ends, strict=True))

    def read(self, at):
        found = np.zeros(self.block, np.float32)
        kept, there = self._inside(at)
        found[there] = self.array[kept]
        return found

    def write(self, at, values):
        kept, there = self._inside(at)
        self.array[kept] = values.reshape(self.block)[there]

    def add(self, at, values):
        kept, there = self._inside(at)
        self.array[kept] += values.reshape(self.block)[there]


class Shared:
    """Shared memory, or a part of it."""

    dtype = None

    def __init__(self, array):
        self.array = array

    def reinterpret(self, shape):
        """The same memory with other elements: of a new size, only while nobody writes here."""
        if math.prod(shape) == self.array.size:
            return self.reshape(shape)
        return Staged(self, shape)

    def index(self, i):
        return Shared(self.array[int(i)])

    def reshape(self, shape):
        return Shared(self.array.reshape(shape))

    def permute(self, order):
        return Shared(self.array.transpose(order))

    def slice(self, start, length, dim=0):
        return Shared(self.array[(slice(None),) * dim + (slice(start, start + length),)])

    def load(self, layout):
        return tile(self.array.copy(), self.array.dtype)

    def store(self, values):
        self.array[...] = values


class Staged(Shared):
    """What is written over a tile that is free; the tile is no number from then on."""

    def __init__(self, tile, shape):
        if not hasattr(tile, "staged"):
            tile.staged = np.full(math.prod(shape), np.nan, np.float32)
        self.tile = tile
        super().__init__(tile.staged.reshape(shape))

    def store(self, values):
        super().store(values)
        self.tile.array[...] = np.nan

    def check(self):
        assert np.isnan(self.tile.array).all(), "a tile was written before it was read"
