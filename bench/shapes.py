"""Attention shapes of real models, by name."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MODELS", "Model", "Shape"]


@dataclass(frozen=True)
class Shape:
    """One call: q [batch, hq, q_len, d], k and v [batch, hkv, kv_len, d]."""

    batch: int
    hq: int
    hkv: int
    q_len: int
    kv_len: int
    d: int


@dataclass(frozen=True)
class Model:
    """The attention of one model: heads, head dim, and what it does to the scores.

    `window` is the number of keys before the query's own that a layer sees, 0 for all of them;
    `softcap` is 0 where there is none.
    """

    hq: int
    hkv: int
    d: int
    causal: bool = True
    window: int = 0
    softcap: float = 0.0

    def prefill(self, batch: int, length: int) -> Shape:
        """A whole prompt, or a whole image, at once."""
        return Shape(batch, self.hq, self.hkv, length, length, self.d)

    def decode(self, batch: int, length: int) -> Shape:
        """One new token for each sequence of the batch."""
        return Shape(batch, self.hq, self.hkv, 1, length, self.d)


MODELS: dict[str, Model] = {
    "llama3-8b": Model(hq=32, hkv=8, d=128),
    "llama3-70b": Model(hq=64, hkv=8, d=128),
    "mistral-7b": Model(hq=32, hkv=8, d=128, window=4096),
    "qwen3-14b": Model(hq=40, hkv=8, d=128),
    "qwen3-32b": Model(hq=64, hkv=8, d=128),
    "gemma2-9b-local": Model(hq=16, hkv=8, d=256, window=4096, softcap=50.0),
    "gemma2-9b-global": Model(hq=16, hkv=8, d=256, softcap=50.0),
    "gemma2-27b-local": Model(hq=32, hkv=16, d=128, window=4096, softcap=50.0),
    "sd21-768": Model(hq=5, hkv=5, d=64, causal=False),
}
