"""The formulas of sparse attention's papers in plain torch, row by row, and inputs for them."""

import math

import torch


def attend(q, keys, values):
    """softmax(q K / sqrt(E)) V of one row [E]; zeros where there is no key."""
    if not len(keys):
        return q.new_zeros(values.shape[-1])
    return (keys @ q / math.sqrt(len(q))).softmax(0) @ values


def each_row(q, Hkv):
    """Batch, query head, its key head, and row of every row."""
    B, Hq, L, _ = q.shape
    for b in range(B):
        for h in range(Hq):
            for t in range(L):
                yield b, h, h * Hkv // Hq, t


def rows(q, Hkv, of_row):
    """The rows that of_row(b, h, key head, t) computes, in the order of q."""
    found = [of_row(*at) for at in each_row(q, Hkv)]
    return torch.stack(found).unflatten(0, q.shape[:3])


def best(scores, k, forced=()):
    """The k best of numbered scores {unit: score}, those that are forced before all others."""
    found = {i: float(torch.as_tensor(x).detach()) for i, x in scores.items()}
    order = sorted(found, key=lambda i: (i in forced, found[i]), reverse=True)
    return sorted(order[:k])


def moba(q, k, v, unit, top):
    """arXiv:2502.13189: the affinity is the product with the mean of a block's keys."""

    def of_row(b, h, g, t):
        own = t // unit
        scores = {i: q[b, h, t] @ k[b, g, i * unit : (i + 1) * unit].mean(0) for i in range(own)}
        read = best(scores | {own: 0.0}, top, (own,))
        at = [s for i in read for s in range(i * unit, (i + 1) * unit) if s <= t]
        return attend(q[b, h, t], k[b, g, at], v[b, g, at])

    return rows(q, k.shape[1], of_row)


def nsa(q, compressed, selected, recent, gates, sizes):
    """arXiv:2502.11089, whose sums over p are over the parts that blocks share."""
    length, stride, unit, top, first, last, window = sizes
    Hkv = selected[0].shape[1]
    group = q.shape[1] // Hkv

    def seen(t):
        return [i for i in range(compressed[0].shape[2]) if i * stride + length <= t + 1]

    def importance(b, g, t):
        scores = {j: 0.0 for j in range(t // unit + 1)}
        keys = compressed[0][b, g, seen(t)]
        for h in range(g * group, (g + 1) * group) if len(keys) else ():
            p = (keys @ q[b, h, t] / math.sqrt(q.shape[3])).softmax(0).tolist()
            for j in scores:
                for m in range(unit // stride):
                    for n in range(length // stride):
                        # As of the paper, which numbers blocks from 1.
                        i = unit // stride * (j + 1) - m - n
                        if 1 <= i <= len(p):
                            scores[j] += p[i - 1]
        return scores

    def of_row(b, h, g, t):
        own = t // unit
        fixed = {*range(min(first, own + 1)), *range(max(0, own - last + 1), own + 1)}
        read = best(importance(b, g, t), top, fixed)
        at = [s for i in read for s in range(i * unit, (i + 1) * unit) if s <= t]
        near = range(max(0, t - window + 1), t + 1)
        parts = (compressed, seen(t)), (selected, at), (recent, list(near))
        found = [attend(q[b, h, t], x[0][b, g, i], x[1][b, g, i]) for x, i in parts]
        return sum(gate * x for gate, x in zip(gates[b, h, t], found, strict=True))

    return rows(q, Hkv, of_row)


def dsa(q, k, v, index_query, index_key, weights, top):
    """DeepSeek-V3.2: I = sum of w relu(q . k) over the indexer's heads."""

    def of_row(b, h, g, t):
        scores = {
            s: (weights[b, t] * (index_query[b, :, t] @ index_key[b, s]).relu()).sum()
            for s in range(t + 1)
        }
        at = best(scores, top)
        return attend(q[b, h, t], k[b, g, at], v[b, g, at])

    return rows(q, k.shape[1], of_row)


def quest(q, k, v, page, top):
    """arXiv:2406.10774: sums of max(q m, q M) over a page's bounds m and M."""

    def of_row(b, h, g, t):
        pages = k[b, g].split(page)
        bounds = [(x.amin(0) * q[b, h, t], x.amax(0) * q[b, h, t]) for x in pages]
        scores = {i: torch.maximum(*each).sum() for i, each in enumerate(bounds)}
        at = [s for i in best(scores, top) for s in range(k.shape[2]) if s // page == i]
        return attend(q[b, h, t], k[b, g, at], v[b, g, at])

    return rows(q, k.shape[1], of_row)


def vsa(q, k, v, coarse_gate, fine_gate, canvas, cube, top):
    """arXiv:2505.13389: attention of cubes' means, and fine attention in the best cubes."""
    frames, height, width = canvas
    of = {}
    for t in range(frames * height * width):
        place = t // (height * width), t // width % height, t % width
        of.setdefault(tuple(x // c for x, c in zip(place, cube, strict=True)), []).append(t)
    cubes = list(of.values())
    mine = {t: i for i, tokens in enumerate(cubes) for t in tokens}

    def of_row(b, h, g, t):
        mean_q = q[b, h, cubes[mine[t]]].mean(0)
        keys, values = (torch.stack([x[b, g, c].mean(0) for c in cubes]) for x in (k, v))
        scores = dict(enumerate(keys @ mean_q))
        at = [s for i in best(scores, top) for s in cubes[i]]
        coarse = attend(mean_q, keys, values)
        fine = attend(q[b, h, t], k[b, g, at], v[b, g, at])
        return coarse_gate[b, h, t] * coarse + fine_gate[b, h, t] * fine

    return rows(q, k.shape[1], of_row)


def compress(x, length, stride, weights):
    """A model's own network that makes one key of `length`: a weighted sum, [B, H, n, E]."""
    if x.shape[2] < length:
        return x[:, :, :0]
    return torch.einsum("bhnel,l->bhne", x.unfold(2, length, stride), weights)
