"""Requests of a million keys: numbers that pass 2^31, in little memory."""

import math

import numpy as np
import pytest
import torch

from flexattn.catalogue import sliding_window
from flexattn.errors import InputError
from flexattn.reference import Precision, attention
from flexattn.serving import DecodePlan, ServingConfig
from tests.serving import SMALL

MILLION, PAGE = 2**20, 16
WARP = ServingConfig(8, 64, 2, 1, 2, 1, "await", "heads")
F16 = torch.float16


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(F16)


def untouched(shape, dtype):
    """A tensor whose memory the system gives where it is written, and nowhere else."""
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.empty(size, np.uint8)).view(dtype).view(shape)


def near(got, wanted):
    torch.testing.assert_close(got.double(), wanted.double(), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("config", [SMALL, WARP], ids=["program", "warp"])
def test_positions_and_tables_of_a_million_keys(config):
    """The last keys of 65,536 pages, which are a few pages again and again; the window skips."""
    real, lengths = 11, [MILLION, MILLION - 37, 5]
    k, v, q = normal(real, PAGE, 1, 64), normal(real, PAGE, 1, 64).flip(0), normal(3, 1, 4, 64)
    table = (torch.arange(MILLION // PAGE, dtype=torch.int32) % real).repeat(3, 1)
    window = sliding_window(150)
    plan = DecodePlan(
        batch=3, kv_len=MILLION, heads=(4, 1), head_dim=64, page_size=PAGE, dtype=F16,
        device="cpu", mask_mod=window, score_mod=lambda s, b, h, q, kv: s + (kv - q) / (h + 9.0),
        lse=True, config=config,
    )  # fmt: skip
    lens = torch.tensor(lengths, dtype=torch.int32)
    out, lse = plan.run(q, (k, v), seq_lens=lens, block_table=table)
    for b, n in enumerate(lengths):
        keys = torch.arange(max(0, n - 151), n)
        own = [x[table[b, keys // PAGE].long(), keys % PAGE].transpose(0, 1)[None] for x in (k, v)]
        far = lambda s, i, h, m, at, keys=keys, n=n: s + (keys[at] - n + 1) / (h + 9.0)  # noqa: E731
        exact = attention(
            q[b].transpose(0, 1)[None], *own, score_mod=far, precision=Precision.ORACLE
        )
        near(out[b, 0], exact.out[0, :, 0])
        near(lse[b, 0], exact.lse[0, :, 0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("keys", "config"),
    [
        (MILLION, ServingConfig(16, 256, 4, 1)),
        (MILLION, ServingConfig(8, 512, 8, 1, 1, 1, "await", "heads")),
        (MILLION // 4, None),
    ],
    ids=["program", "warp", "invariant"],
)
def test_every_key_of_a_million(keys, config):
    """Each page counts as often as the table names it: a log-sum-exp more by its logarithm."""
    real = 16
    k, v, q = normal(real, PAGE, 1, 64), normal(real, PAGE, 1, 64).flip(0), normal(1, 1, 4, 64)
    table = (torch.arange(keys // PAGE, dtype=torch.int32) % real)[None]
    plan = DecodePlan(
        batch=1, kv_len=keys, heads=(4, 1), head_dim=64, page_size=PAGE, dtype=F16, lse=True,
        device="cpu", config=config, batch_invariant=config is None,
    )  # fmt: skip
    out, lse = plan.run(
        q, (k, v), seq_lens=torch.tensor([keys], dtype=torch.int32), block_table=table
    )
    every = (x.flatten(0, 1).transpose(0, 1)[None] for x in (k, v))
    exact = attention(q.transpose(1, 2), *every, precision=Precision.ORACLE)
    near(out[0, 0], exact.out[0, :, 0])
    near(lse[0, 0], exact.lse[0, :, 0] + math.log(keys // PAGE // real))


# Pages of 8 bits whose last one lies beyond 2^31, and beyond 2^32, elements from the first.
POOLS = {
    "2^31": (2**31 // (PAGE * 2 * 64) + 2, "NHD"),
    "2^32": (2**32 // (PAGE * 2 * 64) + 2, "HND"),
}


@pytest.mark.parametrize("config", [SMALL, WARP], ids=["program", "warp"])
@pytest.mark.parametrize("name", POOLS)
def test_pages_far_from_the_first(name, config):
    (count, layout), e4m3 = POOLS[name], torch.float8_e4m3fn
    shape = (count, PAGE, 2, 64) if layout == "NHD" else (count, 2, PAGE, 64)
    pool = untouched(shape, e4m3)
    pages = [count - 1, 3, count - 2]
    keys = normal(3, *shape[1:]).to(e4m3)
    for page, each in zip(pages, keys, strict=True):
        pool[page] = each
    q = normal(1, 1, 6, 64)
    plan = DecodePlan(
        batch=1, kv_len=48, heads=(6, 2), head_dim=64, page_size=PAGE, dtype=F16, kv_dtype=e4m3,
        layout=layout, device="cpu", config=config,
    )  # fmt: skip
    table = torch.tensor([pages], dtype=torch.int32)
    out = plan.run(
        q, (pool, pool), seq_lens=torch.tensor([45], dtype=torch.int32), block_table=table
    )
    own = keys.float().transpose(1, 2) if layout == "HND" else keys.float()
    own = own.flatten(0, 1)[:45].transpose(0, 1)[None]
    exact = attention(q.transpose(1, 2), own, own, precision=Precision.ORACLE)
    near(out.transpose(1, 2), exact.out)


def test_heads_that_lie_far_apart():
    """Pools by heads, [Hkv, pages, page, D]: offsets of heads wrapped at 2^32, without a word."""
    e4m3 = torch.float8_e4m3fn
    plan = DecodePlan(
        batch=1, kv_len=48, heads=(3, 3), head_dim=64, page_size=PAGE, dtype=F16, kv_dtype=e4m3,
        layout="HND", device="cpu", config=SMALL,
    )  # fmt: skip
    q, lens = normal(1, 1, 3, 64), torch.tensor([45], dtype=torch.int32)
    # The farthest head that 32 bits reach.
    count = (2**31 - 1) // (PAGE * 64)
    pool = untouched((3, count, PAGE, 64), e4m3)
    pages = torch.tensor([[count - 1, 5, 7]], dtype=torch.int32)
    pool[:, pages[0].long()] = keys = normal(3, 3, PAGE, 64).to(e4m3)
    cache = pool.transpose(0, 1)
    out = plan.run(q, (cache, cache), seq_lens=lens, block_table=pages)
    own = keys.float().flatten(1, 2)[None, :, :45]
    near(
        out.transpose(1, 2), attention(q.transpose(1, 2), own, own, precision=Precision.ORACLE).out
    )
    # One more head would begin behind 2^32.
    plan = DecodePlan(
        batch=1, kv_len=48, heads=(4, 4), head_dim=64, page_size=PAGE, dtype=F16, kv_dtype=e4m3,
        layout="HND", device="cpu", config=SMALL,
    )  # fmt: skip
    far = torch.empty_strided((count, 4, PAGE, 64), cache.stride(), dtype=e4m3, device="meta")
    with pytest.raises(InputError, match=r"2\*\*32 elements"):
        plan.run(normal(1, 1, 4, 64), (far, far), seq_lens=lens, block_table=pages)


def test_one_request_may_be_contiguous_beyond_the_largest_stride():
    """Of one request no kernel takes the step to a next one."""
    cache = untouched((1, MILLION, 16, 128), F16)
    assert cache.stride(0) == 2**31
    cache[0, :40] = keys = normal(40, 16, 128)
    q = normal(1, 1, 16, 128)
    plan = DecodePlan(
        batch=2, kv_len=MILLION, heads=(16, 16), head_dim=128, dtype=F16, device="cpu",
        config=ServingConfig(16, 64, 4, 1),
    )  # fmt: skip
    out = plan.run(q, (cache, cache), seq_lens=torch.tensor([40], dtype=torch.int32))
    own = keys.transpose(0, 1)[None]
    near(
        out.transpose(1, 2), attention(q.transpose(1, 2), own, own, precision=Precision.ORACLE).out
    )
    two = torch.empty((2, MILLION, 16, 128), dtype=F16, device="meta")
    with pytest.raises(InputError, match=r"a stride is below 2\*\*31"):
        lens = torch.tensor([40, 40], dtype=torch.int32)
        plan.run(q.expand(2, -1, -1, -1).contiguous(), (two, two), seq_lens=lens)
