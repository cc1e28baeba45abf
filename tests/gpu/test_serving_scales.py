"""Caches whose pages, tokens or heads have scales of their own, and what stores them, on a GPU."""

import math

import pytest
import torch

from flexattn.catalogue import causal, sliding_window, softcap
from flexattn.serving import AppendPlan, DecodePlan, Rope, ServingConfig
from flexattn.settings import override
from tests.appending import empty_cache, empty_scales, expected, new_tokens
from tests.serving import (
    EIGHT_BITS,
    assert_right,
    batch,
    check_finely_scaled,
    finely_quantized,
    run,
    scale_tensors,
    with_rows,
)

pytestmark = pytest.mark.usefixtures("poisoned")
E4M3, E5M2 = EIGHT_BITS
CONFIGS = {
    "default": None,
    "4 warps of 16 keys": ServingConfig(8, 64, 4, 1, 2, 1, "await", "heads"),
    "tile": ServingConfig(16, 64, 4, 3, 2, 1),
    "two kernels": ServingConfig(16, 64, 4, 2, 1, 1, "launch"),
}
SCALES = ["page", "page_head", "token", "token_head"]
LENGTHS = [2047, 0, 1, 517, 9001, 33, 128]


def check(scales, *, dtype=E4M3, page=16, q_len=1, D=128, Dv=None, **more):
    q_lens = q_len if isinstance(q_len, list) else [q_len] * len(LENGTHS)
    lengths = LENGTHS if isinstance(q_len, list) else with_rows(LENGTHS, q_len)
    each = batch(q_lens, lengths, 32, 8, D, Dv, dtype=torch.bfloat16, device="cuda")
    check_finely_scaled(each, scales, kv_dtype=dtype, page=page, runs=3, **more)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("name", CONFIGS)
def test_each_kernel(name, scales):
    check(scales, config=CONFIGS[name])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [0, 3, 64])
@pytest.mark.parametrize("name", ["default", "tile"])
def test_caches(name, page, layout):
    check("token_head", config=CONFIGS[name], dtype=E5M2, page=page, layout=layout, D=64, Dv=128)


@pytest.mark.parametrize("name", ["causal", "window", "cap", "chunks"])
def test_mods(name):
    mods = {
        "causal": {"mask_mod": causal, "q_len": 4},
        "window": {"mask_mod": sliding_window(300)},
        "cap": {"score_mod": softcap(30.0), "sinks": torch.randn(32, device="cuda")},
        "chunks": {"mask_mod": causal, "q_len": [300, 0, 1, 1, 40, 1, 1]},
    }[name]
    check("token_head", **mods)


def test_one_long_request():
    few, wide, steps = finely_quantized(
        batch([1], [30_011], 32, 8, 128, dtype=torch.bfloat16, device="cuda"), E4M3, "token", 16
    )
    plan = DecodePlan(
        batch=1, kv_len=32_768, heads=(32, 8), head_dim=128, page_size=16, kv_dtype=E4M3,
        scaled="token", lse=True,
        config=ServingConfig(8, 128, 8, 1, 1, 1, "await", "round"),
    )  # fmt: skip
    got = run(plan, few, **scale_tensors(steps, plan, "token"))
    assert_right(got, few, exact=wide)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("scaled", [False, "tensor", "head", *SCALES])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.bfloat16, E4M3), (torch.float16, E5M2), (torch.float32, E4M3)],
    ids=str,
)
def test_what_is_stored(dtype, kv_dtype, scaled, layout):
    """Bit for bit what torch stores: division and rounding are exact."""
    stored(dtype, kv_dtype, scaled, layout, None)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("base", [10000.0, None])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, E4M3], ids=str)
def test_what_is_stored_of_rotated_keys(kv_dtype, base, interleaved):
    """A product and a sum are one instruction: here and there the next number."""
    scaled = "token_head" if kv_dtype == E4M3 else False
    stored(torch.bfloat16, kv_dtype, scaled, "NHD", Rope(64, interleaved, base))


