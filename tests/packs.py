"""Packed sequences for tests, and the float64 oracle of each sequence by itself."""

import torch

from flexattn import create_block_mask
from flexattn.reference import Precision, attention
from flexattn.verify.gate import judge
from tests.support import assert_close_as

# Empty ones, one token, whole blocks, and more keys than queries and the other way round.
LENGTHS = [3, 0, 128, 1, 59, 70]
KEYS = [5, 2, 60, 0, 130, 70]


def offsets(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0, dtype=dtype)


def pack(lengths=LENGTHS, keys=None, heads=(4, 2), widths=(16, 8), dtype=torch.float32, more=0):
    """q, k, v and cu_seqlens of both, one tensor without keys; more: rows behind the last."""
    draw = torch.Generator().manual_seed(sum(lengths))
    sizes = sum(lengths) + more, sum(keys or lengths) + more
    cu = offsets(lengths)
    q = torch.randn(sizes[0], heads[0], widths[0], generator=draw)
    k = torch.randn(sizes[1], heads[1], widths[0], generator=draw)
    v = torch.randn(sizes[1], heads[1], widths[1], generator=draw)
    return *(x.to(dtype) for x in (q, k, v)), cu, cu if keys is None else offsets(keys)


def window_mask(n, m, left, right):
    """Which of m keys each of n queries sees, the last query standing at the last key."""

    def mask_mod(b, h, q_idx, kv_idx):
        at = q_idx + (m - n)
        kept = kv_idx >= 0
        if left >= 0:
            kept = kept & (kv_idx >= at - left)
        return kept & (kv_idx <= at + right) if right >= 0 else kept

    return mask_mod


def alone(q, k, v, cu_q, cu_k, *, left=-1, right=-1, score_mod=None, mask_mod=None,
    precision=Precision.ORACLE, **more,
):  # fmt: skip
    """out [total_q, Hq, Ev] and lse [Hq, total_q] of each sequence by itself.

    precision: of the oracle, in float64, or of the reference run.
    """
    outs, norms = [], []
    pairs = [[*zip(cu.tolist(), cu.tolist()[1:], strict=False)] for cu in (cu_q, cu_k)]
    for i, ((a, b), (c, d)) in enumerate(zip(*pairs, strict=True)):
        window = window_mask(b - a, d - c, left, right)

        def kept(_, h, q_idx, kv_idx, i=i, window=window):
            found = window(0, h, q_idx, kv_idx)
            number = torch.full_like(q_idx, i)
            return found if mask_mod is None else found & mask_mod(number, h, q_idx, kv_idx)

        def scored(score, _, h, q_idx, kv_idx, i=i):
            return score_mod(score, torch.full_like(q_idx, i), h, q_idx, kv_idx)

        parts = [x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])]
        mask = create_block_mask(kept, None, q.shape[1], b - a, d - c, q.device, 16)
        found = attention(
            *parts, score_mod=None if score_mod is None else scored, block_mask=mask,
            precision=precision, **more,
        )  # fmt: skip
        outs.append(found.out[0].transpose(0, 1))
        norms.append(found.lse[0])
    return torch.cat(outs), torch.cat(norms, 1)


def assert_right(got, *given, **asked):
    """Hold (out, lse or None) of varlen_attn to the oracle, as the accuracy rule says.

    Rows behind the last sequence are not judged. asked: as of `alone`.
    """
    oracle, rounded = (
        alone(*given, precision=each, **asked) for each in (Precision.ORACLE, Precision.ROUNDED)
    )
    rows = len(oracle[0])
    triples = [
        (out[:rows].transpose(0, 1)[None], None if lse is None else lse[None, :, :rows], None)
        for out, lse in (got, oracle, rounded)
    ]
    verdict = judge(*triples, given[0].dtype)
    assert verdict.passed, verdict.message()


def assert_gradients(got, q, k, v, cu_q, cu_k, *, grads, causal=False, window=(-1, -1), sinks=None,
    make=None, tables=(), **mods,
):  # fmt: skip
    """Hold gradients of q, k, v and sinks to the oracle's, each sequence by itself.

    grads: of out, and of lse or None; behind the last sequence nothing is judged. make: a
    score_mod of the tables, whose gradients follow.
    """
    ends = [int(cu_q[-1]), int(cu_k[-1]), int(cu_k[-1])]
    left, right = window[0], 0 if causal else window[1]

    def of(precision, grads=grads):
        leaves = [x.detach()[:end].double() for x, end in zip((q, k, v), ends, strict=True)]
        if precision is Precision.ROUNDED:
            leaves = [x.to(q.dtype) for x in leaves]
        leaves += [] if sinks is None else [sinks.detach().clone()]
        exact = precision is Precision.ORACLE
        leaves += [x.detach().double() if exact else x.detach().clone() for x in tables]
        leaves = [x.requires_grad_() for x in leaves]
        if make is not None:
            mods["score_mod"] = make(*leaves[-len(tables) :])
        out, lse = alone(
            *leaves[:3], cu_q, cu_k, left=left, right=right, precision=precision,
            sinks=None if sinks is None else leaves[3], **mods,
        )  # fmt: skip
        pairs = [(out, grads[0][: ends[0]]), (lse, grads[1])]
        pairs = [(x, g.to(x.dtype)) for x, g in pairs if g is not None]
        pairs = [(x, g[..., : x.shape[-1]]) for x, g in pairs]
        return torch.autograd.grad([x for x, _ in pairs], leaves, [g for _, g in pairs])

    exact, rounded = of(Precision.ORACLE), of(Precision.ROUNDED)
    if tables:
        kept = [grads[0][: ends[0]], None if grads[1] is None else grads[1][:, : ends[0]]]
        rounded = [*rounded[: -len(tables)], *_of_four(of, kept, exact, rounded, len(tables))]
    ends += [None] * (len(exact) - 3)
    for found, right_one, reference, end in zip(got, exact, rounded, ends, strict=True):
        assert_close_as(found[:end], right_one, reference)


def _of_four(of, grads, exact, rounded, tables):
    """References of the tables' gradients, with the largest error of four draws of dout.

    Four heads have four slopes. One reference's error in four numbers is often less than half of
    another's (in 10 of 50 draws less than two thirds), and so failed a kernel that was right.
    """
    errors = [[b - a for a, b in zip(exact[-tables:], rounded[-tables:], strict=True)]]
    for turn in (1, 2, 3):
        turned = [
            None if g is None else g.roll(turn, dim) for g, dim in zip(grads, (0, 1), strict=True)
        ]
        both = of(Precision.ORACLE, turned), of(Precision.ROUNDED, turned)
        errors.append([b - a for a, b in zip(*(x[-tables:] for x in both), strict=True)])
    largest = [max(each, key=lambda x: float(x.norm())) for each in zip(*errors, strict=True)]
    return [a + error for a, error in zip(exact[-tables:], largest, strict=True)]
