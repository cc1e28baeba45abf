"""A plan's forward in plain Python on requests of any lengths: pages, tiles of rows, the exact."""

from dataclasses import replace

import numpy as np
import torch

from flexattn.catalogue import causal
from flexattn.kernels.base.arguments import captured_values
from flexattn.kernels.base.ragged import gathers
from flexattn.kernels.hopper.ragged import part_words
from flexattn.mods import bind
from flexattn.runtime.build import DESCRIPTOR
from tests.emulated_memory import Descriptor, Number, Pointer
from tests.emulated_prefill import run
from tests.families import geometry, render, violated
from tests.problems import plan_of

LENS = torch.tensor([100, 260, 31])


def prefix(b, h, q_idx, kv_idx):
    """Causal, except that every row sees what its request begins with."""
    return (kv_idx < LENS[b]) | (q_idx >= kv_idx)


def tilted(score, b, h, q_idx, kv_idx):
    return score + (kv_idx - q_idx) / (32 * (h + 1)) + b


def holes(b, h, q_idx, kv_idx):
    return (q_idx // 32 + kv_idx // 32) % 2 == 0


def row_tiles(q_lens, kv_lens, config, group, parts=1, workers=10**6):
    """How many tiles there are, and each one's request and first row, the most keys first.

    With slices it is the number of the first slice, not the row. parts: the keys of a tile are
    split into so many, if there are many keys. workers: programs that take tiles.
    """
    rows, step = config.BLOCK_M, config.BLOCK_M
    if config.sliced(group):
        step = config.heads
        q_lens = [-(-q // rows) * group for q in q_lens]
    found = [
        (min(max(k - q, 0) + first + step, k), b, first)
        for b, (q, k) in enumerate(zip(q_lens, kv_lens, strict=True))
        for first in range(0, q, step)
    ]
    found.sort(key=lambda each: -each[0])
    listed, slots = [], 0
    for _, b, first in found:
        count = parts if kv_lens[b] > 64 else 1
        listed += [(b, first, part, count, slots + part) for part in range(count)]
        slots += count
    return [len(listed), workers, *(number for each in listed for number in each)]


class Cache:
    """Keys and values of requests in pages that lie anywhere; NaN where there is none of them.

    Numbers are those of kv_dtype.
    """

    def __init__(self, page, kv_lens, heads, dims, seed, kv_dtype=torch.float32):
        draw = np.random.default_rng(seed)
        counts = [-(-n // page) for n in kv_lens]
        order = draw.permutation(sum(counts) + 3)
        # What follows a request's last page is no page.
        self.table = np.full((len(kv_lens), max(*counts, 1) + 2), 10**6)
        shape = (len(order), page, heads)
        self.k, self.v = (np.full((*shape, dim), np.nan, np.float32) for dim in dims)
        self.keys, self.values = [], []
        place = 0
        for b, (n, count) in enumerate(zip(kv_lens, counts, strict=True)):
            pages = order[place : place + count]
            place += count
            self.table[b, :count] = pages
            for cache, kept, dim in zip(
                (self.k, self.v), (self.keys, self.values), dims, strict=True
            ):
                each = torch.from_numpy(draw.standard_normal((n, heads, dim)))
                each = each.to(kv_dtype).float().numpy()
                kept.append(each)
                for i, at in enumerate(pages):
                    part = each[i * page : (i + 1) * page]
                    cache[at, : len(part)] = part


class Packed:
    """Keys and values of sequences one behind the other, then rows of none, which are NaN.

    bad: sequences whose own are NaN.
    """

    def __init__(self, kv_lens, heads, dims, seed, bad=()):
        draw = np.random.default_rng(seed)
        self.keys, self.values = (
            [
                np.full((n, heads, dim), np.nan, np.float32)
                if b in bad
                else draw.standard_normal((n, heads, dim)).astype(np.float32)
                for b, n in enumerate(kv_lens)
            ]
            for dim in dims
        )
        rest = (np.full((5, heads, dim), np.nan, np.float32) for dim in dims)
        every = zip((self.keys, self.values), rest, strict=True)
        self.k, self.v = (np.concatenate([*own, behind]) for own, behind in every)
        self.ends = np.cumsum([0, *kv_lens])


def emulated(
    config, device, page, q_lens, kv_lens, heads=(4, 2), dims=(128, 128), score_mod=None,
    mask_mod=causal, sinks=None, seed=0, uniform=False, parts=1, workers=10**6, bad=(),
    behind=False, kv_dtype=torch.bfloat16, scales=(), lost=(), unread=(), run=run,
):  # fmt: skip
    """(out, lse) of a kernel in bfloat16 that computes exactly, and of float64.

    run: what emulates the kernel of a config on a device. page: 0 of packed sequences; bad: whose
    keys and values are NaN; behind: cu_seqlens do not count the last one. scales: of K and of V,
    each one number or one for each KV head. lost: (request, number): of its first page. unread:
    (request, page): pages of NaN.
    """
    (Hq, Hkv), (D, Dv), total = heads, dims, sum(q_lens)
    score, mask = bind(score_mod, "score"), bind(mask_mod, "mask")
    problem = plan_of(
        len(q_lens), q_len=q_lens[0], total_q=0 if uniform else total, keys=1024, heads=heads,
        D=dims, kv=kv_dtype, page=page, score=score, mask=mask, sinks=sinks is not None, lse=True,
        scaled=bool(scales),
    )  # fmt: skip
    problem = replace(problem, structure=replace(problem.structure, ragged_kv=not page))
    form = problem.structure
    assert not violated(config, form, device)
    roomy = replace(device, num_sms=100)  # it has slots for all parts
    source = render(form, config, roomy, "test")
    if page:
        cache = Cache(
            page, kv_lens, Hkv, dims, seed, torch.float32 if kv_dtype.itemsize == 2 else kv_dtype
        )
        k, v = (x.transpose(0, 2, 1, 3) for x in (cache.k, cache.v))
        for request, number in lost:
            cache.table[request, 0] = number
        for place in unread:
            cache.k[cache.table[place]] = cache.v[cache.table[place]] = np.nan
        placed = {
            "SEQ_LENS": Pointer(np.array(kv_lens)), "max_keys": 1024,
            "TABLE": Pointer(cache.table.reshape(-1)), "stride_table": cache.table.shape[1],
        }  # fmt: skip
    else:
        cache = Packed(kv_lens, Hkv, dims, seed, bad)
        k, v = (x.transpose(1, 0, 2)[None] for x in (cache.k, cache.v))
        placed = {
            "CU_SEQLENS_K": Pointer(cache.ends[: len(kv_lens) + 1 - behind]),
            "total_k": cache.ends[-1] if behind else len(cache.k),
            "num_requests": len(cache.ends) - behind,
        }  # fmt: skip
    q = np.random.default_rng(seed + 1).standard_normal((total, Hq, D)).astype(np.float32)
    out = np.full((total, Hq, Dv), np.nan, np.float32)
    lse = np.full((total, Hq), np.nan, np.float32)

    def described(array, name):
        kind = next(each.type for each in source.arguments if each.name == name)
        found = DESCRIPTOR.match(kind)
        block = tuple(map(int, found["shape"].split(",")))
        return Descriptor(array, block, 1 if "8" in found["element"] else 2)

    def read(array, name):
        if not gathers(form):
            return {name: described(array, name)}
        # Of [pages, heads, keys, columns], of which the memory has keys first.
        steps = dict(
            zip("phn", (np.array(array.strides) // array.itemsize).tolist(), strict=False)
        )
        flat = array.transpose(0, 2, 1, 3).reshape(-1)
        return {name: Pointer(flat), "num_pages": len(array)} | {
            f"stride_{name.lower()}{axis}": step for axis, step in steps.items()
        }

    q_heads, out_heads = (
        x.reshape(total, Hkv, Hq // Hkv, -1).transpose(1, 0, 2, 3) for x in (q, out)
    )
    words = part_words(form, config, roomy) if config.splits else 0
    workspace = np.full(words, np.nan, np.float32)
    given = {
        "Q": described(q_heads, "Q"), **read(k, "K"), **read(v, "V"), **placed,
        "OUT": described(out_heads, "OUT"),
        "OUT_ROWS": Pointer(out.reshape(-1)), "LSE": Pointer(lse.reshape(-1)),
        "stride_oh": Dv, "stride_om": Hq * Dv, "Hq": Hq, "group": Hq // Hkv,
        "COUNTER": Pointer(np.zeros(1, np.int64)),
        "ROW_TILES": Pointer(
            np.array(row_tiles(q_lens, kv_lens, config, Hq // Hkv, parts, workers))
        ),
        "WORKSPACE": Pointer(workspace),
        "CU_SEQLENS": Pointer(np.cumsum([0, *q_lens])[: len(q_lens) + 1 - behind]),
        "total_q": total, "q_rows": q_lens[0], "sm_scale": 0.1,
        "SINKS": None if sinks is None else Pointer(np.array(sinks, np.float32)),
        **captured_values(form.score, score), **captured_values(form.mask, mask),
    }  # fmt: skip
    for name, scale in zip(("K_SCALE", "V_SCALE"), scales, strict=False):
        given[name] = Pointer(np.atleast_1d(np.float32(scale)))
        given["stride_scale"] = int(np.ndim(scale) > 0)
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            given[name] = Pointer(value.reshape(-1).numpy())
        elif type(value) is int:
            given[name] = Number(value)
    run(source, geometry(problem, config, device).programs, given, seed)
    if parts > 1:
        listed = np.reshape(given["ROW_TILES"].array[2:], (-1, 5))
        merge_parts(out, lse, listed, workspace, config, (q_lens, heads, sinks))
    for kept, scale in zip((cache.keys, cache.values), scales, strict=False):
        kept[:] = [each * np.broadcast_to(scale, Hkv)[:, None] for each in kept]
    return (out, lse), exact(q, q_lens, cache, score_mod, mask_mod, sinks)


def merge_parts(out, lse, listed, workspace, config, about):
    """Write the rows of tiles whose keys were cut, merged from their parts."""
    q_lens, (Hq, Hkv), sinks = about
    group, rows = Hq // Hkv, config.all_rows
    head_tiles, Dv = config.head_tiles(group), out.shape[-1]
    size = len(workspace) // (Dv + 1)
    outs = workspace[: size * Dv].reshape(-1, rows, Dv)
    logs = workspace[size * Dv :].reshape(-1, rows)
    starts = np.cumsum([0, *q_lens])
    for b, first, part, parts, slot in listed:
        if parts == 1 or part:
            continue
        for tile in range(Hkv * head_tiles):
            at = (slot + np.arange(parts)) * Hkv * head_tiles + tile
            base_2, values = logs[at] * np.log(2), outs[at]
            for row in range(rows):
                heads = config.packed_heads
                token, head = row // heads % config.BLOCK_M, row // (config.BLOCK_M * heads)
                if config.sliced(group):
                    token += (first + head) // group * config.BLOCK_M
                    head = (first + head) % group
                else:
                    token += first
                    head += row % heads + tile % head_tiles * config.heads
                if token >= q_lens[b] or head >= group:
                    continue
                h, at_row = tile // head_tiles * group + head, starts[b] + token
                extra = [] if sinks is None else [sinks[h]]
                total = np.logaddexp.reduce([*base_2[:, row], *extra])
                assert np.isnan(out[at_row, h]).all() and np.isnan(lse[at_row, h])
                lse[at_row, h] = total
                weights = np.exp(base_2[:, row] - max(total, -1e30))
                out[at_row, h] = weights @ values[:, row]


def exact(q, q_lens, cache, score_mod, mask_mod, sinks):
    """(out, lse) in float64.

    The last query of a request stands at its last key, the first one of a sequence at its first.
    """
    outs, totals, first = [], [], 0
    Hq, group = q.shape[1], q.shape[1] // cache.k.shape[-2]
    for b, q_len in enumerate(q_lens):
        k, v = (
            torch.from_numpy(x[b]).double().repeat_interleave(group, 1).transpose(0, 1)
            for x in (cache.keys, cache.values)
        )
        mine = torch.from_numpy(q[first : first + q_len]).double().transpose(0, 1)
        kv_len, first = k.shape[1], first + q_len
        scores = 0.1 * mine @ k.transpose(1, 2)
        past = max(kv_len - q_len, 0) if isinstance(cache, Cache) else 0
        at = (
            torch.tensor(b),
            torch.arange(Hq)[:, None, None],
            past + torch.arange(q_len)[:, None],
            torch.arange(kv_len)[None],
        )
        if score_mod is not None:
            scores = score_mod(scores, *at)
        if mask_mod is not None:
            scores = scores.where(mask_mod(*at), -torch.inf)
        logits = scores
        if sinks is not None:
            sink = torch.tensor(sinks).double()[:, None, None].expand(Hq, q_len, 1)
            logits = torch.cat((scores, sink), 2)
        total = logits.logsumexp(2)
        weights = (scores - total[..., None].clamp(min=-1e30)).exp()
        outs.append((weights @ v).transpose(0, 1))
        totals.append(total.T)
    return torch.cat(outs).numpy(), torch.cat(totals).numpy()
