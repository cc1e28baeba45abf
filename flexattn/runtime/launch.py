"""Launch: everything of one call that its shapes decide, computed once; then tensors in, run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.device import Device
from flexattn.kernels.base.arguments import (
    captured_arguments,
    captured_values,
    dropout_arguments,
)
from flexattn.kernels.base.binding import strides
from flexattn.kernels.base.config import Geometry, walks_runs
from flexattn.kernels.base.family import PERMUTED_KEYS, TRANSPOSED_KEYS
from flexattn.kernels.base.features import skips_far
from flexattn.kernels.base.source import Source
from flexattn.kernels.choose.options import Options
from flexattn.kernels.choose.registry import family_of
from flexattn.mods import Bound
from flexattn.problem import Problem, Sparsity, Structure, out_dtype
from flexattn.problem.inputs import NO_DESCALES, Descales, Dropout
from flexattn.problem.mask_lists import known_runs, query_lists
from flexattn.problem.problem import longest_of_bucket
from flexattn.runtime.build import Before, InOrder, Launcher, Scratch, builder
from flexattn.runtime.candidates import Choice
from flexattn.runtime.decay_skip import begin_window, decay_window, pays
from flexattn.runtime.dispatch import Dispatcher
from flexattn.util.locks import Lru

# What a call passes to its launches, by the names that kernels have for it; memory that kernels
# share, the mask's lists and what the mods capture follow. None stands for what no kernel of this
# call takes.
_GIVEN = (
    "Q", "K", "V", "OUT", "LSE", "MAX", "COUNTER", "sm_scale", "SINKS", "Q_DESCALE", "K_DESCALE",
    "V_DESCALE",
)  # fmt: skip

# What a decode gives with each call: its cache may have grown by a token since the last one.
_KV_ARGUMENTS = (
    "kv_len", "stride_kb", "stride_kh", "stride_kn", "stride_vb", "stride_vh", "stride_vn",
)  # fmt: skip

# Launches by all that decides them: of calls, of their gradients, and of states that are merged.
launches: Lru[Any, Any] = Lru(8192)


def prepare_launch(
    problem: Problem,
    target: Device,
    device: torch.device,
    dispatcher: Dispatcher,
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Lists | None,
    descales: Descales = NO_DESCALES,
) -> ForwardLaunch:
    """Choose and build the kernel for a problem and compute what its shapes and strides decide."""
    index = device.index if device.type == "cuda" else -1
    begin_window(problem.structure, target, index)
    choice = dispatcher.choose(problem, target, index, options)
    kernel, merger = choice.kernels[0], choice.merger
    config, structure = choice.config, problem.structure
    family = family_of(config)
    grid = family.grid(problem, config, target)
    out_shape = (problem.B, problem.Hq, problem.q_len, structure.head_dim_v)
    out_strides = strides_like(q, out_shape)
    runs = walks_runs(structure, config)
    fixed: dict[str, Any] = {
        **input_strides(problem, q, k, v),
        **dict(zip(("stride_ob", "stride_oh", "stride_om"), out_strides, strict=False)),
        "Hq": problem.Hq, "group": problem.Hq // problem.Hkv,
        "q_len": problem.q_len, "kv_len": problem.kv_len, "num_tiles": grid.num_tiles,
        **family.bind(problem, config, grid),
    }  # fmt: skip
    if structure.fp8:
        fixed |= descales.strides()
        # A factor that is not given has address 0, which the kernel reads as 1.
        fixed |= {f"{x.upper()}_DESCALE": 0 for x in "qkv" if getattr(descales, x) is None}
    if lists is not None:
        fixed |= {**lists.strides("mask"), **widths(lists.read(runs))}
    rest = rest_names(structure, () if lists is None else lists.read(runs))
    names = {each.name: each for each in choice.source.arguments}
    each_call = _KV_ARGUMENTS if structure.kind == "decode" else ()
    kv_arguments = _kv_arguments_of(problem, fixed) if each_call else ()
    for name in each_call:
        del fixed[name]
    rows, before = problem.B * problem.Hq * problem.q_len, Before()
    shared: tuple[Scratch, ...] = ()
    behind = (*each_call, *rest)
    if merger is not None and grid.num_splits > 1:
        words = rows * grid.num_splits * (structure.head_dim_v + 2)
        shared, behind = (Scratch("WORKSPACE", (words,)),), ("WORKSPACE", *behind)
    values, laid_out = family.values_kernel(structure, target), tuple(v.shape)
    if values is not None:
        dtype = out_dtype(q.dtype)
        if structure.e4m3_weights:
            laid_out, dtype = transposed_shape(v), v.dtype
        shared, behind = (Scratch("V_KEYS", laid_out, dtype),), ("V_KEYS", *behind)
    given = (*_GIVEN, *behind)
    if skips_far(structure, config):
        # Where it would not pay it has address 0, and the same kernel visits all keys; its own
        # kernels are built for every length, so that a longer call compiles nothing.
        longer = (*_GIVEN, "DECAY_WINDOW", *behind)
        found = decay_window(problem, q, k, longer, target, index, fixed)
        if found is None or not pays(problem):
            fixed["DECAY_WINDOW"] = 0
        else:
            before, given = found, longer
    kernels, passed = list(before.kernels), given
    if values is not None:
        kernels.append(prepare_values(values, v, given, target, index))
        renamed = {"V": "V_ROWS", "V_KEYS": "V"}
        passed = tuple([renamed.get(name, name) for name in given])
    described: dict[str, Callable[[], DescriptorBox]] = {
        "Q": lambda: box_of(q),
        "K": lambda: box_of(k),
        "V": lambda: dense_box(laid_out) if structure.fp8 else box_of(v),
        "OUT": lambda: DescriptorBox(out_shape, out_strides),
    }
    boxes = {name: make() for name, make in described.items() if names[name].described}
    spare = (*_GIVEN, "V_ROWS")
    kernels.append(kernel.prepare(grid.programs, fixed, passed, boxes, spare=spare))
    if merger is not None and grid.num_splits > 1:
        # It takes some of what the other one takes.
        kernels.append(merger.prepare(rows, fixed, given, spare=(*fixed, *given)))
    return ForwardLaunch(
        tuple(kernels),
        choice,
        grid,
        device,
        index,
        (*before.scratch, *shared),
        runs,
        rest,
        out_dtype(q.dtype),
        out_shape,
        out_strides,
        "COUNTER" in names,
        kv_arguments,
    )


def _kv_arguments_of(problem: Problem, numbers: Mapping[str, int]) -> tuple[int, ...]:
    """Values of _KV_ARGUMENTS; numbers: strides among others, by name."""
    return (problem.kv_len, *[numbers[name] for name in _KV_ARGUMENTS[1:]])


def widths(read: Mapping[str, Tensor]) -> dict[str, int]:
    """Blocks between rows of a mask's lists, by kernels' names; read: what these are given."""
    named = read.items()
    return {name.replace("IDX", "WIDTH"): x.shape[-1] for name, x in named if "IDX" in name}


def rest_names(structure: Structure, read: Iterable[str]) -> tuple[str, ...]:
    """The names of those arguments; read: of the mask's lists."""
    found = captured_arguments(structure.score, structure.mask)
    return (*read, *(each.name for each in (*found, *dropout_arguments(structure))))


