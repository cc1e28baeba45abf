"""Runs a rendered Hopper prefill in plain Python, as tests/emulated_gluon.py does the backward.

Each block is three threads: two consumer warpgroups, each with products of its own under way, and
the loading warp. Configs have merge_consumers=False: the pass that merges them works on PTX.
"""

import random
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from flexattn import create_block_mask
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.choose.options import NONE, Options
from flexattn.mods import bind
from flexattn.problem.mask_lists import mask_class
from flexattn.runtime.launch import Lists, prepare_launch
from tests.emulated_gluon import CONSUMERS, LOADER, _language, _maximum, _minimum
from tests.emulated_memory import Descriptor, Number, Pointer, Shared, Tile, tile
from tests.emulated_mla import Decoding, _store
from tests.emulated_softmax import assembled, at_once
from tests.launches import Recorded
from tests.problems import choices

EACH = CONSUMERS // 2
# A descriptor's type, which may say how a tile lies in shared memory.
DESCRIBED = re.compile(r"tensordesc<(?P<element>\w+)\[(?P<shape>[\d, ]+)\]")
_WAITS = re.compile(r"def (wait_but_(\d+))\(")


class Emulated(Recorded):
    """A kernel that is launched on tensors of float32 in the memory of the CPU."""

    def launch(self, stream, given):
        super().launch(stream, given)
        told = self.launched[-1]
        out, told["OUT"] = told["OUT"], told["OUT"].float()
        run(self.source, self.programs, dict(self._arguments()))
        out.copy_(told["OUT"])

    def _arguments(self):
        for argument in self.source.arguments:
            value, described = self.launched[-1][argument.name], DESCRIBED.match(argument.type)
            if described:
                block = tuple(map(int, described["shape"].split(",")))
                itemsize = 1 if "8" in described["element"] else 2
                array = value.view(self.boxes[argument.name].shape).numpy()
                yield argument.name, Descriptor(array, block, itemsize)
            elif isinstance(value, torch.Tensor):
                yield argument.name, Pointer(value.view(-1).numpy())
            else:
                yield argument.name, Number(value) if type(value) is int else value


def listed(mask_mod, q, k, block=128):
    """The BlockMask of a mask_mod and its lists, with runs where it has them; None of None."""
    if mask_mod is None:
        return None, None
    mask = create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], "cpu", block)
    mask_class(mask)
    return mask, Lists.of(mask)


def attend(wanted, device, fields, lists, q, k, v, scale, score=None, mask=None, sinks=None):
    """(out, lse, max_scores) of these tensors, by a kernel for a problem of their sizes.

    fields: of its config, where it is not the static default. score, mask: the mods.
    """
    wanted = replace(
        wanted, B=q.shape[0], Hq=q.shape[1], Hkv=k.shape[1], q_len=q.shape[2], kv_len=k.shape[2]
    )
    config = replace(default(wanted, device, "gluon"), merge_consumers=False, **fields)
    choice = next(choices(wanted, device, Options(exact=config)))
    choice = replace(choice, kernels=(Emulated(choice.source),))
    kernels = SimpleNamespace(choose=lambda *_: choice)
    launch = prepare_launch(wanted, device, q.device, kernels, NONE, q, k, v, lists)
    rest = launch.rest_of(lists, bind(score, "score"), bind(mask, "mask"))
    return launch.run(q, k, v, scale, rest, sinks)


class Boxes(Shared):
    """Boxes of a tile's columns [boxes, rows, columns], read when they are multiplied."""

    @property
    def array(self):
        return np.concatenate(list(self.boxes), 1)

    @array.setter
    def array(self, boxes):
        self.boxes = boxes

    def reshape(self, shape):
        return self


class Stages(Shared):
    """Stages of tiles in boxes [stages, boxes, rows, columns]."""

    def index(self, i):
        return Boxes(self.array[int(i)])


def run(source, programs, arguments, seed=0):
    """Run a kernel. arguments: arrays behind Pointers and Descriptors, and numbers, by name."""
    body = source.text[source.text.index("\nBLOCK_M = ") :]
    code = compile(body, "kernel", "exec")
    chance = random.Random(seed)
    with np.errstate(all="ignore"):
        for number in chance.sample(range(programs), programs):
            block = Decoding(number, random.Random(chance.random()))
            names = _prefill(block, programs)
            exec(code, names)
            names.update(_assembly(block, body, int(names["CONSUMERS"])))
            if "MAX_OFFSET" in names:
                lazy = "ONLINE_SOFTMAX" in names
                names.update(assembled(names) if lazy else at_once(names["BLOCK_N"]))
            if "along_diagonals" in names:
                names["along_diagonals"] = partial(_along, names["ROWS"], names["BLOCK_N"])
            names[source.entry](*(arguments[each.name] for each in source.arguments))


def _along(rows, keys, words, strip):
    """What a strip has for each score of a tile: its diagonals begin with the last key's."""
    return tile(strip[np.arange(rows)[:, None] + keys - 1 - np.arange(keys)])


