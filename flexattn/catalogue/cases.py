"""Every mod of the catalogue with tensors for any shape: what `flexattn render NAME` draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue import masks, scores
from flexattn.mods.expr import MaskMod, ScoreMod

BLOCK = 16
_WINDOW = 12


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


def case(name: str) -> Case:
    """The entry of that name; KeyError lists the names there are."""
    for entry in CASES:
        if entry.name == name:
            return entry
    raise KeyError(f"no case {name!r}; there are {', '.join(entry.name for entry in CASES)}")


def _mask(make: Callable[[Setup], MaskMod]) -> Callable[[Setup], Built]:
    return lambda s: Built(mask_mod=make(s))


def _score(make: Callable[[Setup], ScoreMod]) -> Callable[[Setup], Built]:
    return lambda s: Built(score_mod=make(s))


def _learned(
    make: Callable[..., ScoreMod], table: Callable[[Setup], Tensor]
) -> Callable[[Setup], Built]:
    def build(s: Setup) -> Built:
        values = table(s)
        return Built(make(values, s), None, (values,))

    return build


def _natten(s: Setup) -> MaskMod:
    width = max(1, math.isqrt(s.longest))
    return masks.natten_2d(max(1, -(-s.longest // width)), width, 5)


def _sliding_tile(s: Setup) -> MaskMod:
    return masks.sliding_tile_3d((max(1, -(-s.longest // 30)), 6, 5), (2, 3, 2), (3, 2, 1))


def _flamingo(s: Setup) -> MaskMod:
    images = max(1, s.S // 9)
    image_of = torch.arange(s.S, device=s.device) * images // max(s.S, 1)
    edges = (torch.arange(images + 1, device=s.device) + 1) * s.L // (images + 1)
    return masks.flamingo(image_of, edges[:-1], edges[1:])


def _transfusion(s: Setup) -> MaskMod:
    doc_ids, _ = s.documents()
    return masks.transfusion(torch.where(doc_ids % 2 == 1, doc_ids, -1))


def _tree(s: Setup) -> MaskMod:
    parents = [int(x * i) for i, x in enumerate(s.unit(s.L).tolist())]
    ancestors = torch.eye(s.L, dtype=torch.bool)
    for node in range(1, s.L):
        ancestors[node] |= ancestors[parents[node]]
    return masks.tree(ancestors.to(s.device), max(s.S - s.L, 0))


def _causal_document(s: Setup) -> MaskMod:
    return and_masks(masks.causal, masks.document(s.documents()[0]))


def _alibi_causal_document(s: Setup) -> Built:
    return Built(scores.alibi(s.Hq, s.device), _causal_document(s))


CASES: tuple[Case, ...] = (
    Case("noop", lambda s: Built()),
    Case("noop_mask", _mask(lambda s: masks.noop)),
    Case("causal", _mask(lambda s: masks.causal)),
    Case("causal_offset", _mask(lambda s: masks.causal_offset(s.S - s.L)), empty_rows=True),
    Case("sliding_window", _mask(lambda s: masks.sliding_window(_WINDOW)), empty_rows=True),
    Case("dilated_window", _mask(lambda s: masks.dilated_window(_WINDOW, 3)), empty_rows=True),
    Case("prefix_lm", _mask(lambda s: masks.prefix_lm(s.lengths()))),
    Case("padding", _mask(lambda s: masks.padding(s.lengths()))),
    Case("document", _mask(lambda s: masks.document(s.documents()[0])), empty_rows=True),
    Case(
        "document_offsets",
        _mask(lambda s: masks.document_offsets(*s.documents())),
        empty_rows=True,
    ),
    Case("causal_document", _mask(_causal_document), empty_rows=True),
    Case(
        "head_windows",
        _mask(lambda s: masks.head_windows(4 * torch.arange(s.Hq, device=s.device) + 1)),
        empty_rows=True,
    ),
    Case("random_blocks", _mask(lambda s: masks.block_table(s.blocks(1 / 8), BLOCK))),
    Case("natten_2d", _mask(_natten), empty_rows=True),
    Case("sliding_tile_3d", _mask(_sliding_tile), empty_rows=True),
    Case("flamingo", _mask(_flamingo), empty_rows=True),
    Case("transfusion", _mask(_transfusion)),
    Case("tree", _mask(_tree)),
    Case("scaled", _score(lambda s: scores.scaled(1.75))),
    Case("softcap_50", _score(lambda s: scores.softcap(50.0))),
    Case("softcap_30", _score(lambda s: scores.softcap(30.0))),
    Case("alibi", _score(lambda s: scores.alibi(s.Hq, s.device))),
    Case("alibi_causal_document", _alibi_causal_document, empty_rows=True),
    Case("length_temperature", _score(lambda s: scores.length_temperature)),
    Case(
        "t5_bias",
        # A distance of 100: a power of two would put integers on the edges of logarithmic buckets.
        _learned(lambda table, s: scores.t5_bias(table, 100), lambda s: s.normal(32, s.Hq)),
    ),
    Case(
        "relative_bias",
        _learned(
            lambda table, s: scores.relative_bias(table, s.longest),
            lambda s: s.normal(s.Hq, 2 * s.longest),
        ),
    ),
    Case(
        "head_bias",
        _learned(
            lambda table, s: scores.head_bias(table), lambda s: s.normal(s.B, s.Hq, s.L, s.S)
        ),
    ),
)
