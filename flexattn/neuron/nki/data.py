"""nki.isa that moves data: DMA between HBM and SBUF, and copies and fills on chip."""

from __future__ import annotations

from typing import Any

import torch

from flexattn.neuron.nki import costs
from flexattn.neuron.nki.machine import Machine, current_machine
from flexattn.neuron.nki.rules import check, column, engine_of, issue, on_chip, same
from flexattn.neuron.nki.tensor import Tensor

__all__ = ["dma_copy", "dma_transpose", "memset", "tensor_copy"]


def dma_copy(dst: Tensor, src: Tensor) -> None:
    """dst = src between HBM and SBUF, converted where dtypes differ."""
    _reachable(dst, src)
    check(dst.size == src.size, f"{src.shape} into {dst.shape}", "as many elements")
    charged = costs.dma_bytes(dst, src)
    machine = _transfer(dst, src, charged)
    if machine.numerics:
        source = src.array().reshape(dst.shape)
        dst.put(source if src.dtype == dst.dtype else source.to(torch.float32))


def dma_transpose(dst: Tensor, src: Tensor, axes: tuple[int, ...] | None = None) -> None:
    """dst = src with its two axes swapped; 2-byte data, from NeuronCore-v3."""
    _reachable(dst, src)
    core = current_machine().core
    check(core.has_dma_transpose, core.name, "DMA engines transpose from NeuronCore-v3 on")
    check(src.ndim == 2 and dst.ndim == 2, f"{src.shape}", "this subset transposes 2-D tiles")
    check(axes in (None, (1, 0)), f"axes {axes}", "two axes are swapped by (1, 0)")
    check(dst.shape == src.shape[::-1], f"{src.shape} into {dst.shape}", "axes are swapped")
    check(dst.dtype == src.dtype, f"{src.dtype} into {dst.dtype}", "the dtype stays")
    check(src.storage.itemsize == 2, f"{src.dtype}", "elements of 2 bytes")
    check(src.shape[-1] <= 128, f"{src.shape}", "the last axis has at most 128 elements")
    share = costs.DMA_TRANSPOSE["sbuf" if src.buffer == "sbuf" else "hbm"]
    charged = int(src.size * src.storage.itemsize / share)
    machine = _transfer(dst, src, charged)
    if machine.numerics:
        dst.put(src.array().T)


def tensor_copy(dst: Tensor, src: Tensor, engine: Any = None) -> None:
    """dst = src on chip, converted through float32 where dtypes differ."""
    on_chip(dst, src)
    same(dst, src)
    chosen = engine_of(engine, ("vector", "scalar", "gpsimd"))
    core = current_machine().core
    if chosen == "scalar":
        check(core.has_scalar_copy, f"engine scalar on {core.name}", "use nisa.activation")
    if chosen == "gpsimd":
        on_chip(dst, src, only="sbuf")
    cycles = costs.copied(core, dst, src) if chosen == "vector" else costs.one_input(src)
    if chosen == "gpsimd":
        cycles = costs.gpsimd(src)
    machine = issue(chosen, cycles, (src,), (dst,))
    if machine.numerics:
        dst.put(src.array() if dst.dtype == src.dtype else src.rows())


def memset(dst: Tensor, value: float, engine: Any = None) -> None:
    """Fill dst with a number; integer tiles take integers."""
    on_chip(dst)
    chosen = engine_of(engine, ("vector", "gpsimd"))
    if chosen == "gpsimd":
        on_chip(dst, only="sbuf")
    integer = "int" in dst.dtype
    got = f"{value!r} into {dst.dtype}"
    check(not integer or isinstance(value, int), got, "an integer tile takes an integer")
    half = value == 0 and dst.dtype in costs.HALF
    cycles = costs.gpsimd(dst) if chosen == "gpsimd" else costs.one_input(dst, 0.5 if half else 1)
    machine = issue(chosen, cycles, (), (dst,))
    if machine.numerics:
        dst.array().copy_(column(value))


def _reachable(*tensors: Tensor) -> None:
    for each in tensors:
        check(each.buffer != "psum", "an operand in PSUM", "since 0.3 DMA cannot reach PSUM")


def _transfer(dst: Tensor, src: Tensor, charged: int) -> Machine:
    """Count a transfer; each DMA engine serves eight partitions."""
    machine = current_machine()
    core = machine.core
    machine.counts[machine.instruction] += 1
    machine.counts["dma instructions"] += 1
    machine.counts["dma bytes"] += src.size * src.storage.itemsize
    machine.counts["dma bytes charged"] += charged
    chips = [each for each in (dst, src) if each.storage.on_chip]
    partitions = min([each.shape[0] for each in chips], default=128)
    engines = min(core.dma_engines, -(-partitions // 8))
    cost = charged / (core.dma_engine * core.dma_engines)
    machine.timeline.issue(
        ["dma"],
        cost,
        costs.DMA_START + charged / (core.dma_engine * engines) - cost,
        [each.span() for each in (src,) if each.storage.on_chip],
        [each.span() for each in (dst,) if each.storage.on_chip],
    )
    return machine