def stored(dtype, kv_dtype, scaled, layout, rope):
    pages, page, Hkv, dims, tokens = 40, 16, 5, (128, 72), 333
    k, v = new_tokens(tokens, Hkv, *dims, dtype, "cuda")
    cache = empty_cache(pages, page, Hkv, dims, kv_dtype, layout, "cuda")
    scales = empty_scales(scaled, pages, page, Hkv, layout, "cuda") if scaled else [None, None]
    slots = torch.randperm(pages * page, generator=torch.Generator().manual_seed(1))[:tokens]
    slots[5], slots[99], slots[332] = -1, pages * page, 2**40
    slots, call, tables = slots.cuda(), {}, ()
    positions = torch.arange(tokens, device="cuda") * 97
    if rope is not None:
        call["positions"] = positions
        if rope.base is None:
            turns = torch.arange(tokens * 97)[:, None] * Rope(rope.dim, base=500.0).inv_freq()
            tables = turns.cos().cuda(), turns.sin().cuda()
            call |= {"cos": tables[0], "sin": tables[1]}
    if scaled:
        call |= {"k_scale": scales[0], "v_scale": scales[1]}
    wanted, steps = expected(
        k, v, cache, scales, slots, page=page, layout=layout, scaled=scaled, rope=rope,
        positions=positions, tables=tables,
    )  # fmt: skip
    plan = AppendPlan(
        heads=Hkv, head_dim=dims, page_size=page, dtype=dtype, kv_dtype=kv_dtype, layout=layout,
        scaled=scaled, rope=rope,
    )  # fmt: skip
    with override(check=False):
        plan.run(k, v, cache, slot_mapping=slots, **call)
    for got, right in zip((*cache, *scales), (*wanted, *steps), strict=True):
        if got is None:
            continue
        got, right = got.float(), right.float()
        assert torch.equal(got.isnan(), right.isnan())
        got, right = got.nan_to_num(0), right.nan_to_num(0)
        if rope is None:
            assert torch.equal(got, right)
        else:
            assert ((got - right).abs() <= right.abs() / 7 + 2**-9).all()
            assert (got != right).float().mean() < 0.02 or got.shape == steps[0].shape


def test_a_graph_stores_and_decodes():
    """Captured once, replayed as a request grows: nothing is allocated, and nothing waited for."""
    page, tokens, layers = 16, 40, 2
    k, v, q = (torch.randn(tokens, n, 128, device="cuda").bfloat16() for n in (8, 8, 32))
    caches = [empty_cache(8, page, 8, (128, 128), E4M3, "NHD", "cuda") for _ in range(layers)]
    scales = [empty_scales("token_head", 8, page, 8, "NHD", "cuda") for _ in range(layers)]
    append = AppendPlan(
        heads=8, head_dim=128, page_size=page, kv_dtype=E4M3, scaled="token_head", slots=None
    )
    decode = DecodePlan(
        batch=2, kv_len=64, heads=(32, 8), head_dim=128, page_size=page, kv_dtype=E4M3,
        scaled="token_head",
    )  # fmt: skip
    table = torch.tensor([[3, 1, 6, 0], [2, 5, 4, 7]], dtype=torch.int32, device="cuda")
    lens = torch.tensor([1, 0], dtype=torch.int32, device="cuda")
    new = [torch.zeros(2, n, 128, dtype=torch.bfloat16, device="cuda") for n in (8, 8, 32)]

    def step():
        for cache, (k_scale, v_scale) in zip(caches, scales, strict=True):
            about = {
                "block_table": table,
                "seq_lens": lens,
                "k_scale": k_scale,
                "v_scale": v_scale,
            }
            append.run(new[0], new[1], cache, **about)
            out = decode.run(new[2][:, None], cache, **about)
        return out

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    before = torch.cuda.memory_allocated()
    for t in range(tokens):
        for x, source in zip(new, (k, v, q), strict=True):
            x[0] = source[t]
        lens[0] = t + 1
        graph.replay()
    assert torch.cuda.memory_allocated() == before
    keys, values = (x[:tokens].float().repeat_interleave(4, 1) for x in (k, v))
    weights = (torch.einsum("hd,nhd->hn", q[-1].float(), keys) / math.sqrt(128)).softmax(-1)
    right = torch.einsum("hn,nhd->hd", weights, values)
    # A number of e4m3 is off by up to a sixteenth of itself.
    assert (out[0, 0].float() - right).norm() < 0.05 * right.norm()
    assert bool((out[1] == 0).all())
