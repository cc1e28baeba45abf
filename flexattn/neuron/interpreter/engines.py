"""The instructions of nki.isa: each checks its operands, and gives its value."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor as Array

from flexattn.device.neuroncore import PARTITIONS, STATIONARY_MAX
from flexattn.neuron.interpreter.machine import (
    NKI_DTYPES,
    Computed,
    Operator,
    Tensor,
    binary,
    check,
    column,
    current_machine,
    engine_of,
    instruction,
    lies_in,
    operand,
    same,
)

_FLOATS = ("float32", "bfloat16", "float16")
Pattern = Sequence[Sequence[int]]


@instruction
def nc_matmul(
    dst: Tensor,
    stationary: Tensor,
    moving: Tensor,
    accumulate: bool | None = None,
) -> Computed:
    """dst (+)= stationary^T moving: [K, M] and [K, N] give [M, N], summed in float32.

    This subset wants accumulate spelled out, and accumulates only onto the very region that a
    matmul with accumulate=False began.
    """
    lies_in("sbuf", stationary, moving)
    lies_in("psum", dst)
    check(isinstance(accumulate, bool), f"accumulate={accumulate!r}", "it is True or False")
    core = current_machine().core
    k, m, n = stationary.shape[0], stationary.free, moving.free
    check(k == moving.shape[0], f"{k} against {moving.shape[0]} rows", "both contract over K")
    check(m <= STATIONARY_MAX, f"{m} stationary columns", f"there are {STATIONARY_MAX}")
    limit = core.moving_max
    check(n <= limit, f"{n} moving columns", f"{core.name} takes {limit}")
    fits = dst.shape[0] == m and dst.free == n
    check(fits, f"dst {dst.shape} for [{m}, {n}]", "dst is stationary's columns by moving's")
    kinds = ("float32", "bfloat16") if core.has_bf16_psum else ("float32",)
    check(dst.dtype in kinds, f"dst of {dst.dtype}", f"{core.name} writes {kinds}")
    for each in (stationary, moving):
        check(each.dtype in _FLOATS, f"a {each.dtype} operand", f"operands are of {_FLOATS}")
    mixed = (stationary.dtype == "float32") != (moving.dtype == "float32")
    check(not mixed, f"{stationary.dtype} by {moving.dtype}", "float32 goes with float32")
    _one_run(dst)
    if not core.has_bf16_psum:
        check(len(dst.banks()) == 1, "dst in two PSUM banks", "a matmul writes one bank")
    region = (dst.offset, (m, n))
    if accumulate:
        check(
            region in dst.storage.started,
            "accumulate=True where no matmul began",
            "the first matmul of a region has accumulate=False",
        )
    if not accumulate:
        dst.storage.started = [each for each in dst.storage.started if each[0] != dst.offset]
        dst.storage.started.append(region)

    def value() -> Array:
        product = stationary.rows().T @ moving.rows()
        return dst.rows() + product if accumulate else product

    return value


@instruction
def nc_transpose(dst: Tensor, data: Tensor, engine: Any = None) -> Computed:
    """dst = data^T, its free axes flattened, to PSUM by the Tensor Engine."""
    engine_of(engine, "tensor")
    shape, most = (data.shape[0], data.free), PARTITIONS
    check(max(shape) <= most, f"{shape}", f"at most {most} x {most}")
    fits = dst.shape[0] == data.free and dst.free == data.shape[0]
    check(fits, f"{shape} into {dst.shape}", "dst is data turned over")
    check(dst.dtype == data.dtype, f"{data.dtype} into {dst.dtype}", "the dtype stays")
    lies_in("sbuf", data)
    lies_in("psum", dst)
    check(len(dst.banks()) == 1, "dst in two PSUM banks", "a matmul writes one bank")
    core = current_machine().core

    def value() -> Array:
        turned = data.data.reshape(data.shape[0], -1).T
        if core.has_exact_transpose:
            return turned
        # v2 multiplies by an identity: NaN and infinities spread over the whole column.
        finite = turned.to(torch.float32).isfinite().all(1, keepdim=True)
        return torch.where(finite, turned, torch.nan)

    return value


def _one_run(dst: Tensor) -> None:
    run = 1
    for size, stride in reversed(list(zip(dst.shape[1:], dst.data.stride()[1:], strict=True))):
        check(size == 1 or stride == run, "a dst with gaps", "results lie side by side")
        run *= size


@instruction
def activation(
    dst: Tensor,
    op: Any,
    data: Tensor,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Tensor | None = None,
    reduce_cmd: Any = None,
) -> Computed:
    """dst = op(data * scale + bias), and the sum of each row in reduce_res."""
    same(dst, data)
    known = isinstance(op, Operator) and op.unary
    check(known, f"op={op!r}", "it is an activation function")
    operand(scale, data)
    if bias is not None:
        check(isinstance(bias, Tensor), f"bias={bias!r}", "it is a column in this subset")
        operand(bias, data)
    if reduce_res is not None:
        operand(reduce_res, data)
        check(getattr(reduce_op, "name", "") == "add", f"reduce_op={reduce_op!r}", "it adds")
        got = getattr(reduce_cmd, "name", None)
        check(got == "reset_reduce", f"reduce_cmd {got}", "reset_reduce in this subset")

    def value() -> Array:
        scaled = data.rows() * column(scale)
        values: Array = op(scaled if bias is None else scaled + column(bias))
        if reduce_res is not None:
            reduce_res.put(values.sum(1, keepdim=True))
        return values

    return value


@instruction
def iota(
    dst: Tensor,
    pattern: Pattern,
    offset: int = 0,
    channel_multiplier: int = 0,
) -> Computed:
    """dst = offset + partition * channel_multiplier + the sum of step * index."""
    lies_in("sbuf", dst)
    _check_pattern(pattern, dst)
    places = channel_multiplier, dst.shape[0]
    return lambda: _affine(pattern, offset, *places).to(torch.float64)


@instruction
def affine_select(
    dst: Tensor,
    pattern: Pattern,
    channel_multiplier: int,
    on_true_tile: Tensor,
    on_false_value: float,
    cmp_op: Any = None,
    offset: int = 0,
) -> Computed:
    """Elements where an affine function of their place compares with 0, a number elsewhere."""
    lies_in("sbuf", dst, on_true_tile)
    same(dst, on_true_tile)
    _check_pattern(pattern, dst)
    found = binary(cmp_op)

    def value() -> Array:
        places = _affine(pattern, offset, channel_multiplier, dst.shape[0])
        chosen = found(places, torch.zeros((), dtype=torch.int64)) != 0
        return torch.where(chosen, on_true_tile.rows(), column(on_false_value))

    return value


def _check_pattern(pattern: Pattern, dst: Tensor) -> None:
    check(1 <= len(pattern) <= 4, f"a pattern of {len(pattern)}", "it has 1 to 4 dimensions")
    count = prod(size for _, size in pattern)
    got = f"a pattern of {count} elements for {dst.shape}"
    check(count == dst.free, got, "it has one for each element of a partition")


def _affine(pattern: Pattern, offset: int, multiplier: int, partitions: int) -> torch.Tensor:
    value = offset + torch.arange(partitions)[:, None] * multiplier
    for step, count in pattern:
        value = (value[:, :, None] + torch.arange(count) * step).flatten(1)
    return value


@instruction
def dma_copy(dst: Tensor, src: Tensor) -> Computed:
    """dst = src between HBM and SBUF, converted where dtypes differ."""
    _reachable(dst, src)
    check(dst.size == src.size, f"{src.shape} into {dst.shape}", "as many elements")
    return lambda: src.data if src.dtype == dst.dtype else src.rows()


@instruction
def tensor_copy(dst: Tensor, src: Tensor, engine: Any = None) -> Computed:
    """dst = src on chip, converted through float32 where dtypes differ."""
    same(dst, src)
    engine_of(engine, "vector")
    return lambda: src.data if dst.dtype == src.dtype else src.rows()


@instruction
def memset(dst: Tensor, value: float) -> Computed:
    """Fill dst with a number; integer tiles take integers."""
    integer = "int" in dst.dtype
    got = f"{value!r} into {dst.dtype}"
    check(not integer or isinstance(value, int), got, "an integer tile takes an integer")
    return lambda: column(value).expand(dst.shape)


def _reachable(*tensors: Tensor) -> None:
    for each in tensors:
        check(each.buffer != "psum", "an operand in PSUM", "since 0.3 DMA cannot reach PSUM")


FP32_MIN = float(torch.finfo(torch.float32).min)


@instruction
def tensor_tensor(dst: Tensor, data1: Tensor, data2: Tensor, op: Any) -> Computed:
    """dst = data1 op data2, element by element."""
    same(dst, data1, data2)
    found = binary(op)
    _not_both_psum(data1, data2)
    return lambda: found(data1.rows(), data2.rows())


@instruction
def tensor_scalar(
    dst: Tensor,
    data: Tensor,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
) -> Computed:
    """dst = (data op0 operand0) op1 operand1; operands are numbers or columns."""
    same(dst, data)
    first = binary(op0)
    operand(operand0, data)
    second = None
    if op1 is not None:
        second = binary(op1)
        operand(operand1, data)

    def value() -> Array:
        pair = data.rows(), column(operand0)
        values = first(*pair[::-1]) if reverse0 else first(*pair)
        return values if second is None else second(values, column(operand1))

    return value


@instruction
def scalar_tensor_tensor(
    dst: Tensor,
    data: Tensor,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: Tensor,
) -> Computed:
    """dst = (data op0 operand0) op1 operand1, where operand1 is a tile."""
    same(dst, data, operand1)
    first, second = binary(op0), binary(op1)
    operand(operand0, data)
    _not_both_psum(data, operand1)
    return lambda: second(first(data.rows(), column(operand0)), operand1.rows())


@instruction
def tensor_reduce(dst: Tensor, op: Any, data: Tensor, axis: int) -> Computed:
    """dst = the maximum over the last free axis of data."""
    check(axis == data.ndim - 1 > 0, f"axis {axis} of {data.shape}", "it is the last free one")
    found = binary(op)
    check(found.name == "maximum", f"op={op!r}", "it is no reduction of this subset")
    kept = prod(data.shape[1:-1])
    fits = dst.shape[0] == data.shape[0] and dst.free == kept
    check(fits, f"{data.shape} into {dst.shape}", f"dst has {kept} elements a partition")
    return lambda: data.rows().reshape(data.shape[0], kept, -1).amax(2)


@instruction
def reciprocal(dst: Tensor, data: Tensor) -> Computed:
    """dst = 1 / data."""
    same(dst, data)
    return lambda: data.rows().reciprocal()


@instruction
def tensor_copy_predicated(
    dst: Tensor, src: Any, predicate: Tensor, reverse_pred: bool = False
) -> Computed:
    """Overwrite dst by src, a tile or a number, where the predicate is not 0 (is, if reversed)."""
    same(dst, predicate)
    check(predicate.dtype == "uint8", f"a {predicate.dtype} predicate", "uint8 in this subset")
    if isinstance(src, Tensor):
        same(dst, src)
        check(src.dtype == dst.dtype, f"{src.dtype} into {dst.dtype}", "the dtype stays")
        _not_both_psum(src, predicate)

    def value() -> Array:
        chosen = (predicate.data != 0).reshape(dst.shape) != reverse_pred
        kind = NKI_DTYPES[dst.dtype]
        new = src.data.reshape(dst.shape) if isinstance(src, Tensor) else column(src)
        return torch.where(chosen, new.to(kind), dst.data)

    return value


@instruction
def range_select(
    dst: Tensor,
    on_true_tile: Tensor,
    comp_op0: Any,
    comp_op1: Any,
    bound0: Tensor,
    bound1: Tensor,
    reduce_cmd: Any = None,
    reduce_res: Tensor | None = None,
    reduce_op: Any = None,
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
) -> Computed:
    """Elements whose index compares with both bounds of their row, FP32_MIN elsewhere.

    reduce_res: the maximum of each row.
    """
    core = current_machine().core
    check(core.has_range_select, core.name, "it exists from NeuronCore-v3 on")
    same(dst, on_true_tile)
    compared = ("equal", "less", "less_equal", "greater", "greater_equal")
    for op in (comp_op0, comp_op1):
        check(binary(op).name in compared, f"{op!r}", f"it compares by {compared}")
    for bound in (bound0, bound1):
        check(isinstance(bound, Tensor), f"the bound {bound!r}", "bounds are columns")
        operand(bound, on_true_tile)
    fill = torch.tensor(on_false_value, dtype=torch.float32).item()
    check(fill == FP32_MIN, f"on_false_value={on_false_value}", "it is FP32_MIN")
    last = range_start + on_true_tile.free
    check(last < 2**24, f"indices up to {last}", "they are compared in float32: below 2^24")
    if reduce_res is not None:
        got = getattr(reduce_cmd, "name", None)
        check(got == "reset_reduce", f"reduce_cmd {got}", "reset_reduce in this subset")
        check(getattr(reduce_op, "name", "") == "maximum", f"{reduce_op!r}", "it is maximum")
        operand(reduce_res, on_true_tile)

    def value() -> Array:
        places = torch.arange(range_start, last, dtype=torch.float32)[None]
        inside = (comp_op0(places, bound0.rows()) != 0) & (comp_op1(places, bound1.rows()) != 0)
        selected = torch.where(inside, on_true_tile.rows(), FP32_MIN)
        if reduce_res is not None:
            reduce_res.put(selected.amax(1, keepdim=True))
        return selected

    return value


def _not_both_psum(one: Tensor, other: Tensor) -> None:
    both = one.buffer == other.buffer == "psum"
    check(not both, "both inputs in PSUM", "one of them is in SBUF")
