"""Runs a rendered Blackwell prefill in plain Python, as tests/emulated_gluon.py does the backward.

Each block is a thread for each partition. The tensor core is one more: it computes the products in
the order in which they were issued, and then signals their barriers. Tensor memory holds NaN until
it is written, and P destroys the scores over which it lies. In each block one of the engines or
partitions is much later than the others, so that nobody may count on it without a wait.
"""

import queue
import random
import threading
import time
from types import SimpleNamespace

import numpy as np

from tests.emulated_gluon import SECONDS, Block, Meeting, _language
from tests.emulated_memory import Number, Shared, tile
from tests.emulated_mla import _store
from tests.emulated_prefill import _CONSTANTS, Emulated, _load, _maximum, _minimum, _number

# What is late in the first block, in the second and so on; seconds.
LATE = ("copies", "products", "correction", "softmax")
LATENESS = 0.03
_PARTITIONS = {0: "correction", 1: "softmax"}


class Memory:
    """Columns of tensor memory, of 32 bits: an array [rows, columns], or some columns of it."""

    def __init__(self, array):
        self.array, self.packed = array, None

    def slice(self, start, length):
        return Columns(self, start, length)

    def write(self, start, values):
        """Numbers of 32 bits, which end what was packed there."""
        self.array[:, start : start + values.shape[1]] = values
        if self.packed is not None:
            self.packed[:, 2 * start : 2 * (start + values.shape[1])] = np.nan


class Columns:
    """Some columns of tensor memory."""

    def __init__(self, memory, start, length):
        self.memory, self.start, self.length = memory, start, length

    def load(self, layout):
        return tile(self.memory.array[:, self.start : self.start + self.length].copy())

    def store(self, values):
        self.memory.write(self.start, np.asarray(values))

    def reinterpret(self, dtype, shape, layout):
        assert (self.start, 2 * self.length) == (0, shape[1])
        return Packed(self.memory, 0, shape[1])


