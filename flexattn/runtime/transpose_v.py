"""V of 8 bits as Hopper's tensor cores multiply it by weights of 8 bits: its keys innermost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexattn.device import Device
from flexattn.kernels.base.binding import strides
from flexattn.kernels.base.source import Source
from flexattn.kernels.hopper.transpose_v import PERMUTED_KEYS, TRANSPOSED_KEYS
from flexattn.runtime.build import Launcher, builder


@dataclass(frozen=True, slots=True)
class TransposeV:
    """The kernel that makes it, for one shape and one set of strides.

    V is [B, Hkv, S, D], its last stride 1, the others multiples of 16; what is made of it
    [B, Hkv, D, S'], contiguous, S' the next multiple of 16.
    """

    shape: tuple[int, int, int, int]
    launcher: Launcher

    @classmethod
    def of(cls, source: Source, v: Tensor, target: Device, index: int) -> TransposeV:
        """For tensors like v on the GPU with this index, or in the interpreter (-1)."""
        B, heads, kv_len, head_dim = v.shape
        width = -(-kv_len // PERMUTED_KEYS) * PERMUTED_KEYS
        tiles = -(-width // TRANSPOSED_KEYS)
        fixed = strides("stride_v", "bhn", v)
        fixed |= {"heads": heads, "kv_len": kv_len, "width": width, "num_tiles": tiles}
        kernel = builder().kernel(source, target, index)
        shape = (B, heads, head_dim, width)
        return cls(shape, kernel.prepare(B * heads * tiles, fixed, ("V", "OUT")))

    def run(self, v: Tensor, stream: int) -> Tensor:
        """V's other form, on a stream."""
        made = torch.empty(self.shape, dtype=torch.uint8, device=v.device)
        self.launcher.launch(stream, [v.view(torch.uint8), made])
        return made.view(v.dtype)
