"""Runs a rendered Hopper backward in plain Python: what its pipeline computes, with no GPU.

Each block is two threads, one for both consumer warpgroups and one for the loading warp, and a
copy engine that is late by chance. A product is computed when it is issued or, as likely, not
before it is awaited: a tile of shared memory that was overwritten too early gives wrong numbers,
and one that was never written gives NaN. A thread that waits for ever ends the test.
"""

import math
import random
import re
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from flexattn.reference.dropout import dropout_words
from tests.emulated_diagonals import broadcast_diagonals, reduce_diagonals
from tests.emulated_memory import Number, Shared, Staged, Tile, tile

SECONDS = 20
# Elements behind an allocation that views of its last pieces may have.
_BEHIND = 128 * 64
CONSUMERS, LOADER = 256, 32


class Meeting:
    """What threads wait at, all of a block under one lock."""

    def __init__(self, block):
        self.block, self.generation, self.count, self.bytes = block, 0, 0, 0
        self.parts = {}

    def index(self, i):
        return self.parts.setdefault(int(i), Meeting(self.block))

    def _pass(self):
        self.generation, self.count = self.generation + 1, 0
        self.block.lock.notify_all()

    def arrive(self, threads, of=CONSUMERS + LOADER):
        """Of a hardware barrier, at which so many threads of those that pass it arrive."""
        with self.block.lock:
            self.count += threads
            assert self.count <= of
            if self.count == of:
                self._pass()

    def sync(self, threads, of=CONSUMERS + LOADER):
        with self.block.lock:
            before = self.generation
        self.arrive(threads, of)
        self._until(lambda: self.generation > before)

    def expect(self, size, arrivals=1):
        """Of an mbarrier with one arrival, which is passed where all bytes have come as well."""
        with self.block.lock:
            self.count, self.bytes = self.count + arrivals, self.bytes + size
            if self.count and not self.bytes:
                self._pass()

    def wait(self, parity):
        self._until(lambda: self.generation & 1 != parity)

    def _until(self, condition):
        with self.block.lock:
            if not self.block.lock.wait_for(lambda: condition() or self.block.failed, SECONDS):
                self.block.failed = True
                raise AssertionError("a barrier that nobody passes")
            assert not self.block.failed


