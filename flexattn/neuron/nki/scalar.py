"""nki.isa on the Scalar and GpSimd Engines: activation, iota and affine_select."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from flexattn.neuron.nki import costs
from flexattn.neuron.nki.machine import current_machine
from flexattn.neuron.nki.operators import Operator
from flexattn.neuron.nki.rules import binary, check, column, issue, on_chip, operand, same
from flexattn.neuron.nki.tensor import Tensor

__all__ = ["activation", "affine_select", "iota"]

Pattern = Sequence[Sequence[int]]


def activation(
    dst: Tensor,
    op: Any,
    data: Tensor,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Tensor | None = None,
    reduce_cmd: Any = None,
) -> None:
    """dst = op(data * scale + bias), and the sum of each row in reduce_res."""
    on_chip(dst, data, bias, scale, reduce_res)
    same(dst, data)
    known = isinstance(op, Operator) and op.unary
    check(known, f"op={op!r}", "it is an activation function")
    operand(scale, data)
    core = current_machine().core
    if bias is not None:
        operand(bias, data)
        numeric = not isinstance(bias, Tensor) and bias != 0
        check(
            not numeric or core.has_constant_bias,
            f"bias={bias} on {core.name}",
            "a number as bias needs NeuronCore-v3",
        )
    if reduce_res is not None:
        operand(reduce_res, data)
        check(getattr(reduce_op, "name", "") == "add", f"reduce_op={reduce_op!r}", "it adds")
        got = getattr(reduce_cmd, "name", None)
        check(got == "reset_reduce", f"reduce_cmd {got}", "reset_reduce in this subset")
    cycles = costs.scalar(data, reduce_res is not None)
    machine = issue("scalar", cycles, (data, bias, scale), (dst, reduce_res))
    if machine.numerics:
        values = data.rows() * column(scale)
        if bias is not None:
            values = values + column(bias)
        values = op(values)
        dst.put(values)
        if reduce_res is not None:
            reduce_res.put(values.sum(1, keepdim=True))


def iota(
    dst: Tensor,
    pattern: Pattern,
    offset: int = 0,
    channel_multiplier: int = 0,
) -> None:
    """dst = offset + partition * channel_multiplier + the sum of step * index."""
    on_chip(dst, only="sbuf")
    _check_pattern(pattern, dst)
    machine = issue("gpsimd", costs.gpsimd(dst), (), (dst,))
    if machine.numerics:
        dst.put(_affine(pattern, offset, channel_multiplier, dst.shape[0]).to(torch.float64))


def affine_select(
    dst: Tensor,
    pattern: Pattern,
    channel_multiplier: int,
    on_true_tile: Tensor,
    on_false_value: float,
    cmp_op: Any = None,
    offset: int = 0,
) -> None:
    """Elements where an affine function of their place compares with 0, a number elsewhere."""
    on_chip(dst, on_true_tile, only="sbuf")
    same(dst, on_true_tile)
    _check_pattern(pattern, dst)
    found = binary(cmp_op)
    machine = issue("gpsimd", costs.gpsimd(on_true_tile), (on_true_tile,), (dst,))
    if machine.numerics:
        places = _affine(pattern, offset, channel_multiplier, dst.shape[0])
        chosen = found(places, torch.zeros((), dtype=torch.int64)) != 0
        dst.put(torch.where(chosen, on_true_tile.rows(), column(on_false_value)))


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
