"""A small random transformer: RMSNorm, rope, grouped queries, a gated MLP, a tied head.

Its vocabulary is the 256 bytes. The weights are drawn so that each token of an answer depends on
all tokens before it: layers outweigh the embedding, and scores are spread widely.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

VOCABULARY = 256
ROPE_BASE = 10_000.0
# Of the embedding in the sum of layers, whose head would otherwise say each token once more.
FAINT = 0.1
# Attention of one layer: (layer, q [R, Hq, D], k and v [R, Hkv, D]) -> [R, Hq, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; heads: (Hq, Hkv)."""

    layers: int
    width: int
    hidden: int
    heads: tuple[int, int]
    head_dim: int


SHAPES = {
    "tiny": Shape(2, 64, 128, (4, 2), 64),
    "toy-small": Shape(8, 1024, 2816, (32, 8), 128),
    "toy-llama": Shape(8, 4096, 14336, (32, 8), 128),
}


class Layer:
    """Weights of one layer, drawn in the model's dtype."""

    def __init__(self, shape: Shape, make: Callable[[int, int, float], Tensor]) -> None:
        Hq, Hkv = (h * shape.head_dim for h in shape.heads)
        self.q = make(shape.width, Hq, 1.7)
        self.k = make(shape.width, Hkv, 1.7)
        self.v = make(shape.width, Hkv, 1.0)
        self.o = make(Hq, shape.width, 3.0)
        self.gate = make(shape.width, shape.hidden, 1.0)
        self.up = make(shape.width, shape.hidden, 1.0)
        self.down = make(shape.hidden, shape.width, 3.0)

    def to(self, dtype: torch.dtype) -> "Layer":
        """The same weights in another dtype."""
        other = copy.copy(self)
        vars(other).update({name: weight.to(dtype) for name, weight in vars(self).items()})
        return other


class Model:
    """The transformer, one row a token; who calls says which rows belong together.

    longest: the most positions of a request. Of one device, dtype and seed all weights are equal.
    """

    def __init__(
        self, shape: Shape, longest: int, device: torch.device, dtype: torch.dtype, seed: int = 0
    ) -> None:
        draw = torch.Generator(device).manual_seed(seed)

        def make(rows: int, columns: int, gain: float) -> Tensor:
            made = torch.randn(rows, columns, generator=draw, device=device)
            return made.mul_(gain / math.sqrt(rows)).to(dtype)

        self.shape, self.device, self.dtype = shape, device, dtype
        self.embedding = make(VOCABULARY, shape.width, math.sqrt(VOCABULARY))
        self.head = _head(self.embedding)
        self.layers = [Layer(shape, make) for _ in range(shape.layers)]
        half = torch.arange(shape.head_dim // 2, dtype=torch.float64)
        angles = torch.arange(longest)[:, None] * ROPE_BASE ** (-2 * half / shape.head_dim)
        self.cos, self.sin = (x.to(device, dtype)[:, None] for x in (angles.cos(), angles.sin()))

    def to(self, dtype: torch.dtype) -> "Model":
        """The same weights in another dtype."""
        other = copy.copy(self)
        other.dtype = dtype
        other.embedding, other.cos, other.sin = (
            x.to(dtype) for x in (self.embedding, self.cos, self.sin)
        )
        other.head = _head(other.embedding)
        other.layers = [layer.to(dtype) for layer in self.layers]
        return other

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[R, width] after the last layer, of tokens and positions [R] (int)."""
        D = self.shape.head_dim
        x = FAINT * F.embedding(tokens, self.embedding)
        cos, sin = self.cos[positions], self.sin[positions]
        for i, layer in enumerate(self.layers):
            y = F.rms_norm(x, (self.shape.width,))
            q, k, v = ((y @ w).unflatten(-1, (-1, D)) for w in (layer.q, layer.k, layer.v))
            x = x + attend(i, _turned(q, cos, sin), _turned(k, cos, sin), v).flatten(1) @ layer.o
            y = F.rms_norm(x, (self.shape.width,))
            x = x + (F.silu(y @ layer.gate) * (y @ layer.up)) @ layer.down
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, 256] in float32, or float64 of a float64 model: in 16 bits many would be equal."""
        scores = F.rms_norm(hidden, (self.shape.width,)).to(self.head.dtype) @ self.head
        return scores / math.sqrt(self.shape.width)

    def whole(self, tokens: list[int]) -> Tensor:
        """Logits [n, 256] of all tokens of one request at once: without pages, steps or plans."""
        ids = torch.tensor(tokens, device=self.device)
        places = torch.arange(len(tokens), device=self.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1)

        return self.logits(self.hidden(ids, places, attend))


def _head(embedding: Tensor) -> Tensor:
    return embedding.T.to(torch.promote_types(embedding.dtype, torch.float32)).contiguous()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