def prepare_values(
    source: Source, v: Tensor, given: tuple[str, ...], target: Device, index: int
) -> Launcher:
    """The kernel that makes "V_KEYS" out of "V", for tensors like v."""
    B, heads, _, width = transposed_shape(v)
    tiles = -(-width // TRANSPOSED_KEYS)
    fixed: dict[str, Any] = strides("stride_v", "bhn", v)
    fixed |= {"heads": heads, "kv_len": v.shape[2], "width": width, "num_tiles": tiles}
    kernel = builder().kernel(source, target, index)
    return kernel.prepare(B * heads * tiles, fixed, given, spare=(*given, "width"))


def transposed_shape(v: Tensor) -> tuple[int, ...]:
    """The shape [B, heads, head_dim, width] of V with its keys innermost, of 16 bytes at least."""
    B, heads, kv_len, head_dim = v.shape
    return B, heads, head_dim, kv_len + -kv_len % PERMUTED_KEYS


def input_strides(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """Strides of q, k and v: of the head dimension where it is not 1."""
    layout = problem.structure.layout
    return {
        **strides("stride_q", "bhm" if layout.q_contiguous else "bhmd", q),
        **key_strides(problem, k, v),
    }


def key_strides(problem: Problem, k: Tensor, v: Tensor) -> dict[str, int]:
    """The strides of k and v alone."""
    layout = problem.structure.layout
    return {
        **strides("stride_k", "bhn" if layout.k_contiguous else "bhnd", k),
        **strides("stride_v", "bhn" if layout.v_contiguous else "bhnd", v),
    }


@dataclass(frozen=True, slots=True)
class Launch(InOrder):
    """A chosen kernel and those around it, with what calls of the same shapes and strides share.

    gpu: the device's index, -1 where it is none. scratch: memory that kernels write for others of
    the launch. runs: they read a mask's runs, not its lists. rest: the names of the arguments that
    `rest_of` gives.
    """

    choice: Choice
    geometry: Geometry
    device: torch.device
    gpu: int
    scratch: tuple[Scratch, ...]
    runs: bool
    rest: tuple[str, ...]

    @property
    def problem(self) -> Problem:
        """The problem that the kernel was chosen for."""
        return self.choice.problem

    def rest_of(
        self,
        lists: ReadLists | None,
        score: Bound | None,
        mask: Bound | None,
        dropout: Dropout | None = None,
    ) -> tuple[Any, ...]:
        """The kernels' values for the mask's lists and for what the mods capture.

        The values are the same for as long as these tensors have the sizes and strides they have.
        """
        if not self.rest:
            return ()
        values: dict[str, Any] = {}
        if lists is not None:
            values |= lists.read(self.runs, "Q_ORDER" in self.rest)
        structure = self.problem.structure
        for captures, bound in ((structure.score, score), (structure.mask, mask)):
            values |= captured_values(captures, bound)
        if dropout is not None:
            values |= dropout.arguments()
        return tuple([values[name] for name in self.rest])


@dataclass(frozen=True, slots=True)
class ForwardLaunch(Launch):
    """The launch of a call.

    dtype, out_shape, out_strides: of the output. counts: its blocks take their tiles from a
    counter. kv_arguments: values of _KV_ARGUMENTS, of a decode.
    """

    dtype: torch.dtype
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    counts: bool = False
    kv_arguments: tuple[int, ...] = ()

    @property
    def merges(self) -> bool:
        """True if a second kernel merges what the splits of a decode leave."""
        return self.choice.combine is not None and self.geometry.num_splits > 1

    def with_kv_len(self, keys: int, k: Tensor, v: Tensor) -> ForwardLaunch | None:
        """The same launch over a cache of so many keys; None where that is another kernel or grid.

        k, v: laid out as before, except for the strides that the number of keys changes.
        """
        choice, before = self.choice, self.problem
        if not self.kv_arguments or longest_of_bucket(keys) != longest_of_bucket(before.kv_len):
            return None
        problem = replace(before, kv_len=keys)
        grid = family_of(choice.config).grid(problem, choice.config, choice.device)
        if grid != self.geometry:
            return None
        values = _kv_arguments_of(problem, key_strides(problem, k, v))
        return replace(self, choice=replace(choice, problem=problem), kv_arguments=values)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        rest: tuple[Any, ...],
        sinks: Tensor | None = None,
        descales: Descales = NO_DESCALES,
    ) -> Outputs:
        """Allocate the outputs and launch on the current stream; rest: what `rest_of` gave."""
        device, shape, gpu = self.device, self.out_shape, self.gpu
        structure = self.choice.problem.structure
        if gpu >= 0 and gpu != torch._C._cuda_getDevice():
            with torch.cuda.device(gpu):
                return self.run(q, k, v, scale, rest, sinks, descales)
        stream = raw_stream(gpu) if gpu >= 0 else -1
        out = torch.empty_strided(shape, self.out_strides, dtype=self.dtype, device=device)
        lse = maxima = zero = None
        if structure.lse:
            lse = torch.empty(shape[:3], dtype=torch.float32, device=device)
        if structure.max_scores:
            maxima = torch.empty(shape[:3], dtype=torch.float32, device=device)
        if self.counts:
            zero = counter(device, stream)
        # In the order of _GIVEN, then of the scratch, of _KV_ARGUMENTS where calls give them, and
        # of `rest`: tuples are added in less time than they are unpacked.
        given: tuple[Any, ...] = (q, k, v, out, lse, maxima, zero, scale, sinks) + descales  # noqa: RUF005
        if self.scratch:
            given += tuple([each.empty(gpu) for each in self.scratch])
        given += self.kv_arguments + rest
        for each in self.kernels:
            each.launch(stream, given)
        return Outputs(out, lse, maxima)


class Outputs(NamedTuple):
    """The outputs of a kernel: out [B, Hq, q_len, Dv]; lse, max_scores fp32 [B, Hq, q_len]."""

    out: Tensor
    lse: Tensor | None
    max_scores: Tensor | None


class Lists(NamedTuple):
    """A BlockMask's lists as a kernel reads them: int32, contiguous, [B, H, q blocks(, width)].

    runs: int32 [B, H, q blocks, 4], what a kernel reads instead where the lists are runs.
    """

    kv_num: Tensor
    kv_idx: Tensor
    full_num: Tensor | None
    full_idx: Tensor | None
    runs: Tensor | None = None

    @classmethod
    def of(cls, mask: BlockMask) -> Lists:
        """The lists of a BlockMask; views of them where they are as kernels read them."""
        return cls.made(query_lists(mask), known_runs(mask))

    @classmethod
    def made(cls, lists: Sequence[Tensor | None], runs: Tensor | None = None) -> Lists:
        """The same of counts and indices of partial blocks and, where given, of full ones."""
        num, idx, full_num, full_idx = [None if each is None else _list(each) for each in lists]
        assert num is not None and idx is not None
        return cls(num, idx, full_num, full_idx, runs)

    def read(self, runs: bool, ordered: bool = False) -> dict[str, Tensor]:
        """The tensors of the lists by a kernel's names for them, as in ReadLists.read; without
        order.
        """
        if runs:
            assert self.runs is not None, "a kernel of runs is chosen for a mask that has them"
            return {"RUNS": self.runs}
        found = {"KV_NUM": self.kv_num, "KV_IDX": self.kv_idx}
        if self.full_num is not None and self.full_idx is not None:
            found |= {"FULL_NUM": self.full_num, "FULL_IDX": self.full_idx}
        return found

    def strides(self, mask: str) -> dict[str, int]:
        """Rows between batches and heads, 0 where the lists broadcast; mask: in their names."""
        B, H, blocks = self.kv_num.shape
        b, h = f"stride_{mask}_b", f"stride_{mask}_h"
        return {b: 0 if B == 1 else H * blocks, h: 0 if H == 1 else blocks}

    def to(self, where: torch.device) -> Lists:
        """The lists on a device."""
        return Lists(*(None if x is None else x.to(where) for x in self))  # type: ignore[arg-type]

    def sparsity(self, block_size: tuple[int, int], group: int) -> Sparsity:
        """The facts of the lists for a kernel's code; `group` query heads share a KV head."""
        per_head = group > 1 and self.kv_num.shape[1] > 1
        q_block, kv_block = map(int, block_size)  # as a kernel prints them, of whatever class
        return Sparsity(
            q_block, kv_block, self.full_idx is not None, per_head, self.runs is not None
        )


class ReadLists(Protocol):
    """A mask's lists, by query or in both directions."""

    def read(self, runs: bool, ordered: bool = False) -> dict[str, Tensor]:
        """The tensors that kernels take, by their names for them.

        ordered: of lists by key, the order in which blocks add up dQ is one of them.
        """


def _list(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.int32:
        tensor = tensor.to(torch.int32)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def raw_stream(index: int) -> int:
    """The handle of a GPU's current stream."""
    return int(torch._C._cuda_getCurrentRawStream(index))


# A zero of its own would cost a call an allocation and a launch: 5 us of the host, and on the GPU
# a kernel before the kernel.
_MADE = 512


class _Left(threading.local):
    """Zeroes that no launch of this thread has had yet, by their GPU."""

    def __init__(self) -> None:
        self.on: dict[torch.device, list[Tensor]] = {}


_left = _Left()


def counter(device: torch.device, stream: int) -> Tensor:
    """An int32 zero [1] for one launch on a stream, -1 for none; what is captured makes its own.

    Memory goes back in the order of the stream that made it, so a kernel may still count in a zero
    that nobody holds. A graph that is replayed needs a zero each time: it makes it. So does any
    stream but the default one: whoever is about to capture allocates there from a graph's memory,
    which is not ours to keep.
    """
    if stream or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    left = _left.on.get(device)
    if not left:
        made = torch.zeros(_MADE, dtype=torch.int32, device=device)
        # A tensor that a transform made has no memory, and is gone when the transform is.
        if type(made) is not Tensor or not made.data_ptr():
            return made[:1]
        left = _left.on[device] = list(made.split(1))
    return left.pop()


class DescriptorBox(NamedTuple):
    """The fields of a tensor descriptor of q, k or v beside the address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


def strides_like(q: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dense strides for the output in the order of q's dimensions, the last one innermost.

    shape: of four dimensions; they are torch's strides for the output of flex_attention.
    """
    return _known_strides(q.stride(), shape)


def dense_strides(like: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same from q's strides; sizes may be symbols of a graph, which nothing can look up."""
    order = sorted(range(3), key=lambda dim: (like[dim], -dim), reverse=True)
    strides, step = [0, 0, 0, 1], shape[3]
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


_known_strides = lru_cache(maxsize=4096)(dense_strides)


def dense_box(shape: tuple[int, ...]) -> DescriptorBox:
    """The box of contiguous memory: scratch, and fp8's V in bfloat16 or with keys innermost."""
    _, heads, rows, width = shape
    return DescriptorBox(tuple(shape), (heads * rows * width, rows * width, width, 1))


def box_of(tensor: Tensor) -> DescriptorBox:
    """A descriptor's strides are above 0 and whole 16 bytes, also where they are never stepped."""
    span = max(size * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span += -span % (16 // tensor.element_size())
    b, h, n, _ = strides("", "bhnd", tensor).values()
    return DescriptorBox(tuple(tensor.shape), (b or span, h or span, n or span, 1))
