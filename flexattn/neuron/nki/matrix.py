"""nki.isa on the Tensor Engine: nc_matmul and nc_transpose."""

from __future__ import annotations

from typing import Any

import torch

from flexattn.device.neuroncore import PARTITIONS, STATIONARY_MAX
from flexattn.neuron.nki import costs
from flexattn.neuron.nki.machine import Machine, current_machine
from flexattn.neuron.nki.rules import check, engine_of, issue, on_chip
from flexattn.neuron.nki.tensor import Tensor

__all__ = ["nc_matmul", "nc_transpose"]

_FLOATS = ("float32", "bfloat16", "float16")


def nc_matmul(
    dst: Tensor,
    stationary: Tensor,
    moving: Tensor,
    accumulate: bool | None = None,
) -> None:
    """dst (+)= stationary^T moving: [K, M] and [K, N] give [M, N], summed in float32.

    This subset wants accumulate spelled out, and accumulates only onto the very region that a
    matmul with accumulate=False began.
    """
    on_chip(stationary, moving, only="sbuf")
    on_chip(dst, only="psum")
    check(isinstance(accumulate, bool), f"accumulate={accumulate!r}", "it is True or False")
    machine = current_machine()
    core = machine.core
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
    issue("tensor", costs.matmul(stationary, moving), (stationary, moving), (dst,))
    machine.count("matmul cycles", int(costs.matmul(stationary, moving)))
    if not accumulate:
        dst.storage.started = [each for each in dst.storage.started if each[0] != dst.offset]
        dst.storage.started.append(region)
    if machine.numerics:
        product = stationary.rows().T @ moving.rows()
        dst.put(dst.rows() + product if accumulate else product)


def nc_transpose(dst: Tensor, data: Tensor, engine: Any = None) -> None:
    """dst = data^T, its free axes flattened: to PSUM by the Tensor Engine, 32 x 32 by Vector's."""
    chosen = engine_of(engine, ("tensor", "vector"))
    most = PARTITIONS if chosen == "tensor" else 32
    shape = (data.shape[0], data.free)
    check(max(shape) <= most, f"{shape} on {chosen}", f"at most {most} x {most}")
    fits = dst.shape[0] == data.free and dst.free == data.shape[0]
    check(fits, f"{shape} into {dst.shape}", "dst is data turned over")
    check(dst.dtype == data.dtype, f"{data.dtype} into {dst.dtype}", "the dtype stays")
    on_chip(data, dst)
    if chosen == "vector":
        machine = issue("vector", costs.one_input(data), (data,), (dst,))
    else:
        on_chip(data, only="sbuf")
        on_chip(dst, only="psum")
        check(len(dst.banks()) == 1, "dst in two PSUM banks", "a matmul writes one bank")
        core = current_machine().core
        machine = issue("tensor", costs.transpose_cost(core, data), (data,), (dst,))
    if machine.numerics:
        dst.put(_turned(machine, data, chosen))


def _turned(machine: Machine, data: Tensor, engine: str) -> torch.Tensor:
    flat = data.array().reshape(data.shape[0], -1)
    if engine == "vector" or machine.core.has_exact_transpose:
        return flat.T
    # v2 multiplies by an identity: NaN and infinities spread over the whole column.
    finite = flat.to(torch.float32).isfinite().all(0)
    return torch.where(finite[:, None], flat.T, torch.nan)


def _one_run(dst: Tensor) -> None:
    run = 1
    for size, stride in reversed(list(zip(dst.shape[1:], dst.strides[1:], strict=True))):
        check(size == 1 or stride == run, "a dst with gaps", "results lie side by side")
        run *= size
