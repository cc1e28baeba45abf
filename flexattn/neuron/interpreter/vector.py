"""nki.isa on the Vector Engine: arithmetic on tiles, reductions and selections."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from flexattn.neuron.interpreter import costs
from flexattn.neuron.interpreter.machine import NKI_DTYPES, current_machine
from flexattn.neuron.interpreter.operators import Operator
from flexattn.neuron.interpreter.rules import (
    binary,
    check,
    column,
    engine_of,
    instruction,
    issue,
    on_chip,
    operand,
    same,
)
from flexattn.neuron.interpreter.tensor import Tensor

FP32_MIN = float(torch.finfo(torch.float32).min)
SIMPLE = ("add", "multiply", "subtract")


@instruction
def tensor_tensor(dst: Tensor, data1: Tensor, data2: Tensor, op: Any, engine: Any = None) -> None:
    """dst = data1 op data2, element by element."""
    on_chip(dst, data1, data2)
    same(dst, data1, data2)
    found = binary(op)
    _not_both_psum(data1, data2)
    chosen = engine_of(engine, ("vector", "gpsimd"))
    _gpsimd_in_sbuf(chosen, dst, data1, data2)
    cycles = costs.two_inputs(dst, data1, data2, found.name in SIMPLE)
    if chosen == "gpsimd":
        cycles = costs.gpsimd(data1)
    machine = issue(chosen, cycles, (data1, data2), (dst,))
    if machine.numerics:
        dst.put(found(data1.rows(), data2.rows()))


@instruction
def tensor_scalar(
    dst: Tensor,
    data: Tensor,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Any = None,
) -> None:
    """dst = (data op0 operand0) op1 operand1; operands are numbers or columns."""
    on_chip(dst, data, operand0, operand1)
    same(dst, data)
    first = binary(op0)
    operand(operand0, data)
    second = None
    if op1 is not None:
        second = binary(op1)
        operand(operand1, data)
    chosen = engine_of(engine, ("vector", "scalar", "gpsimd"))
    _gpsimd_in_sbuf(chosen, dst, data)
    if chosen == "scalar":
        _scalar_can(first, second)
    cycles = costs.copied(current_machine().core, dst, data)
    if chosen == "gpsimd":
        cycles = costs.gpsimd(data)
    machine = issue(chosen, cycles, (data, operand0, operand1), (dst,))
    if machine.numerics:
        values = _applied(first, data.rows(), operand0, reverse0)
        if second is not None:
            values = _applied(second, values, operand1, reverse1)
        dst.put(values)


@instruction
def scalar_tensor_tensor(
    dst: Tensor,
    data: Tensor,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: Tensor,
    reverse0: bool = False,
    reverse1: bool = False,
) -> None:
    """dst = (data op0 operand0) op1 operand1, where operand1 is a tile."""
    on_chip(dst, data, operand0, operand1)
    same(dst, data, operand1)
    first, second = binary(op0), binary(op1)
    operand(operand0, data)
    _not_both_psum(data, operand1)
    machine = issue("vector", costs.one_input(data, 2.0), (data, operand0, operand1), (dst,))
    if machine.numerics:
        values = _applied(first, data.rows(), operand0, reverse0)
        tile = operand1.rows()
        dst.put(second(tile, values) if reverse1 else second(values, tile))


@instruction
def tensor_reduce(
    dst: Tensor,
    op: Any,
    data: Tensor,
    axis: int | tuple[int, ...],
    negate: bool = False,
    keepdims: bool = False,
) -> None:
    """dst = op over the last free axes of data, times -1 where negate is set."""
    on_chip(dst, data)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    last = tuple(range(data.ndim - len(axes), data.ndim))
    check(axes == last and 0 not in axes, f"axes {axes} of {data.shape}", "the last free axes")
    found = binary(op)
    check(found.reduces is not None, f"op={op!r}", "it is no reduction")
    kept = prod(data.shape[1 : data.ndim - len(axes)])
    fits = dst.shape[0] == data.shape[0] and dst.free == kept
    check(fits, f"{data.shape} into {dst.shape}", f"dst has {kept} elements a partition")
    half = dst.dtype == data.dtype == "bfloat16" and found.name in ("add", "maximum")
    cycles = costs.one_input(data, 0.5 if half else 1.0)
    machine = issue("vector", cycles, (data,), (dst,))
    if machine.numerics and found.reduces is not None:
        reduced = found.reduces(data.rows().reshape(data.shape[0] * kept, -1))
        dst.put((-reduced if negate else reduced).reshape(data.shape[0], kept))


@instruction
def reciprocal(dst: Tensor, data: Tensor) -> None:
    """dst = 1 / data."""
    on_chip(dst, data)
    same(dst, data)
    machine = issue("vector", costs.one_input(data, 8.0), (data,), (dst,))
    if machine.numerics:
        dst.put(data.rows().reciprocal())


@instruction
def tensor_copy_predicated(
    dst: Tensor, src: Any, predicate: Tensor, reverse_pred: bool = False
) -> None:
    """Overwrite dst by src, a tile or a number, where the predicate is not 0 (is, if reversed)."""
    on_chip(dst, src, predicate)
    same(dst, predicate)
    check(predicate.dtype == "uint8", f"a {predicate.dtype} predicate", "uint8 in this subset")
    factor = 2.0
    if isinstance(src, Tensor):
        same(dst, src)
        check(src.dtype == dst.dtype, f"{src.dtype} into {dst.dtype}", "the dtype stays")
        _not_both_psum(src, predicate)
        factor = 1.0 if src.buffer != predicate.buffer else 2.0
    cycles = costs.one_input(predicate, factor)
    machine = issue("vector", cycles, (src, predicate, dst), (dst,))
    if machine.numerics:
        chosen = (predicate.array() != 0).reshape(dst.shape) != reverse_pred
        kind = NKI_DTYPES[dst.dtype]
        new = src.array().reshape(dst.shape) if isinstance(src, Tensor) else column(src)
        dst.array().copy_(torch.where(chosen, new.to(kind), dst.array()))


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
) -> None:
    """Elements whose index compares with both bounds of their row, FP32_MIN elsewhere.

    reduce_res: the maximum of each row.
    """
    core = current_machine().core
    check(core.has_range_select, core.name, "it exists from NeuronCore-v3 on")
    on_chip(dst, on_true_tile, bound0, bound1, reduce_res)
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
    reads = (on_true_tile, bound0, bound1)
    machine = issue("vector", costs.one_input(on_true_tile), reads, (dst, reduce_res))
    if machine.numerics:
        values = on_true_tile.rows()
        places = torch.arange(range_start, last, dtype=torch.float32)[None]
        inside = (comp_op0(places, bound0.rows()) != 0) & (comp_op1(places, bound1.rows()) != 0)
        selected = torch.where(inside, values, FP32_MIN)
        dst.put(selected)
        if reduce_res is not None:
            reduce_res.put(selected.amax(1, keepdim=True))


def _applied(op: Operator, data: torch.Tensor, value: Any, reverse: bool) -> torch.Tensor:
    other = column(value)
    return op(other, data) if reverse else op(data, other)


def _not_both_psum(one: Tensor, other: Tensor) -> None:
    both = one.buffer == other.buffer == "psum"
    check(not both, "both inputs in PSUM", "one of them is in SBUF")


def _gpsimd_in_sbuf(engine: str, *tiles: Tensor) -> None:
    reaches = engine != "gpsimd" or all(tile.buffer != "psum" for tile in tiles)
    check(reaches, "GpSimd and PSUM", "GpSimd cannot reach PSUM")


def _scalar_can(first: Operator, second: Operator | None) -> None:
    pair = (first.name, None if second is None else second.name)
    allowed = (("multiply", "add"), ("multiply", None), ("add", None))
    check(pair in allowed, f"{pair} on Scalar", f"it does {allowed}")
