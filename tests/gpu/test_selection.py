"""Keys that data choose on a GPU: other choices without a wait, replayed graphs, gradients."""

from dataclasses import replace

import pytest
import torch

from flexattn import Selection, flex_attention
from flexattn.catalogue import causal, sliding_window
from flexattn.frontend import selection as selection_module
from flexattn.settings import override
from tests.selections import (
    assert_gradients,
    assert_right,
    check_plan,
    drawn,
    drawn_units,
    latent_of_eight_bits,
    pairs,
)
from tests.serving import (
    assert_right as assert_plan_right,
    batch,
    plan_for,
    poisoned_pages,
    scale_tensors,
)

pytestmark = pytest.mark.usefixtures("poisoned")


def made(seed, Hq=8, Hkv=2, length=1000, width=128, dtype=torch.bfloat16):
    draw = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(2, h, length, width, generator=draw, device="cuda", dtype=dtype)
        for h in (Hq, Hkv, Hkv)
    ]


def chosen(seed, unit, rows, mask_mod=causal, heads=2, length=1000, k=4):
    draw = torch.Generator("cuda").manual_seed(seed)
    shape = (2, heads, -(-length // rows), k)
    indices = torch.randint(-1, -(-length // unit) + 1, shape, generator=draw, device="cuda")
    return Selection(indices.int(), None, unit, rows, mask_mod)


@pytest.mark.parametrize("mask_mod", [None, causal], ids=["", "causal"])
@pytest.mark.parametrize(
    ("unit", "rows", "heads"),
    [(128, 128, 2), (64, 64, 8), (64, 128, 1), (128, 64, 2), (16, 192, 2), (64, 1, 2), (1, 1, 1)],
)
def test_forward(unit, rows, heads, mask_mod):
    q, k, v = made(unit)
    selection = chosen(rows, unit, rows, mask_mod, heads)
    assert_right(selection, q, k, v)


@pytest.mark.parametrize("mask_mod", [None, causal], ids=["", "causal"])
@pytest.mark.parametrize(
    ("unit", "rows", "Hq"), [(64, 1, 32), (32, 4, 8), (64, 1, 2), (16, 2, 40)]
)
def test_what_single_rows_choose_is_gathered(unit, rows, Hq, mask_mod, monkeypatch):
    """Of long sequences; here of any."""
    monkeypatch.setattr(selection_module, "_FLOPS_OF_A_BYTE", 0)
    q, k, v = made(unit, Hq)
    selection = chosen(rows, unit, rows, mask_mod, k=9)
    assert selection.apart(q, k, v, True, ()) is not None
    assert_right(selection, q, k, v)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("unit", "rows"), [(128, 128), (64, 64), (64, 1)])
def test_gradients(unit, rows, width):
    given = made(unit, width=width)
    for seed in (1, 2):
        assert_gradients(chosen(seed, unit, rows), *given)


def test_thirty_drawn():
    """`python -m tests.random_mods selections` draws 500."""
    for seed in range(30):
        selection, (batch, Hq, Hkv, q_len, kv_len) = drawn(seed, (1, 16, 32, 64, 128))
        draw = torch.Generator("cuda").manual_seed(seed)
        q, k, v = (
            torch.randn(batch, h, n, 64, generator=draw, device="cuda", dtype=torch.bfloat16)
            for h, n in ((Hq, q_len), (Hkv, kv_len), (Hkv, kv_len))
        )
        counts = None if selection.counts is None else selection.counts.cuda()
        on_gpu = Selection(
            selection.indices.cuda(), counts, selection.unit, selection.rows, selection.mask_mod
        )
        assert_right(on_gpu, q, k, v)


def test_a_new_choice_waits_for_nothing():
    q, k, v = made(5)
    with override(check=False), torch.no_grad():
        flex_attention(q, k, v, block_mask=chosen(1, 64, 64), enable_gqa=True)
        selection = chosen(2, 64, 64)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = flex_attention(q, k, v, block_mask=selection, enable_gqa=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert_right(selection, q, k, v, (out, None, None))


def test_a_replayed_graph_reads_what_was_chosen_since():
    q, k, v = made(6)
    selection, other = chosen(1, 64, 128), chosen(2, 64, 128)
    flex_attention(q, k, v, block_mask=selection, enable_gqa=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flex_attention(q, k, v, block_mask=selection, enable_gqa=True)
    selection.indices.copy_(other.indices)
    graph.replay()
    assert_right(other, q, k, v, (out, None, None))


@pytest.mark.compiled
def test_a_compiled_graph():
    q, k, v = made(7)

    def attend(q, k, v, indices):
        mask = Selection(indices, None, 64, 64, causal)
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    compiled = torch.compile(attend, fullgraph=True)
    for seed in (1, 2):
        selection = chosen(seed, 64, 64)
        out = compiled(q, k, v, selection.indices)
        assert_right(selection, q, k, v, (out.detach(), None, None))


PLANS = {
    "pages": {"unit": 16},
    "several pages": {"unit": 64, "k": 9, "mask_mod": sliding_window(700), "sinks": True},
    "tokens": {"unit": 1, "k": 300, "page": 64, "layout": "HND"},
    "contiguous": {"unit": 32, "page": 0, "heads": (6, 2), "D": 64},
    "chunks": {"unit": 64, "q_lens": [40, 1, 0, 1, 17, 3], "mask_mod": causal},
    "latent": {"unit": 1, "k": 2048, "page": 64, "heads": (16, 1), "D": 576},
    "latent of 128 heads": {"unit": 1, "k": 200, "page": 64, "heads": (128, 1), "D": 576},
    "latent of eight bits": {
        "unit": 1, "k": 300, "page": 64, "heads": (16, 1), "D": 576, "eight": True
    },
}  # fmt: skip


def plan_batch(q_lens=(1,) * 6, heads=(32, 8), D=128):
    dims = (576, 512) if D == 576 else (D, D)
    lengths = [2047, 90, 1, 517, 4096, 33]
    each = batch(q_lens, lengths, *heads, *dims, torch.bfloat16, "cuda")
    for k, v in zip(each.k, each.v, strict=True) if D == 576 else ():
        v.copy_(k[..., :512])
    return each


@pytest.mark.parametrize("name", PLANS)
def test_plans(name):
    about = {"k": 20, "page": 16, "heads": (32, 8), **PLANS[name]}
    sizes = {name: about.pop(name) for name in ("q_lens", "heads", "D") if name in about}
    each, (k, unit) = plan_batch(**sizes), (about.pop("k"), about.pop("unit"))
    about["shared_kv"] = sizes.get("D") == 576
    if about.pop("sinks", False):
        about["sinks"] = torch.randn(each.heads[0], device="cuda")
    if about.pop("eight", False):
        dtype = torch.float8_e4m3fn
        few, wide, steps = latent_of_eight_bits(each, dtype, about["page"])
        given = lambda plan: scale_tensors(steps, plan, "token")  # noqa: E731
        check_plan(few, k, unit, exact=wide, kv_dtype=dtype, scaled="token", given=given, **about)
        return
    plan = check_plan(each, k, unit, **about)
    assert plan.config.for_mla == about["shared_kv"]
    assert about["shared_kv"] or plan.config.split_policy == "even"


@pytest.mark.parametrize(("heads", "q_len"), [(16, 1), (128, 1), (24, 3)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_latent_plans_of_eight_bits(dtype, heads, q_len):
    """Widened by the warps that gather; as many programs as merge, and several work tiles."""
    each = plan_batch((q_len,) * 6, (heads, 1), 576)
    step = torch.full((1,), 0.75, device="cuda")
    k = [(x.float() / step).to(dtype) for x in each.k]
    wide = [x.float() * step for x in k]
    few, exact = (replace(each, k=keys, v=[x[..., :512] for x in keys]) for keys in (k, wide))
    plan = check_plan(
        few, 700, 1, exact=exact, kv_dtype=dtype, scaled=True, page=64, shared_kv=True,
        given=lambda plan: {"k_scale": step, "v_scale": step},
    )  # fmt: skip
    assert plan.config.for_mla


@pytest.mark.parametrize("unit", [1, 7, 64])
@pytest.mark.parametrize("page", [0, 1, 16])
def test_latent_plans_of_any_page(page, unit):
    """Many rows choose, each for itself: as the rows of a prompt do."""
    lengths = [1 + 13 * n % 900 for n in range(150)]
    each = batch([1] * 150, lengths, 20, 1, 576, 512, torch.bfloat16, "cuda")
    each = replace(each, v=[x[..., :512] for x in each.k])
    k = 64 // unit + 1
    plan = check_plan(each, k, unit, page=page, shared_kv=True, mask_mod=sliding_window(500))
    assert plan.config.for_mla


def test_a_replayed_plan_reads_what_was_chosen_since():
    each = plan_batch()
    plan = plan_for(each, page=16, selection=(20, 16))
    units = drawn_units(each, 20, 16)
    cache, table = poisoned_pages(each, 16)
    call = {"seq_lens": each.numbers(each.kv_lens), "block_table": table, "selection": units}
    with override(check=False):
        plan.run(each.q[:, None], cache, **call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _ = plan.run(each.q[:, None], cache, **call)
        units.copy_(units.flip(0))
        graph.replay()
        found = out.clone()
        wanted, _ = plan.run(each.q[:, None], cache, **call)
    assert torch.equal(found, wanted)
    kept = pairs(Selection(units[:, :, None], None, 16), 6, 32, 1, 4096)[:, :, 0].cuda()
    assert_plan_right(
        (found[:, 0], None), each, mask_mod=lambda b, h, q_idx, kv_idx: kept[b, h, kv_idx]
    )
