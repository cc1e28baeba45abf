"""Runs a rendered MLA decode in plain Python, as tests/emulated_gluon.py does the backward.

A block has a thread for each warpgroup and one for the loading warp. Keys arrive late by chance,
and a product reads its operands when it is issued or not before it is awaited.
"""

import random
import re
import threading
from collections import defaultdict

import numpy as np

from tests.emulated_gluon import Block, _language as _language_of_backwards
from tests.emulated_memory import Descriptor, Pointer, Shared, Tile, tile

# A word that nobody has written.
WRONG = 10**6 + 7
_KINDS = {"float32": np.float32, "int32": np.int64}
NUMBERS = re.compile(r"\.to\(tl\.(u?int32|int64|int8)\)")


class Columns(Shared):
    """Rows of boxes of 64 columns that lie one behind the other, read when they are used."""

    def __init__(self, boxes, transposed=False):
        self.boxes, self.transposed = boxes, transposed

    @property
    def array(self):
        found = np.concatenate(list(self.boxes), 1)
        return found.T if self.transposed else found

    def permute(self, order):
        return Columns(self.boxes, not self.transposed)


class Wide(Shared):
    """Several of them."""

    def index(self, i):
        return Columns(self.array[int(i)])


class Decoding(Block):
    """A block whose warpgroups have products of their own under way."""

    def __init__(self, number, chance):
        super().__init__(number, chance)
        self.of_thread = defaultdict(list)

    @property
    def flying(self):
        return self.of_thread[threading.get_ident()]

    @flying.setter
    def flying(self, value):
        pass

    def specialise(self, partitions, warps, registers):
        super().specialise(partitions, warps, registers)
        assert not any(self.of_thread.values())


def run(source, programs, arguments, seed=0):
    """Run a kernel. arguments: arrays behind Pointers and Descriptors, and numbers, by name."""
    body = source.text[source.text.index("\nBLOCK_M = ") :]
    code = compile(NUMBERS.sub("", body), "kernel", "exec")
    chance = random.Random(seed)
    with np.errstate(all="ignore"):
        for number in chance.sample(range(programs), programs):
            block = Decoding(number, random.Random(chance.random()))
            names, seen = _language(block), set()
            exec(code, names)
            names.update(
                no_offset=lambda: 0, launch_dependents=lambda: None,
                prefetch=lambda address, wanted: None, widened=lambda x: x,
                wait_for_choice=lambda: None, seen_bits=lambda: seen,
                clear_seen=lambda seen: seen.clear(), mark_seen=_mark,
                load_words=lambda rows, there, column: _load(
                    rows + (4 * column + np.arange(64))[None], there, 0.0
                ),
                store_widened=lambda place, x: place.store(x),
            )  # fmt: skip
            names[source.entry](*(arguments[each.name] for each in source.arguments))


def described(tensor, box, block):
    """A descriptor of a tensor that lies as the box says."""
    return Descriptor(tensor.as_strided(box.shape, box.strides).float().numpy(), block, 2)


def _load(place, mask=True, other=0):
    at = np.asarray(place.offset)
    kept = np.broadcast_to(mask, np.broadcast_shapes(at.shape, np.shape(mask)))
    at = np.broadcast_to(at, kept.shape)
    found = np.full(kept.shape, other, place.array.dtype)
    found[kept] = place.array[at[kept]]
    return found.view(Tile) if found.ndim and found.dtype == np.float32 else found[()]


def _mark(seen, keys, wanted):
    found = np.zeros(len(keys), bool)
    for i in np.flatnonzero(wanted):
        found[i] = keys[i] not in seen
        seen.add(keys[i])
    return found


def _store(place, values, mask=True):
    at, values, kept = np.broadcast_arrays(place.offset, values, mask)
    place.array[at[kept]] = values[kept]


def _full(shape, value, dtype, *_):
    return tile(np.full([int(n) for n in shape], value), _KINDS[dtype])


def _selected(condition, a, b):
    found = np.where(condition, a, b)
    return tile(found) if found.dtype.kind == "f" else found[()]


def _reinterpret(shared, dtype, shape, layout):
    if dtype == "int32":
        words = shared.array.dtype.kind == "i"
        return Shared(shared.array.reshape(shape)) if words else shared
    if dtype == "float32":  # of two numbers of 16 bits the first
        return Shared(shared.array.reshape(shape[0], 2, *shape[1:])[:, 0])
    if len(shape) == 1 or shape[-1] <= 64 or tuple(shape) == shared.array.shape:
        return Shared(shared.array.reshape(shape))
    return Wide(shared.array.reshape(shape[0], shape[2] // 64, shape[1], 64))


def _language(block):
    names = _language_of_backwards(block)
    tl, allocate = names["tl"], names["tl"].allocate_shared_memory

    def allocated(dtype, shape, layout):
        words = dtype in ("int32", "int8")
        return Shared(np.full(shape, WRONG)) if words else allocate(dtype, shape, layout)

    class Constant(int):
        value = property(lambda self: self)

    def constexpr(x):
        return Constant(x) if isinstance(x, int) and not isinstance(x, bool) else x

    vars(tl).update(
        constexpr=constexpr, zeros=lambda shape, dtype, *_: _full(shape, 0.0, dtype), full=_full,
        exp2=np.exp2, log2=np.log2, where=_selected, minimum=np.minimum, maximum=np.maximum,
        max=np.max, min=np.min, sum=np.sum, reshape=np.reshape, load=_load, store=_store,
        associative_scan=lambda x, axis, plus: np.cumsum(x), allocate_shared_memory=allocated,
        int8="int8", float16="float16", pointer_type=lambda element: element,
    )  # fmt: skip
    names["mbarrier"].arrive = lambda barrier, count, pred=True: (
        barrier.expect(0) if pred else None
    )
    return names | {"reinterpret": _reinterpret, "Pointer": Pointer}
