"""What an entry of the catalogue is, and the shape it is built for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexattn.mods.signatures import MaskMod, ScoreMod

BLOCK = 16


@dataclass(frozen=True)
class Built:
    """The mods of one case at one shape; `learned` are captured tensors that take a gradient."""

    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    learned: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Setup:
    """The shape a case is built for; its random tensors are the same on every device."""

    B: int
    Hq: int
    Hkv: int
    L: int
    S: int
    device: torch.device | str
    dtype: torch.dtype
    seed: int

    @property
    def longest(self) -> int:
        """The length of tables that queries and keys both index."""
        return max(self.L, self.S)

    def normal(self, *shape: int, spread: float = 0.5) -> Tensor:
        """A float tensor of the inputs' dtype: biases and tables."""
        return (self._rand(torch.randn, shape) * spread).to(self.device, self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """An int32 tensor in low..high - 1, never empty of choice: high is at least low + 1."""
        unit = self._rand(torch.rand, shape)
        values = low + (unit * max(high - low, 1)).floor()
        return values.to(self.device, torch.int32)

    def lengths(self) -> Tensor:
        """A number of valid keys for each batch, 1 to S."""
        return self.integers(min(1, self.S), self.S + 1, self.B)

    def documents(self) -> tuple[Tensor, Tensor]:
        """doc_ids int32 [longest] and offsets int32 [documents + 1] of packed odd documents."""
        starts = self._rand(torch.rand, (self.longest,)) < 1 / 9
        starts[:1] = False
        doc_ids = starts.int().cumsum(0)
        count = int(doc_ids[-1]) + 1 if self.longest else 1
        offsets = torch.searchsorted(doc_ids, torch.arange(count + 1))
        return doc_ids.to(self.device, torch.int32), offsets.to(self.device, torch.int32)

    def unit(self, *shape: int) -> Tensor:
        """Uniform float32 numbers in [0, 1), on the CPU."""
        return self._rand(torch.rand, shape)

    def blocks(self, density: float) -> Tensor:
        """A bool table [B, Hq, q blocks, kv blocks] with at least one block in each row."""
        rows, cols = max(1, -(-self.L // BLOCK)), max(1, -(-self.S // BLOCK))
        table = self._rand(torch.rand, (self.B, self.Hq, rows, cols)) < density
        table[:, :, torch.arange(rows), torch.arange(rows) * 5 % cols] = True
        return table.to(self.device)

    def _rand(self, draw: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        return draw(shape, generator=torch.Generator().manual_seed(self.seed))


@dataclass(frozen=True)
class Case:
    """A named entry of the catalogue.

    empty_rows: rows may have no lane, at some shapes. torch_eager: torch's eager flex_attention
    can run it.
    """

    name: str
    build: Callable[[Setup], Built]
    empty_rows: bool = False
    torch_eager: bool = True

    def make(
        self,
        B: int,
        Hq: int,
        Hkv: int,
        L: int,
        S: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Built:
        """The case's mods for a shape, with captured tensors of `dtype` made from `seed`."""
        return self.build(Setup(B, Hq, Hkv, L, S, device, dtype, seed))

    def __str__(self) -> str:
        return self.name
