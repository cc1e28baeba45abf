"""Requests cut into batches at random: what each row gives must be what it gives alone."""

import random
from dataclasses import dataclass

import torch

from flexattn.serving import DecodePlan
from tests.serving import Batch, poisoned_cache, poisoned_pages


@dataclass(frozen=True)
class Story:
    """A request with all of its queries: q [n, Hq, D], k and v [n, Hkv, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

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
    """(out, lse) of each piece, of one run."""
    m = plan.maxima
    rows = [each.last - each.first for each in pieces]
    q = torch.cat([each.story.q[each.first : each.last] for each in pieces])
    each = Batch(
        q,
        [piece.story.k[: piece.last] for piece in pieces],
        [piece.story.v[: piece.last] for piece in pieces],
        rows,
        [piece.last for piece in pieces],
    )
    if m.page:
        cache, call["block_table"] = poisoned_pages(each, m.page)
    else:
        cache = poisoned_cache(each, m.kv_len)
    if m.total_q:
        call["cu_seqlens_q"] = each.numbers([0, *torch.tensor(rows).cumsum(0).tolist()])
    else:
        q = q.unflatten(0, (len(pieces), -1))
    out, lse = plan.run(q, cache, seq_lens=each.numbers(each.kv_lens), **call)
    out, lse = (x.reshape(len(each.q), *x.shape[x.dim() - n :]) for x, n in ((out, 2), (lse, 1)))
    return list(zip(out.clone().split(rows), lse.clone().split(rows), strict=True))


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


def assert_same_bits(found, pieces, told, alone):
    """Each row of the pieces as it was alone."""
    known = {id(story): each for story, each in zip(told, alone, strict=True)}
    for (out, lse), piece in zip(found, pieces, strict=True):
        rows = slice(piece.first, piece.last)
        for got, wanted in ((out, known[id(piece.story)][0]), (lse, known[id(piece.story)][1])):
            same = got == wanted[rows]
            where = f"rows {piece.first} to {piece.last} of {len(piece.story)} keys"
            assert bool(same.all()), f"{where}: {int((~same).sum())} of {same.numel()} differ"
