"""The attention of real models that the demo runs, at full size and small enough to interpret."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.create import create_block_mask
from flexattn.catalogue.masks import MaskMod, causal, sliding_window
from flexattn.catalogue.scores import ScoreMod, softcap
from flexattn.cli.offline import problem_of
from flexattn.problem import Kind, Problem, Shape
from flexattn.tune.workload import ModPath, Row


@dataclass(frozen=True)
class Inputs:
    """Tensors and mods of one workload on one device."""

    q: Tensor
    k: Tensor
    v: Tensor
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    block_mask: BlockMask | None


@dataclass(frozen=True)
class DemoWorkload:
    """One call. window: keys before the query's own, 0 for all; softcap: 0 where there is none."""

    name: str
    B: int
    Hq: int
    Hkv: int
    q_len: int
    kv_len: int
    D: int
    window: int = 0
    softcap: float = 0.0

    @property
    def decodes(self) -> bool:
        """Whether one query token walks a cache of keys."""
        return self.q_len == 1

    def describe(self) -> str:
        """Heads, lengths and mods in a table's cell."""
        parts = [f"B{self.B} {self.Hq}:{self.Hkv} heads", f"{self.q_len}x{self.kv_len} D{self.D}"]
        if not self.decodes:
            parts.append(f"window {self.window}" if self.window else "causal")
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
        return ", ".join(parts)

    def score_mod(self) -> ScoreMod | None:
        """tanh softcapping where the model has it."""
        return softcap(self.softcap) if self.softcap else None

    def mask_mod(self) -> MaskMod | None:
        """Nothing for decode: the query sees its whole cache."""
        if self.decodes:
            return None
        return sliding_window(self.window) if self.window else causal

    def make(self, device: str, dtype: torch.dtype) -> Inputs:
        """Normal random q, k and v with the workload's mods."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int, length: int) -> Tensor:
            shape = (self.B, heads, length, self.D)
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        mask_mod = self.mask_mod()
        mask = None
        if mask_mod is not None:
            mask = create_block_mask(mask_mod, None, None, self.q_len, self.kv_len, device)
        q, k, v = (
            normal(heads, length)
            for heads, length in (
                (self.Hq, self.q_len),
                (self.Hkv, self.kv_len),
                (self.Hkv, self.kv_len),
            )
        )
        return Inputs(q, k, v, self.score_mod(), mask_mod, mask)

    def row(self) -> Row:
        """The call as a workload file would say it, in bfloat16."""
        scored = ModPath("flexattn.catalogue:softcap", (self.softcap,)) if self.softcap else None
        masked = None
        if not self.decodes:
            masked = ModPath("flexattn.catalogue:causal")
        if self.window:
            masked = ModPath("flexattn.catalogue:sliding_window", (self.window,))
        shape = Shape(self.B, self.Hq, self.Hkv, self.q_len, self.kv_len, self.D, self.D)
        return Row(self.name, None, "bfloat16", shape, scored, masked, (128, 128), None, ())

    def problem(self, dtype: str) -> Problem:
        """The key of the call, made without a tensor."""
        shape = Shape(self.B, self.Hq, self.Hkv, self.q_len, self.kv_len, self.D, self.D)
        kind: Kind = "decode" if self.decodes else "prefill"
        return problem_of(kind, dtype, shape, self.score_mod(), self.mask_mod())


FULL_WORKLOADS = (
    DemoWorkload("llama-3 prefill", 1, 32, 8, 8192, 8192, 128),
    DemoWorkload("gemma-2 prefill", 1, 16, 8, 8192, 8192, 256, window=4096, softcap=50.0),
    DemoWorkload("llama-3 decode", 8, 32, 8, 1, 8192, 128),
)
# Odd lengths: they end where no tile does.
SMALL_WORKLOADS = (
    DemoWorkload("llama-3 prefill", 1, 4, 1, 301, 301, 128),
    DemoWorkload("gemma-2 prefill", 1, 4, 2, 333, 333, 256, window=160, softcap=50.0),
    DemoWorkload("llama-3 decode", 1, 32, 8, 1, 777, 128),
)