class Block:
    """One program of the grid."""

    def __init__(self, number, chance, programs=1):
        self.number, self.chance, self.failed = number, chance, False
        self.programs = programs
        self.lock = threading.Condition()
        self.hardware, self.products, self.copies, self.stores = {}, {}, [], {}
        self.gathered = {}
        # Of a thread: which partition it runs; and how many of them are consumers'.
        self.partitions, self.groups, self.warps = {}, 1, 1
        # Of a thread: the steps and columns of its next product, where it says so.
        self.narrowed = {}

    def count(self, place, more, mask=None, sem=None):
        if not np.ndim(place.offset):
            before = Number(place.array[place.offset])
            place.array[place.offset] += more
            return before
        np.add.at(place.array, np.asarray(place.offset)[mask], np.asarray(more)[mask])

    @property
    def flying(self):
        """The products of this thread that are under way."""
        return self.products.setdefault(threading.get_ident(), [])

    def barrier(self, number):
        return self.hardware.setdefault(number, Meeting(self))

    def product(self, a, b, acc, use_acc=True, is_async=True):
        narrow = self.narrowed.pop(threading.get_ident(), None)
        found = SimpleNamespace(
            value=None, operands=(a, b), acc=acc if use_acc else None, narrow=narrow
        )
        self.flying.append(found)
        if self.chance.random() < 0.5:
            self.await_products(0 if acc is None else self.chance.randrange(len(self.flying)))
        return found

    def await_products(self, most, deps=()):
        while len(self.flying) > most:
            each = self.flying.pop(0)
            a, b = (x.array if isinstance(x, Shared) else x for x in each.operands)
            acc = 0 if each.acc is None else getattr(each.acc, "value", each.acc)
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            if each.narrow is None:
                each.value = tile(a @ b + acc)
                continue
            # The other columns of the result keep what they are.
            steps, of_steps, columns, of_columns = each.narrow
            assert a.shape[1] == 16 * of_steps and b.shape[1] in (of_columns, 2 * of_columns)
            value = np.zeros((a.shape[0], b.shape[1])) + acc
            columns = columns if columns < of_columns else b.shape[1]
            value[:, :columns] += a[:, : 16 * steps] @ b[: 16 * steps, :columns]
            each.value = tile(value)
        found = [getattr(x, "value", x) for x in deps]
        found = [x if y is None else y for x, y in zip(deps, found, strict=True)]
        return found[0] if len(found) == 1 else found

    def load(self, source, at, barrier, place):
        at = [int(x) for x in at]

        def copy():
            place.array[...] = source.read(at).reshape(place.array.shape)
            barrier.expect(-source.bytes, 0)

        if self.chance.random() < 0.7:
            copy()
            return
        later = threading.Timer(self.chance.random() * 1e-3, copy)
        later.daemon = True
        self.copies.append(later)
        later.start()

    def gather(self, place, source, kept=True):
        """Copies by threads, which are late, too."""
        at, kept = np.broadcast_arrays(source.offset, kept)
        self.gathered.setdefault(threading.get_ident(), []).append((place, source.array, at, kept))

    def arrive_gathered(self, barrier, increment_count):
        assert not increment_count
        mine = self.gathered.pop(threading.get_ident())

        def copy():
            for place, array, at, kept in mine:
                found = np.where(kept, array[np.where(kept, at, 0)], 0.0)
                place.array[...] = found.reshape(place.array.shape)
            barrier.expect(0)

        later = threading.Timer(self.chance.random() * 1e-3, copy)
        later.daemon = True
        self.copies.append(later)
        later.start()

    def _late(self, write, at, place):
        """The copy engine reads shared memory as late as the thread that asks lets it."""
        self.stores.setdefault(threading.get_ident(), []).append((write, at, place))

    def add(self, to, at, place):
        self._late(to.add, at, place)

    def store(self, to, at, place):
        self._late(to.write, at, place)

    def await_stores(self, most):
        mine = self.stores.get(threading.get_ident(), [])
        while mine:
            write, at, place = mine.pop()
            if isinstance(place, Staged):
                place.check()
            write(at, place.array)

    def specialise(self, partitions, warps, registers):
        def run(number, function, arguments):
            self.partitions[threading.get_ident()] = number
            try:
                function(*arguments)
            except BaseException as error:
                errors.append(error)
                with self.lock:
                    self.failed = True
                    self.lock.notify_all()

        errors, self.warps = [], len(partitions)
        # Four warps may also draw what dropout keeps.
        self.groups = 1 + any(function.__name__ == "differentiate" for function, _ in partitions)
        threads = [
            threading.Thread(target=run, args=(i, *each), daemon=True)
            for i, each in enumerate(partitions)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(2 * SECONDS)
        if errors:
            raise errors[0]
        for each in self.copies:
            each.join()
        assert (
            not any(self.products.values())
            and not any(self.stores.values())
            and all(not each.count for each in self.hardware.values())
        )


def run(source, programs, arguments, seed=0):
    """Run a kernel. arguments: arrays behind Pointers and Descriptors, and numbers, by name.

    DQ_ACC is a Pointer to [tiles, BLOCK_M, columns], in which order threads hold a tile is not
    emulated, or a Descriptor where the copy engine adds to it.
    """
    # A Python number until it is set in the loop.
    body = source.text[source.text.index("\nBLOCK_M = ") :].replace(
        "before.to(", "Number(before).to("
    )
    code = compile(body, "kernel", "exec")
    chance = random.Random(seed)
    with np.errstate(all="ignore"):
        ordered = any(each.name == "DQ_SEMAPHORES" for each in source.arguments)
        started = range(programs) if ordered else chance.sample(range(programs), programs)
        for number in started:
            block = Block(number, random.Random(chance.random()), programs)
            names = _language(block)
            exec(code, names)
            behind = re.search(r"eights of columns, behind (\d+) of a tile", source.text)
            behind = 8 * int(behind[1]) if behind else 0
            names.update(_assembly(block, "\nSUMS = " in source.text, behind))
            names.update(_announced(block, source.text))
            values = [arguments[each.name] for each in source.arguments]
            values = [Number(x) if type(x) is int else x for x in values]
            names[source.entry](*values)


def _language(block):
    def allocate(dtype, shape, layout):
        # A view of pieces may end behind them: see _reinterpret.
        if dtype == "int64":
            return Meeting(block)
        if dtype == "int32":
            return Shared(np.full(shape, -99, np.int64))
        if dtype == "uint32":
            return Shared(np.full(shape, 2**32 - 1, np.int64))
        size = math.prod(shape)
        return Shared(np.full(size + _BEHIND, np.nan, np.float32)[:size].reshape(shape))

    def zeros(shape, dtype, layout):
        return tile(np.zeros(shape), np.float32 if dtype == "float32" else np.int64)

    layout = SimpleNamespace(value=None)
    gl = SimpleNamespace(
        constexpr=lambda x: x, zeros=zeros,
        arange=lambda a, z, layout: np.arange(a, z).view(Tile), expand_dims=np.expand_dims,
        exp2=lambda x: np.exp2(x).view(Tile), where=lambda c, a, b: _select(c, a, b),
        minimum=_minimum, maximum=_maximum, abs=np.abs, log=np.log,
        sum=lambda x, axis: np.sum(x, axis).view(Tile),
        convert_layout=lambda x, layout: x,
        load=_load, store=_store, allocate_shared_memory=allocate,
        static_range=range, program_id=lambda axis: block.number, warp_specialize=block.specialise,
        float32="float32", bfloat16="bfloat16", float16="float16", int64="int64", int32="int32",
        uint16="uint16", uint32="uint32", uint64="uint64",
        join=lambda a, b: np.stack([a, b], -1).view(Tile), split=lambda x: (x[..., 0], x[..., 1]),
        NVMMADistributedLayout=lambda *_: layout, DotOperandLayout=lambda *_: layout,
        SliceLayout=lambda *_: layout, BlockedLayout=lambda *_, **named: layout,
        SwizzledSharedLayout=lambda *_, **named: layout,
        NVMMASharedLayout=lambda *_, **named: layout,
        full=lambda shape, x, dtype, layout: np.full(shape, x), atomic_add=block.count,
        num_programs=lambda axis: block.programs, max=lambda x, axis: Number(x.max(axis)),
    )  # fmt: skip
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: None, init=lambda barrier, count: None,
        expect=lambda barrier, size: barrier.expect(size),
        arrive=lambda barrier, count, pred=True: barrier.expect(0, count) if pred else None,
        wait=lambda barrier, parity: barrier.wait(parity),
    )  # fmt: skip
    return {
        "Number": Number, "gl": gl, "tl": gl, "gluon": SimpleNamespace(jit=lambda f: f),
        "mbarrier": mbarrier, "fence_async_shared": lambda: None,
        "tma": SimpleNamespace(store_wait=block.await_stores), "atomic_add": block.add,
        "warpgroup_mma": block.product, "warpgroup_mma_init": lambda acc: acc,
        "warpgroup_mma_wait": block.await_products, "load": block.load,
        "store": block.store, "barrier": lambda: None,
        "copy_async": block.gather, "arrive_copied": block.arrive_gathered,
        "reinterpret": _reinterpret,
    }  # fmt: skip