class Packed(Columns):
    """Columns of 16 bits, two in the place of one of 32."""

    def slice(self, start, length):
        return Packed(self.memory, self.start + start, length)

    @property
    def array(self):
        return self.memory.packed[:, self.start : self.start + self.length]

    def store(self, values):
        memory = self.memory
        if memory.packed is None:
            rows, columns = memory.array.shape
            memory.packed = np.full((rows, 2 * columns), np.nan, np.float32)
        self.array[...] = values
        memory.array[:, self.start // 2 : (self.start + self.length) // 2] = np.nan


class Tensors:
    """Tiles of tensor memory [tiles, rows, columns]."""

    def __init__(self, shape):
        self.tiles = [Memory(np.full(shape[1:], np.nan, np.float32)) for _ in range(shape[0])]

    def index(self, i):
        memory = self.tiles[int(i)]
        found = Columns(memory, 0, memory.array.shape[1])
        found.slice = memory.slice
        return found


class Boxes(Shared):
    """A tile whose columns lie in boxes [boxes, rows, columns], read when it is multiplied."""

    def __init__(self, boxes, turned=False):
        self.boxes, self.turned = boxes, turned

    @property
    def array(self):
        whole = np.concatenate(list(self.boxes), 1)
        return whole.T if self.turned else whole

    def reshape(self, shape):
        return self

    def permute(self, order):
        return Boxes(self.boxes, not self.turned)


class Stages:
    """Stages of tiles in boxes [stages, boxes, rows, columns]."""

    def __init__(self, boxes):
        self.boxes = boxes

    def index(self, i):
        return Boxes(self.boxes[int(i)])


def _reinterpret(place, dtype, shape, layout):
    """Boxes [..., rows, columns] as tiles of so many rows and columns."""
    width = place.array.shape[-1]
    return Stages(place.array.reshape(shape[0], shape[-1] // width, shape[-2], width))


class TensorCore(Block):
    """A block whose products one engine computes in order."""

    def __init__(self, number, chance, programs):
        super().__init__(number, chance, programs)
        self.issued, self.error = queue.Queue(), None
        threading.Thread(target=self._compute, daemon=True).start()

    def _compute(self):
        while True:
            work = self.issued.get()
            self._await("products")
            try:
                work()
            except Exception as error:
                self.error, self.failed = error, True
            self.issued.task_done()

    def _await(self, what):
        if LATE[self.number % len(LATE)] == what:
            time.sleep(LATENESS)

    def wait(self, barrier, parity):
        partition = self.partitions[threading.get_ident()]
        barrier.wait(parity)
        if partition in _PARTITIONS:
            self._await(_PARTITIONS[partition])

    def load(self, source, at, barrier, place):
        at = [int(x) for x in at]

        def copy():
            place.array[...] = source.read(at).reshape(place.array.shape)
            barrier.expect(-source.bytes, 0)

        late = LATE[self.number % len(LATE)] == "copies"
        later = threading.Timer(LATENESS if late else 0, copy)
        later.daemon = True
        self.copies.append(later)
        later.start()

    def multiply(self, a, b, acc, use_acc=True, mbarriers=(), mbarrier_preds=None):
        assert isinstance(mbarriers, (list, tuple)), "a product without barriers waits for itself"

        def compute():
            product = np.asarray(a.array, np.float64) @ np.asarray(b.array, np.float64)
            before = acc.memory.array if use_acc else 0
            acc.memory.write(0, (product + before).astype(np.float32))
            for each, holds in zip(
                mbarriers, mbarrier_preds or [True] * len(mbarriers), strict=True
            ):
                if holds:
                    each.expect(0)

        self.issued.put(compute)

    def commit(self, barrier):
        self.issued.put(lambda: barrier.expect(0))

    def specialise(self, partitions, warps, registers):
        quiet = np.errstate(all="ignore")
        super().specialise([(quiet(run), given) for run, given in partitions], warps, registers)
        ended = threading.Timer(SECONDS, lambda: None)
        ended.start()
        while self.issued.unfinished_tasks and ended.is_alive():
            time.sleep(1e-3)
        ended.cancel()
        assert not self.error, self.error
        assert not self.issued.unfinished_tasks


class OnTensorCore(Emulated):
    """A kernel that is launched on tensors of float32 in the memory of the CPU."""

    def launch(self, stream, given):
        super(Emulated, self).launch(stream, given)
        told = self.launched[-1]
        out, told["OUT"] = told["OUT"], told["OUT"].float()
        run(self.source, self.programs, dict(self._arguments()))
        out.copy_(told["OUT"])


def run(source, programs, arguments, seed=0):
    """Run a kernel. arguments: arrays behind Pointers and Descriptors, and numbers, by name."""
    body = source.text[source.text.index("\nBLOCK_M = ") :]
    code = compile(body, "kernel", "exec")
    chance = random.Random(seed)
    with np.errstate(all="ignore"):
        for number in chance.sample(range(programs), programs):
            block = TensorCore(number, random.Random(chance.random()), programs)
            names = _names(block, programs)
            exec(code, names)
            names.update(
                keep_branch=lambda x: x, fast_tanh=np.tanh, wait_for_row_tiles=lambda: None
            )
            names[source.entry](*(arguments[each.name] for each in source.arguments))


def _names(block, programs):
    names = _language(block)
    vars(names["gl"]).update(
        constexpr=lambda x: _CONSTANTS.get(type(x), lambda x: x)(x),
        load=_load, store=_store, max=_along(np.max), min=_along(np.min), sum=_along(np.sum),
        reduce=lambda x, axis, f: _along(np.max)(x, axis),
        fma=lambda a, b, c: a * b + c, log2=np.log2, cast=lambda x, dtype: x,
        cdiv=lambda a, b: Number(-(-a // b)),
        program_id=lambda axis: Number(block.number), num_programs=lambda axis: programs,
        reshape=np.reshape, permute=np.transpose, split=lambda x: (x[..., 0], x[..., 1]),
        full=lambda shape, x, dtype, layout: tile(np.full(shape, x)),
        minimum=lambda a, b, **named: _single(_number(_minimum(a, b))),
        maximum=lambda a, b, **named: _single(_number(_maximum(a, b))),
    )  # fmt: skip
    allocate = names["gl"].allocate_shared_memory
    names["mbarrier"].MBarrierLayout = lambda: ""
    names["gl"].allocate_shared_memory = lambda dtype, shape, of: (
        Meeting(block) if dtype == "int64" else allocate(dtype, shape, of)
    )
    names["mbarrier"].arrive = lambda barrier, count: barrier.expect(0)
    names["mbarrier"].wait = block.wait
    names["tl"] = SimpleNamespace(PropagateNan=SimpleNamespace(ALL=None), **vars(names["gl"]))
    return names | {
        "reinterpret": _reinterpret,
        "TensorMemoryLayout": lambda *_, **named: None,
        "allocate_tensor_memory": lambda dtype, shape, layout: Tensors(shape),
        "tcgen05_mma": block.multiply,
        "tcgen05_commit": block.commit,
    }


def _single(x):
    """Floats are of 32 bits, also where numpy made them of integers."""
    return tile(x) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x


def _along(reduce):
    def reduced(x, axis):
        return tile(reduce(np.asarray(x), axis=axis))

    return reduced