def _prefill(block, programs):
    names = _language(block)
    gl, allocate = names["gl"], names["gl"].allocate_shared_memory

    def allocated(dtype, shape, layout):
        words = dtype == "int32"
        return Shared(np.full(shape, 10**6, np.int64)) if words else allocate(dtype, shape, layout)

    vars(gl).update(
        constexpr=lambda x: _CONSTANTS.get(type(x), lambda x: x)(x),
        allocate_shared_memory=allocated, atomic_add=_count, load=_load, store=_store,
        max=np.max, sum=np.sum, log2=np.log2, reduce=lambda x, axis, _: np.take(x, 0, axis),
        cdiv=lambda a, b: Number(-(-a // b)), program_id=lambda axis: Number(block.number),
        num_programs=lambda axis: programs, reshape=np.reshape, permute=np.transpose,
        fma=lambda a, b, c: a * b + c, split=lambda x: (x[..., 0], x[..., 1]),
        full=lambda shape, x, dtype, layout: tile(np.full(shape, x)),
        minimum=lambda a, b: _number(_minimum(a, b)), maximum=lambda a, b: _number(_maximum(a, b)),
        cast=lambda x, dtype: x,
    )  # fmt: skip
    names["reinterpret"] = _reinterpret
    names["mbarrier"].arrive = lambda barrier, count: barrier.expect(0)
    return names


def _count(place, more):
    found = place.array[place.offset]
    place.array[place.offset] += more
    return Number(found)


def _number(x):
    return Number(x) if isinstance(x, int) else x


def _reinterpret(place, dtype, shape, layout):
    width = place.array.shape[-1]
    if shape[-1] == width or place.array.dtype != np.float32:
        return place.reinterpret(shape)
    stages, rows, columns = shape[0], shape[-2], shape[-1]
    return Stages(place.array.reshape(stages, columns // width, rows, width))


_VALUE = {"value": property(lambda self: self)}
_CONSTANTS = {kind: type("Constant", (kind,), _VALUE) for kind in (int, str)}


def _load(place, mask=True, other=0):
    if mask is False:  # of an address that may be 0
        return Number(other)
    at, kept = np.asarray(place.offset), np.asarray(mask)
    found = np.where(kept, place.array[np.where(kept, at, 0)], other)
    if found.ndim:
        return found.view(Tile)
    return Number(found) if found.dtype.kind == "i" else found.view(Tile)


def _scalar(place):
    found = place.array[0]
    return found if place.array.dtype.kind == "f" else Number(found)


def _online_softmax(qk, m_i, l_i):
    m_new = np.maximum(m_i, qk.max(1, keepdims=True))
    m_safe = np.where(np.isneginf(m_new), 0.0, m_new)
    p, alpha = np.exp2(qk - m_safe), np.exp2(m_i - m_safe).view(Tile)
    return p, m_new, l_i * alpha + p.sum(1, keepdims=True), alpha


def _early(qk, scale, m_i):
    """Exponents, and the first weights, which nobody reads."""
    return qk * scale, None


def _assembly(block, body, consumers):
    """In place of the functions that are inline assembly, or tell of who has which score."""
    meet = EACH * consumers + LOADER
    turns = [block.barrier(f"turn {i}") for i in range(consumers)]

    def give_turn(consumer, number=1):
        if number > 0:
            turns[(consumer + 1) % consumers].arrive(EACH, 2 * EACH)

    def take_turn(consumer, number=1):
        if number > 0:
            turns[consumer].sync(EACH, 2 * EACH)

    waits = {
        name: lambda groups=int(groups): block.await_products(groups)
        for name, groups in _WAITS.findall(body)
    }
    lazy = {
        "exponents": lambda qk, scale, m_i: qk * scale,
        "online_softmax": _online_softmax,
        "operand": lambda p: p,
        "rescale": lambda acc, alpha: acc * alpha,
        "by_thread": lambda x: x,
        "thread_value": lambda x: x[:, :1],
    }
    early = {
        "exponents": _early,
        "early_weights": lambda qk: None,
        "online_softmax": lambda qk, early_exp2, m_i, l_i: _online_softmax(qk, m_i, l_i),
    }
    return {
        **waits,
        **(lazy if "def exponents(" in body else {}),
        **(early if "def early_weights(" in body else {}),
        "consumer_release": lambda at: block.barrier(at).arrive(EACH, meet),
        "consumer_release_if": lambda at, number: (
            block.barrier(at).arrive(EACH, meet) if number > 0 else None
        ),
        "producer_acquire": lambda at: block.barrier(at).sync(LOADER, meet),
        "warp_scheduler_sync": take_turn,
        "warp_scheduler_sync_if": take_turn,
        "warp_scheduler_arrive": give_turn,
        "warp_scheduler_arrive_if": give_turn,
        "multiply_columns_of_v": lambda: None,
        "no_offset": lambda: 0,
        "keep_branch": lambda x: x,
        "wait_for_row_tiles": lambda: None,
        "launch_dependents": lambda: None,
        "narrow_release": lambda at: block.barrier(at).arrive(LOADER, 2 * LOADER),
        "narrow_acquire": lambda at: block.barrier(at).sync(LOADER, 2 * LOADER),
        "load_word": lambda place: int(place.array[0]),
        "load_scalar": _scalar,
        "exchange_values": lambda words, value: value,
        "take_number": lambda counter: _count(counter, 1),
        "number_taken": lambda number: number,
        "fast_tanh": np.tanh,
    }