def _reinterpret(place, dtype, shape, layout):
    if dtype == "uint16":
        halves = np.stack([place.array & 0xFFFF, place.array >> 16 & 0xFFFF], -1)
        return Shared(halves.reshape(shape))
    if math.prod(shape) > place.array.size:  # of pieces that lie one behind the other
        steps = [place.array.itemsize * math.prod(shape[n + 1 :]) for n in range(len(shape))]
        return Shared(np.lib.stride_tricks.as_strided(place.array, shape, steps))
    return place.reinterpret(shape)


def _load(place, mask=True, other=0):
    if mask is False:  # of an address that may be 0
        return other
    if np.ndim(place.offset) == 0:
        found = place.array[place.offset]
        return found if found.dtype.kind == "f" else Number(found)
    return np.where(mask, place.array[np.where(mask, place.offset, 0)], other).view(Tile)


def _store(place, values, mask):
    at, values, kept = np.broadcast_arrays(place.offset, values, mask)
    place.array[at[kept]] = values[kept]


def _minimum(a, b):
    return min(a, b) if np.ndim(a) == np.ndim(b) == 0 else np.minimum(a, b).view(Tile)


def _maximum(a, b):
    return max(a, b) if np.ndim(a) == np.ndim(b) == 0 else np.maximum(a, b).view(Tile)


def _philox(row, key, head, seed):
    """The reference's, whose words are the kernel's: see tests/compile/test_dropout.py."""
    counter = (torch.from_numpy(np.array(x, dtype=np.int64)) for x in (row, key, head, int(seed)))
    words, extra, shared = dropout_words(*counter)
    return [x.numpy().view(Tile) for x in (*words, *extra, shared)]


def _permuted(low, high, selector):
    """As prmt does."""
    found = [word >> place & 255 for word in (low, high) for place in (0, 8, 16, 24)]
    return sum(found[selector >> 4 * n & 7] << 8 * n for n in range(4)).view(Tile)


def _select(condition, a, b):
    if np.ndim(condition) == 0 and np.ndim(a) == 0:
        return a if condition else b
    if np.issubdtype(np.asarray(a).dtype, np.integer):
        return np.where(condition, a, b).view(Tile)
    return np.where(condition, a, b).astype(np.float32).view(Tile)


