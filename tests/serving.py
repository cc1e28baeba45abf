"""Batches of unequal lengths, their caches in every layout, and what judges a plan's run."""

import math
from dataclasses import dataclass, replace

import torch

from flexattn.problem import out_dtype
from flexattn.reference import Precision, Reference, attention
from flexattn.serving import DecodePlan, ServingConfig
from flexattn.verify.gate import judge
from tests.support import block_mask

SMALL = ServingConfig(16, 16, 4, 2)
MLA = ServingConfig(64, 128, 4, 1, 1, combine="launch", split_policy="whole")
PAIR = ServingConfig(64, 64, 8, 4, 1, combine="launch", split_policy="whole")
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Batch:
    """q [rows, Hq, D] of all requests, K and V of each [keys, Hkv, D], and the lengths."""

    q: torch.Tensor
    k: list
    v: list
    q_lens: list
    kv_lens: list

    @property
    def heads(self):
        return self.q.shape[1], self.k[0].shape[1]

    @property
    def device(self):
        return self.q.device

    def numbers(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def batch(q_lens, kv_lens, Hq=3, Hkv=1, D=16, Dv=None, dtype=torch.float32, device="cpu"):
    """Normal random tensors, the same on every device."""
    draw = torch.Generator().manual_seed(sum(kv_lens) + 7 * Hq + D)
    make = lambda *shape: torch.randn(shape, generator=draw).to(device, dtype)  # noqa: E731
    return Batch(
        make(sum(q_lens), Hq, D),
        [make(n, Hkv, D) for n in kv_lens],
        [make(n, Hkv, D if Dv is None else Dv) for n in kv_lens],
        list(q_lens),
        list(kv_lens),
    )


def with_rows(lengths, q_len):
    """Lengths of requests that have q_len rows among their keys, or no key."""
    return [max(n, q_len) if n else 0 for n in lengths]


def poisoned_cache(each, keys, layout="NHD", together=False):
    """A contiguous cache (K, V) [B, keys, Hkv, D], or one tensor of both, NaN where no key is."""
    pages = [_filled(x, keys) for x in each.k], [_filled(x, keys) for x in each.v]
    return _laid([torch.stack(x) for x in pages], layout, together)


def poisoned_pages(each, page, layout="NHD", together=False, spare=3):
    """A paged cache with its table: pages in random order, NaN in what no request uses."""
    counts = [-(-n // page) for n in each.kv_lens]
    total = sum(counts) + spare
    order = torch.randperm(total, generator=torch.Generator().manual_seed(total)).tolist()
    table = torch.full((len(counts), max(1, *counts)), -7, dtype=torch.int32)
    found = []
    for source in (each.k, each.v):
        pool = source[0].new_full((total, page, *source[0].shape[1:]), math.nan)
        place = iter(order)
        for b, (keys, count) in enumerate(zip(source, counts, strict=True)):
            for i in range(count):
                where = next(place)
                table[b, i] = where
                part = keys[i * page : (i + 1) * page]
                pool[where, : len(part)] = part
        found.append(pool)
    return _laid(found, layout, together), table.to(each.device)


def _filled(x, keys):
    whole = x.new_full((keys, *x.shape[1:]), math.nan)
    whole[: len(x)] = x
    return whole


def _laid(found, layout, together):
    if layout == "HND":
        found = [x.transpose(1, 2).contiguous() for x in found]
    return torch.stack(found, 1) if together else tuple(found)


def plan_for(each, *, page=0, ragged=False, config=None, spare=1, **options):
    """A plan whose maxima are a little above the batch, of so many requests more."""
    Hq, Hkv = each.heads
    lengths = {"total_q": len(each.q) + 5} if ragged else {"q_len": max(1, each.q_lens[0])}
    return DecodePlan(
        batch=len(each.kv_lens) + spare,
        kv_len=max(each.kv_lens) + 3,
        heads=(Hq, Hkv),
        head_dim=(each.q.shape[2], each.v[0].shape[2]),
        dtype=each.q.dtype,
        device=each.device,
        page_size=page,
        lse=True,
        config=config,
        **lengths,
        **options,
    )


def run_behind_prefix(plan, each, starts):
    """The second pass of a cascade over pages of 64: (out, lse) [B, Hq, …] of one query each."""
    cache, table = poisoned_pages(each, 64)
    start = each.numbers(starts)
    out, lse = plan.run(
        each.q[:, None], cache, block_table=table, kv_start=start,
        seq_lens=start + each.numbers(each.kv_lens),
    )  # fmt: skip
    return out[:, 0], lse[:, 0]


def assert_right_of_shared_keys(plan, each, shared):
    """A contiguous cache whose requests share K, V or both, by a stride of 0."""
    (_, heads, D), B = each.k[0].shape, len(each.kv_lens)
    cache = [
        torch.randn(B, max(each.kv_lens), heads, D, device=each.q.device).to(each.q.dtype)
        for _ in "KV"
    ]
    cache = [
        x[:1].expand(B, -1, -1, -1) if name in shared else x
        for name, x in zip("KV", cache, strict=True)
    ]
    k, v = ([x[b, :n] for b, n in enumerate(each.kv_lens)] for x in cache)
    out, lse = plan.run(each.q[:, None], tuple(cache), seq_lens=each.numbers(each.kv_lens))
    assert_right((out[:, 0], lse[:, 0]), replace(each, k=k, v=v))


def run(plan, each, *, layout="NHD", together=False, **call):
    """(out, lse) of a plan as [rows, Hq, Dv] and [rows, Hq]."""
    page = plan.problem.page
    if page:
        cache, call["block_table"] = poisoned_pages(each, page, layout, together)
    else:
        cache = poisoned_cache(each, plan.problem.kv_len, layout, together)
    q = each.q
    if plan.problem.total_q:
        ends = torch.tensor([0, *each.q_lens]).cumsum(0).tolist()
        call["cu_seqlens_q"] = each.numbers(ends)
    else:
        q = q.unflatten(0, (len(each.q_lens), -1))
    out, lse = plan.run(q, cache, seq_lens=each.numbers(each.kv_lens), **call)
    rows = len(each.q)
    return out.reshape(rows, *out.shape[-2:]), lse.reshape(rows, lse.shape[-1])


def wanted(each, b, precision, score_mod=None, mask_mod=None, sinks=None, scale=None):
    """The oracle's, or the reference run's, of one request: queries stand at its last keys."""
    first = sum(each.q_lens[:b])
    q = each.q[first : first + each.q_lens[b]].transpose(0, 1)[None].to(out_dtype(each.q.dtype))
    k, v = (x.transpose(0, 1)[None] for x in (each.k[b], each.v[b]))
    past = max(each.kv_lens[b] - each.q_lens[b], 0)
    score = mask = None
    if score_mod is not None:
        score = lambda s, i, h, m, n: score_mod(s, i + b, h, m + past, n)  # noqa: E731
    if mask_mod is not None:
        mask = lambda i, h, m, n: mask_mod(i + b, h, m + past, n)  # noqa: E731
    blocks = block_mask(mask, q, k, 16) if k.shape[2] and q.shape[2] else None
    found = attention(
        q, k, v, score_mod=score, block_mask=blocks, scale=scale, precision=precision
    )
    if sinks is None:
        return found
    sink = sinks.to(found.lse.dtype)[None, :, None]
    both = torch.logaddexp(found.lse, sink)
    kept = torch.exp(found.lse - torch.where(both == -math.inf, 0.0, both))
    out = (found.out.double() * kept[..., None].double()).to(found.out.dtype)
    return Reference(out, both, found.max_scores)


def assert_right(got, each, *, exact=None, **call):
    """Hold all requests of (out, lse or None) to the oracle.

    exact: the batch with the cache's values widened.
    """
    out, lse = got
    requests = range(len(each.q_lens))
    oracle, rounded = (
        [wanted(exact or each, b, precision, **call) for b in requests]
        for precision in (Precision.ORACLE, Precision.ROUNDED)
    )
    whole = [
        Reference(*(torch.cat(x, 2) for x in zip(*found, strict=True)))
        for found in (oracle, rounded)
    ]
    lse = None if lse is None else lse.T[None]
    verdict = judge((out.transpose(0, 1)[None], lse, None), *whole, out_dtype(each.q.dtype))
    assert verdict.passed, verdict.message()


def check(
    each, *, runs=1, layout="NHD", together=False, ragged=None, sinks=None, exact=None,
    given=lambda plan: {}, **options,
):  # fmt: skip
    """Make a plan of a batch and hold each of its runs to the oracle; returns the plan.

    options: those of `plan_for`. given: what runs of the plan are given beside the batch.
    """
    ragged = len(set(each.q_lens)) > 1 if ragged is None else ragged
    plan = plan_for(each, ragged=ragged, sinks=sinks is not None, layout=layout, **options)
    call = {} if sinks is None else {"sinks": sinks}
    mods = {name: options[name] for name in ("score_mod", "mask_mod") if name in options}
    for _ in range(runs):  # counters are left as they were found
        got = run(plan, each, layout=layout, together=together, **call, **given(plan))
        assert_right(got, each, exact=exact, **call, **mods)
    return plan


def quantized(each, dtype, per_head):
    """The batch with K and V in 8 bits, what they stand for, and their scales."""
    Hkv = each.heads[1]
    draw = torch.rand(2, Hkv if per_head else 1, generator=torch.Generator().manual_seed(3))
    scales = (0.5 + draw).to(each.device)
    eights, wides = [], []
    for source, scale in zip((each.k, each.v), scales, strict=True):
        step = scale.view(1, -1, 1)
        eights.append([(x.float() / step).to(dtype) for x in source])
        wides.append([x.float() * step for x in eights[-1]])
    few = replace(each, k=eights[0], v=eights[1])
    return few, replace(each, k=wides[0], v=wides[1]), scales[0], scales[1]


def finely_quantized(each, dtype, scales, page):
    """The batch with K and V in 8 bits, what they stand for, and a batch of scales [keys, H, 1].

    Scales differ by up to 10,000 from one page, token or head to the next.
    """
    draw = torch.Generator().manual_seed(11)
    found = []
    for source in (each.k, each.v):
        eights, wides, steps = [], [], []
        for x in source:
            n, Hkv = x.shape[:2]
            count, heads = -(-n // page) if "page" in scales else n, Hkv if "head" in scales else 1
            step = 10.0 ** (4 * torch.rand(count, heads, 1, generator=draw) - 3).to(x.device)
            step = step.repeat_interleave(page, 0)[:n] if "page" in scales else step
            eights.append(x.to(dtype))
            wides.append(eights[-1].float() * step)
            steps.append(step)
        found.append((eights, wides, steps))
    (k, wide_k, k_steps), (v, wide_v, v_steps) = found
    return (replace(each, k=k, v=v), replace(each, k=wide_k, v=wide_v),
            replace(each, k=k_steps, v=v_steps))  # fmt: skip


def check_finely_scaled(each, scales, *, kv_dtype, page, layout="NHD", **more):
    """The same over a cache of 8 bits with scales of pages or tokens."""
    few, wide, steps = finely_quantized(each, kv_dtype, scales, page)
    check(
        few, exact=wide, scaled=scales, kv_dtype=kv_dtype, page=page, layout=layout,
        given=lambda plan: scale_tensors(steps, plan, scales, layout), **more,
    )  # fmt: skip


def scale_tensors(steps, plan, scales, layout="NHD"):
    """k_scale and v_scale of a plan's run, where `run` has the tokens; NaN where no key is."""
    page = plan.problem.page
    if page:
        laid, _ = poisoned_pages(steps, page, layout)
    else:
        laid = poisoned_cache(steps, plan.problem.kv_len, layout)
    keys_at = 1 if layout == "NHD" else 2
    found = []
    for x in laid:
        x = x[..., 0]
        if "head" not in scales:
            x = x.squeeze(3 - keys_at)
            found.append(x[:, 0] if "page" in scales else x)
        else:
            found.append(x.select(keys_at, 0) if "page" in scales else x)
    return {"k_scale": found[0], "v_scale": found[1]}
