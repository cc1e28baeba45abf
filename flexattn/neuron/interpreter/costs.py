"""The costs of instructions in cycles of their engine: AWS's published estimates alone.

[cost] is the "Estimated instruction cost" of each page of nki.isa in the documentation of SDK
2.26.1 (later editions dropped these sections; the engines did not change). [arch2], [arch3],
[arch4] and [dma] are the guides that flexattn/device/neuroncore.py names.
N is the number of elements of a partition.
"""

from __future__ import annotations

from flexattn.device.neuroncore import NeuronCore
from flexattn.neuron.interpreter.machine import Tensor

# [cost] MIN_II: the least cycles between two instructions of Vector or Scalar Engine.
MIN_II = 64
# [arch2] Vector Engine, cost model: what an instruction that waits for the previous one adds.
DEPENDENCY = 100
# [cost] GPSIMD_START of affine_select, and the 150 of iota.
GPSIMD_START = 150
# [dma] descriptors, synchronisation and semaphore: nanoseconds from trigger to start.
DMA_START = 1300.0
# [dma] under 256 bytes a transfer is "severely overhead-bound": none is charged for less.
DMA_LEAST_RUN = 256
# [arch3] DMA transpose reaches 90 % of the throughput from HBM, 50 % within SBUF.
DMA_TRANSPOSE = {"hbm": 0.9, "sbuf": 0.5}

HALF = ("bfloat16", "float16")


def matmul(stationary: Tensor, moving: Tensor) -> float:
    """[cost] nc_matmul: max(min(64, N_stationary), N_moving), four times that for float32."""
    cycles = max(min(64, stationary.free), moving.free)
    return 4.0 * cycles if stationary.dtype == "float32" else float(cycles)


def transpose_cost(core: NeuronCore, data: Tensor) -> float:
    """[cost] nc_transpose on the Tensor Engine: max(P, min(64, F)).

    It is a matmul [arch2]: float32 takes four passes, two with v3's transpose mode [arch3].
    """
    cycles = max(data.shape[0], min(64, data.free))
    if data.dtype != "float32":
        return float(cycles)
    return cycles * (2.0 if core.has_exact_transpose else 4.0)


def copied(core: NeuronCore, dst: Tensor, src: Tensor) -> float:
    """[cost] tensor_copy, tensor_scalar: max(MIN_II, N); for 16-bit data less from v3 [arch3]."""
    cycles = float(src.free)
    if core.generation >= 3 and dst.dtype in HALF and src.dtype in HALF:
        cycles /= 4 if "psum" not in (dst.buffer, src.buffer) else 2
    return max(MIN_II, cycles)


def one_input(data: Tensor, factor: float = 1.0) -> float:
    """[cost] max(MIN_II, factor * N): 1 for tensor_reduce and range_select, 8 for reciprocal."""
    return max(MIN_II, factor * data.free)


def two_inputs(dst: Tensor, one: Tensor, other: Tensor, simple: bool) -> float:
    """[cost] tensor_tensor: 2 N, or N with one input in PSUM, or bfloat16 sums and products.

    simple: the operator is add, multiply or subtract.
    """
    fast = "psum" in (one.buffer, other.buffer)
    fast |= simple and all(each.dtype in HALF for each in (dst, one, other))
    return one_input(one, 1.0 if fast else 2.0)


def scalar(data: Tensor, read_out: bool) -> float:
    """[cost] activation: max(MIN_II, N), and MIN_II more to read the sum out."""
    return one_input(data) + (MIN_II if read_out else 0)


def gpsimd(data: Tensor) -> float:
    """[cost] iota, affine_select: 150 + N."""
    return float(GPSIMD_START + data.free)


def dma_bytes(dst: Tensor, src: Tensor) -> int:
    """Bytes that the DMA engines are charged for a copy: each run of its own, none below 256."""
    runs = min(_run(dst), _run(src))
    itemsize = min(dst.storage.itemsize, src.storage.itemsize)
    charged = max(runs * itemsize, DMA_LEAST_RUN)
    return dst.size // runs * charged


def _run(view: Tensor) -> int:
    """Elements that lie side by side; a partition ends a run on chip."""
    run = 1
    dims = list(zip(view.shape, view.strides, strict=True))
    for size, stride in reversed(dims[1:] if view.storage.on_chip else dims):
        if size != 1 and stride != run:
            break
        run *= size
    return run