def _announced(block, text):
    """The functions that say how narrow a thread's next product is."""
    words = r"def (narrow_\w+)\(.*\n.*\n.*narrow_products 2: (\d+) of (\d+) steps, (\d+) of (\d+)"

    def says(numbers):
        return lambda: block.narrowed.__setitem__(threading.get_ident(), numbers)

    return {name: says([*map(int, found)]) for name, *found in re.findall(words, text)}


def _assembly(block, narrow, behind):
    """In place of the functions that are inline assembly.

    behind: the columns of a tile of dq before those that are added where a number says so.
    """

    def add(place, values):
        # One tile's address is a whole number of them. Of two warpgroups each adds half of it.
        size, half = values.size * block.groups, values.shape[1]
        assert place.offset % size == 0
        first = half * (block.partitions[threading.get_ident()] % block.groups)
        place.array[place.offset // size][:, first : first + half] += np.asarray(values)

    def add_narrow(place, values, first=0):
        # Of columns behind the first ones those that a tile has.
        whole = place.array[place.offset // place.array[0].size]
        first += place.offset % whole.size // len(whole)
        tile = whole[:, first : first + values.shape[1]]
        tile += np.asarray(values)[:, : tile.shape[1]]

    def add_if(place, values, number):
        if number > 0 and narrow:
            add_narrow(place, values, behind)
        elif number > 0:
            add(place, values)

    def await_semaphore(place, order):
        # Blocks run one after another, as they start.
        assert place.array[place.offset] == order
        return order

    def claim(place):
        found = place.array[place.offset]
        place.array[place.offset] = max(found, 1)
        assert found != 1
        return found

    def release_semaphore(place, order):
        place.array[place.offset] = order

    def give_keys(at):
        mine = LOADER if block.partitions[threading.get_ident()] else CONSUMERS
        block.barrier(at).arrive(mine, CONSUMERS + LOADER * (block.warps - 1))

    return {
        "add_of_warps": lambda place, sums, kept: kept and block.count(place, np.sum(sums)),
        "give_keys": give_keys,
        "take_keys": lambda at: block.barrier(at).sync(
            LOADER, CONSUMERS + LOADER * (block.warps - 1)
        ),
        "give": lambda at: block.barrier(at).arrive(CONSUMERS // block.groups),
        "give_if": lambda at, n: (
            block.barrier(at).arrive(CONSUMERS // block.groups) if n > 0 else None
        ),
        "signal": lambda at: block.barrier(at).arrive(CONSUMERS // 2, CONSUMERS),
        "await_signal": lambda at: block.barrier(at).sync(CONSUMERS // 2, CONSUMERS),
        "await_signal_if": lambda at, n: (
            block.barrier(at).sync(CONSUMERS // 2, CONSUMERS) if n > 0 else None
        ),
        "take": lambda at: block.barrier(at).sync(LOADER),
        "give_half": lambda at: [block.barrier(at + w).arrive(CONSUMERS) for w in (0, 1)],
        "take_half": lambda at: block.barrier(at).sync(LOADER),
        "release_half": lambda at: block.barrier(at).arrive(LOADER),
        "take_half_if": lambda at, n: (
            [block.barrier(at + w).sync(CONSUMERS) for w in (0, 1)] if n > 0 else None
        ),
        "begin_store": lambda: None,
        "give_kept": lambda at: block.barrier(at).arrive(CONSUMERS),
        "take_kept_if": lambda at, n: block.barrier(at).sync(LOADER) if n > 0 else None,
        "kept_where": lambda kept, p: _select(kept, p, 0.0),
        "fast_tanh": np.tanh,
        "broadcast_diagonals": broadcast_diagonals,
        "reduce_diagonals": reduce_diagonals,
        "read_where": lambda place, kept: _load(place, mask=kept),
        "add_where": lambda place, value, kept: block.count(place, value, mask=kept),
        "philox": _philox,
        "is_above": lambda word, bound: np.where(word > bound, 2**32 - 1, 0).view(Tile),
        "permuted": _permuted,
        "unsigned": lambda p: np.abs(p),
        "kept_half": lambda p: _maximum(p, 0.0),
        "await_semaphore": await_semaphore,
        "read_flag": lambda place: place.array[place.offset],
        "claim": claim,
        "release_semaphore": release_semaphore,
        "no_offset": lambda: 0,
        "block_of_thread": lambda: block.number,
        "await_first": lambda: None,
        "let_second": lambda: None,
        "shared_exp2": lambda x: np.exp2(x).view(Tile),
        "add_tile": add_narrow if narrow else add,
        "add_rest": partial(add_narrow, first=128),
        "add_tile_if": add_if,
    }
