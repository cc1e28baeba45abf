"""Requests cut into batches at random: what each row gives must be what it gives alone."""

import random
from dataclasses import dataclass

import pytest
import torch

from flexattn import create_block_mask, flex_attention
from flexattn.catalogue import causal, sliding_window
from flexattn.serving import DecodePlan


@dataclass(frozen=True)
class Story:
    """A request with all of its queries: q [n, Hq, D], k and v [n, Hkv, D], scales [n, Hkv]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def cached(self):
        """What a cache and its scales hold of it."""
        scales = () if self.k_scale is None else (self.k_scale, self.v_scale)
        return (self.k, self.v, *scales)

    def __len__(self):
        return len(self.q)


@dataclass(frozen=True)
class Piece:
    """Rows first to last of a request, as a chunk of prefill or a step of decoding asks for."""

    story: Story
    first: int
    last: int


def stories(lengths, heads=(8, 2), D=64, dtype=torch.bfloat16, kv_dtype=None, device="cpu"):
    """Normal random requests, the same on every device."""
    draw = torch.Generator().manual_seed(sum(lengths) + D)

    def make(n, h, to):
        return torch.randn(n, h, D, generator=draw).to(device, to)

    Hq, Hkv = heads
    kv = kv_dtype or dtype
    return [Story(make(n, Hq, dtype), make(n, Hkv, kv), make(n, Hkv, kv)) for n in lengths]


def plan_of(told, pieces, *, page=0, ragged=True, more=0, **options):
    """A batch-invariant plan whose maxima hold these pieces, with `more` rows and requests."""
    rows = [each.last - each.first for each in pieces]
    some = told[0]
    return DecodePlan(
        batch=len(pieces) + more,
        kv_len=max(each.last for each in pieces) + more,
        heads=(some.q.shape[1], some.k.shape[1]),
        head_dim=some.q.shape[2],
        dtype=some.q.dtype,
        kv_dtype=some.k.dtype,
        device=some.q.device,
        page_size=page,
        lse=True,
        batch_invariant=True,
        **({"total_q": sum(rows) + more} if ragged else {"q_len": max(rows)}),
        **options,
    )


def run_pieces(plan, pieces, **call):
    """(out, lse) of each piece, of one run on tensors of its own."""
    return Bench(plan, pieces, **call).run(pieces)


class Bench:
    """Tensors that a plan's runs read, as large as some batches need, and a graph of one run.

    requests: how many each run has, where a graph serves smaller batches too; the rest are empty.
    """

    def __init__(self, plan, pieces, *, requests=0, keys=0, **call):
        m = plan.problem
        device, dtype = plan.device, pieces[0].story.q.dtype
        numbers = {"dtype": torch.int32, "device": device}
        count = requests or len(pieces)
        rows = [each.last - each.first for each in pieces]
        longest = keys or max(each.last for each in pieces)
        total = (m.total_q or count * m.q_len) if requests else sum(rows)
        Hq, Hkv, D = m.Hq, m.Hkv, m.head_dim_qk
        self.plan, self.call, self.graph = plan, dict(call), None
        self.q = torch.zeros(total, Hq, D, dtype=dtype, device=device)
        self.lens = torch.zeros(count, **numbers)
        self.width = -(-longest // m.page) if m.page else m.kv_len
        shape = (count * self.width + 3, m.page, Hkv, D) if m.page else (count, m.kv_len, Hkv, D)
        self.cache = tuple(torch.empty(shape, dtype=m.kv_dtype, device=device) for _ in range(2))
        self.pools = self.cache
        if pieces[0].story.k_scale is not None:
            scales = {
                name: torch.empty(shape[:3], device=device) for name in ("k_scale", "v_scale")
            }
            self.pools += tuple(scales.values())
            self.call |= scales
        if m.page:
            self.call["block_table"] = torch.full((count, self.width), -7, **numbers)
        if m.total_q:
            self.call["cu_seqlens_q"] = torch.zeros(count + 1, **numbers)

    def fill(self, pieces):
        """A batch in the tensors: pages in random order, NaN where no key is."""
        m = self.plan.problem
        rows = [each.last - each.first for each in pieces]
        draw = torch.Generator().manual_seed(sum(rows))
        order = torch.randperm(len(self.cache[0]), generator=draw)
        self.q.zero_()
        self.q[: sum(rows)] = torch.cat([each.story.q[each.first : each.last] for each in pieces])
        self.lens.zero_()
        self.lens[: len(pieces)] = torch.tensor([each.last for each in pieces])
        if m.total_q:
            ends = torch.tensor([0, *rows]).cumsum(0)
            cu = self.call["cu_seqlens_q"]
            cu.fill_(int(ends[-1]))
            cu[: len(ends)] = ends
        for b, each in enumerate(pieces):
            count = -(-each.last // m.page) if m.page else 1
            where = order[b * self.width : b * self.width + count] if m.page else torch.tensor([b])
            if m.page:
                self.call["block_table"][b, :count] = where.to(torch.int32)
            for pool, source in zip(self.pools, each.story.cached, strict=True):
                flat = source[: each.last].float()
                padded = flat.new_full((count * pool.shape[1], *flat.shape[1:]), float("nan"))
                padded[: each.last] = flat
                pool[where.to(pool.device)] = padded.view(count, *pool.shape[1:]).to(pool.dtype)
        return rows

    def launch(self):
        """One run on what the tensors hold."""
        q = self.q if self.plan.problem.total_q else self.q.unflatten(0, (len(self.lens), -1))
        self.out, self.lse = self.plan.run(q, self.cache, seq_lens=self.lens, **self.call)

    def capture(self):
        """Every later run is a replay."""
        self.launch()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.launch()

    def run(self, pieces):
        """(out, lse) of each piece."""
        rows = self.fill(pieces)
        if self.graph is None:
            self.launch()
        else:
            self.graph.replay()
        found = []
        for x, kept in ((self.out, 2), (self.lse, 1)):
            every = x.reshape(len(self.q), *x.shape[-kept:])
            found.append(every[: sum(rows)].clone().split(rows))
        return list(zip(*found, strict=True))


def whole(told, *, page=0, call=None, **options):
    """What each request gives alone, all of its rows as one chunk."""
    found = []
    for story in told:
        pieces = [Piece(story, 0, len(story))]
        plan = plan_of(told, pieces, page=page, **options)
        found += run_pieces(plan, pieces, **(call or {}))
    return found


def random_pieces(draw: random.Random, told, rows):
    """A batch: requests in any order, some more than once, each a step or a chunk of `rows`."""
    found = []
    for story in draw.choices(told, k=draw.randint(1, 2 * len(told))):
        last = draw.randint(1, len(story))
        found.append(Piece(story, max(0, last - draw.choice(rows)), last))
    return found


def rows_of_attention(story, first, last, mask_mod, **options):
    """Rows first to last of a request, by flex_attention: [Hq, rows, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (story.q, story.k, story.v))
    at = lambda b, h, m, n: mask_mod(b, h, m + first, n)  # noqa: E731
    mask = create_block_mask(at, None, None, last - first, last, device=q.device, BLOCK_SIZE=64)
    return flex_attention(
        q[:, :, first:last], k[:, :, :last], v[:, :, :last], block_mask=mask, enable_gqa=True,
        kernel_options={"BATCH_INVARIANT": True}, **options,
    )[0]  # fmt: skip


def with_gaps(b, h, m, n):
    """Causal, of every third block of keys and the row's own: lists, no runs."""
    return (m >= n) & ((n // 64 % 3 == 0) | (m // 64 == n // 64))


MASKS = pytest.mark.parametrize(
    "mask", [causal, sliding_window(90), with_gaps], ids=["causal", "window", "gaps"]
)


def assert_same_bits(found, pieces, told, alone):
    """Each row of the pieces as it was alone."""
    known = {id(story): each for story, each in zip(told, alone, strict=True)}
    for (out, lse), piece in zip(found, pieces, strict=True):
        rows = slice(piece.first, piece.last)
        for got, wanted in ((out, known[id(piece.story)][0]), (lse, known[id(piece.story)][1])):
            same = got == wanted[rows]
            where = f"rows {piece.first} to {piece.last} of {len(piece.story)} keys"
            assert bool(same.all()), f"{where}: {int((~same).sum())} of {same.numel()} differ"
