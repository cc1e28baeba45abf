"""The kernel that stores new keys and values, interpreted, against plain torch token by token."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from flexattn.errors import InputError, InputTypeError
from flexattn.runtime.build import Builder
from flexattn.serving import AppendPlan, Rope, append_paged_kv_cache, flex_decode
from flexattn.settings import override
from tests.appending import empty_cache, empty_scales, expected, new_tokens
from tests.covering import pairwise

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALED = ["tensor", "head", "page", "page_head", "token", "token_head"]
PAGES = 7


def same(got, wanted):
    """Bit for bit, NaN included."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    return torch.equal(got.contiguous().view(kind), wanted.contiguous().view(kind))


def check(
    *, tokens=11, Hkv=3, D=16, Dv=None, dtype=torch.bfloat16, kv_dtype=E4M3, page=4, layout="NHD",
    scaled=False, rope=None, slots=None, tables=None, slot_dtype=torch.int64,
):  # fmt: skip
    dims = (D, D if Dv is None else Dv)
    k, v = new_tokens(tokens, Hkv, *dims, dtype)
    cache = empty_cache(PAGES, page, Hkv, dims, kv_dtype, layout)
    scales = empty_scales(scaled, PAGES, page, Hkv, layout) if scaled else [None, None]
    if slots is None:
        slots = torch.randperm(PAGES * page, generator=torch.Generator().manual_seed(2))[:tokens]
        slots[1], slots[-1] = -1, PAGES * page
    positions = torch.arange(tokens) * 37 % 101
    plan = AppendPlan(
        heads=Hkv, head_dim=dims, page_size=page, dtype=dtype, kv_dtype=kv_dtype, layout=layout,
        scaled=scaled, rope=rope, slots=slot_dtype, device="cpu",
    )  # fmt: skip
    wanted = expected(
        k, v, cache, scales, slots, page=page, layout=layout, scaled=scaled, rope=rope,
        positions=positions, tables=tables or (),
    )  # fmt: skip
    call = {} if not scaled else {"k_scale": scales[0], "v_scale": scales[1]}
    if rope is not None:
        call["positions"] = positions.to(slot_dtype)
    if tables is not None:
        call |= {"cos": tables[0], "sin": tables[1]}
    with override(check=False):  # slots beyond the cache are left out
        plan.run(k, v, cache, slot_mapping=slots.to(slot_dtype), **call)
    return cache, scales, wanted


def assert_stored(**about):
    cache, scales, (stored, steps) = check(**about)
    for got, wanted in zip((*cache, *scales), (*stored, *steps), strict=True):
        if got is not None and about.get("rope") is not None and about["rope"].base is not None:
            # Numpy's cosines are not torch's: here and there the next number of eight bits.
            got, wanted = got.float().nan_to_num(0), wanted.float().nan_to_num(0)
            assert ((got - wanted).abs() <= wanted.abs() / 7 + 2**-9).all()
            assert (got != wanted).float().mean() < 0.01 or got.shape == scales[0].shape
        else:
            assert got is None or same(got, wanted)


@pytest.mark.oldest
@pairwise(kv_dtype=[E4M3, E5M2], scaled=[False, *SCALED], layout=["NHD", "HND"])
def test_eight_bits(kv_dtype, scaled, layout):
    assert_stored(kv_dtype=kv_dtype, scaled=scaled, layout=layout)


@pytest.mark.parametrize(("D", "Dv", "page"), [(16, 16, 1), (40, 24, 3), (128, 64, 16)])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, E4M3),
    ],
    ids=str,
)
def test_dtypes_and_sizes(dtype, kv_dtype, D, Dv, page):
    scaled = "token_head" if kv_dtype == E4M3 else False
    assert_stored(
        dtype=dtype, kv_dtype=kv_dtype, D=D, Dv=Dv, page=page, scaled=scaled, tokens=7,
        slot_dtype=torch.int32,
    )  # fmt: skip


@pairwise(
    angles=["base", "tables", "one table of bfloat16"],
    interleaved=[pytest.param(False, id="halves"), pytest.param(True, id="interleaved")],
    scaled=[False, "head", "token", "token_head"],
)
def test_keys_are_rotated_first(angles, interleaved, scaled):
    """In float32, and of some columns alone."""
    dim, tables, about = 24, None, {}
    if angles == "base":
        about["base"] = 5000.0
    else:
        turns = torch.arange(101)[:, None] * Rope(dim, base=300.0).inv_freq()
        whole = torch.cat((turns.cos(), turns.sin()), 1)
        if angles != "tables":
            about["table"] = torch.bfloat16
        tables = whole.to(about.get("table", torch.float32)).chunk(2, 1)
    rope = Rope(dim, interleaved, **about)
    assert_stored(D=48, Dv=16, rope=rope, tables=tables, scaled=scaled)


@pytest.mark.parametrize("heads", [70, 600])
def test_one_scale_of_more_heads_than_a_program_has_at_once(heads):
    """Of 600 heads, 512 and then the rest."""
    assert_stored(scaled="token", Hkv=heads, tokens=3, rope=Rope(8, base=100.0), page=2)


def laid_out(seed, ragged):
    """Pages of three requests, their lengths, the slots of their last tokens, and how many."""
    page, q_lens = 4, [3, 0, 5] if ragged else [2, 2, 2]
    lengths = [9, 6, 17]
    order = torch.randperm(PAGES * 2, generator=torch.Generator().manual_seed(seed))
    table = order[: 3 * 4].reshape(3, 4).int()
    slots = [
        int(table[b, at // page]) * page + at % page if at < 16 else -1
        for b, n in enumerate(lengths)
        for at in range(n - q_lens[b], n)
    ]
    positions = [at for b, n in enumerate(lengths) for at in range(n - q_lens[b], n)]
    return table, lengths, torch.tensor(slots), torch.tensor(positions), q_lens


@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
@pytest.mark.parametrize("scaled", [False, "token_head"])
def test_tokens_that_a_page_table_places(scaled, ragged):
    """The last ones of their requests; one that the table has no page for is left out."""
    table, lengths, slots, positions, q_lens = laid_out(3, ragged)
    rope = Rope(8, base=100.0)
    k, v = new_tokens(len(slots), 2, 16, 16, torch.bfloat16)
    cache = empty_cache(2 * PAGES, 4, 2, (16, 16), E4M3, "HND")
    scales = empty_scales(scaled, 2 * PAGES, 4, 2, "HND") if scaled else [None, None]
    stored, steps = expected(
        k, v, cache, scales, slots, page=4, layout="HND", scaled=scaled, rope=rope,
        positions=positions,
    )  # fmt: skip
    plan = AppendPlan(
        heads=2, head_dim=16, page_size=4, kv_dtype=E4M3, layout="HND", scaled=scaled, rope=rope,
        slots=None, ragged=ragged, device="cpu",
    )  # fmt: skip
    call = {"block_table": table, "seq_lens": torch.tensor(lengths, dtype=torch.int32)}
    if ragged:
        call["cu_seqlens_q"] = torch.tensor([0, *q_lens]).cumsum(0).int()
    if scaled:
        call |= {"k_scale": scales[0], "v_scale": scales[1]}
    with override(check=False):
        plan.run(k, v, cache, **call)
    for got, wanted in zip((*cache, *scales), (*stored, *steps), strict=True):
        assert got is None or same(got, wanted)


@pytest.mark.parametrize("numbers", [[-1, 2**31 - 1, -(2**31), 28, 27], [-5, 99, 0, 2**30, 31]])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_nothing_is_written_outside_the_cache(numbers, kind):
    slots = torch.tensor(numbers).to(kind)
    if kind == torch.int64:
        slots = torch.where(slots > 2**29, slots * 2**32, slots)
    whole = empty_cache(PAGES + 2, 4, 3, (16, 16), E4M3, "NHD")
    k, v = new_tokens(5, 3, 16, 16, torch.bfloat16)
    plan = AppendPlan(
        heads=3, head_dim=16, page_size=4, kv_dtype=E4M3, slots=kind, device="cpu"
    )  # fmt: skip
    inner = tuple(x[1:-1] for x in whole)
    stored, _ = expected(k, v, inner, (None, None), slots, page=4, layout="NHD", scaled=False)
    with override(check=False):
        plan.run(k, v, inner, slot_mapping=slots)
    for got, wanted, around in zip(inner, stored, whole, strict=True):
        assert same(got, wanted)
        assert bool((around.view(torch.uint8)[[0, -1]] == 0x5B).all())


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scaled", ["tensor", "token_head"])
def test_numbers_that_are_none(scaled, kv_dtype):
    """NaN stays NaN, infinity saturates, and neither changes the scale of its row."""
    k, v = new_tokens(2, 1, 16, 16, torch.bfloat16)
    k[0, 0, 3], v[0, 0, :3] = math.inf, torch.tensor([math.nan, -math.inf, 0.0])
    k[1], v[1] = 0.0, 0.0
    cache = empty_cache(1, 4, 1, (16, 16), kv_dtype, "NHD")
    scales = empty_scales(scaled, 1, 4, 1, "NHD")
    stored, steps = expected(
        k, v, cache, scales, torch.arange(2), page=4, layout="NHD", scaled=scaled
    )
    append_paged_kv_cache(
        k, v, cache, slot_mapping=torch.arange(2), k_scale=scales[0], v_scale=scales[1],
        scaled=scaled,
    )  # fmt: skip
    for got, wanted in zip((*cache, *scales), (*stored, *steps), strict=True):
        assert torch.equal(got.float().isnan(), wanted.float().isnan())
        assert torch.equal(got.float().nan_to_num(7), wanted.float().nan_to_num(7))


def test_one_tensor_as_the_cache_and_views_of_a_fused_projection():
    """K and V are columns of one product, as servers have them; MLA's cache is K alone."""
    qkv = torch.randn(5, 16 + 2 * 2 * 16, dtype=torch.bfloat16)
    k, v = qkv[:, 16:48].unflatten(1, (2, 16)), qkv[:, 48:].unflatten(1, (2, 16))
    both = torch.zeros(3, 2, 4, 2, 16, dtype=torch.bfloat16)
    slots = torch.tensor([11, 0, 5, -1, 6])
    append_paged_kv_cache(k, v, both, slot_mapping=slots)
    flat = both.transpose(0, 1).reshape(2, 12, 2, 16)
    kept = slots >= 0
    assert torch.equal(flat[0, slots[kept]], k[kept]) and torch.equal(
        flat[1, slots[kept]], v[kept]
    )
    contiguous = tuple(torch.zeros(2, 6, 2, 16, dtype=torch.bfloat16) for _ in "kv")
    append_paged_kv_cache(k, v, contiguous, slot_mapping=slots)
    assert torch.equal(contiguous[1].flatten(0, 1)[slots[kept]], v[kept])
    latent = torch.zeros(3, 4, 1, 48, dtype=torch.bfloat16)
    new = torch.randn(5, 1, 48, dtype=torch.bfloat16)
    append_paged_kv_cache(new, None, latent, slot_mapping=slots)
    assert torch.equal(latent.reshape(12, 1, 48)[slots[kept]], new[kept])


@pytest.mark.parametrize("scaled", ["tensor", "page", "token", "token_head"])
def test_what_was_stored_is_what_a_plan_decodes(scaled):
    """A cache that grows token by token, beside attention over what it stands for."""
    tokens, page = 21, 4
    draw = torch.Generator().manual_seed(1)
    k, v, q = (torch.randn(tokens, n, 32, generator=draw).half() for n in (2, 2, 4))
    cache = empty_cache(8, page, 2, (32, 32), E4M3, "NHD")
    k_scale, v_scale = empty_scales(scaled, 8, page, 2, "NHD")
    if "token" in scaled:
        k_scale.fill_(math.nan), v_scale.fill_(math.nan)
    about = {"k_scale": k_scale, "v_scale": v_scale, "scaled": scaled}
    table = torch.tensor([[6, 1, 3, 0, 7, 2]], dtype=torch.int32)
    for first, last in ((0, 17), (17, 18), (18, 21)):
        lengths = torch.tensor([last], dtype=torch.int32)
        append_paged_kv_cache(
            k[first:last], v[first:last], cache, block_table=table, seq_lens=lengths, **about
        )
    got = flex_decode(q[None, -1:], cache, seq_lens=lengths, block_table=table, **about)
    slots = [int(table[0, t // page]) * page + t % page for t in range(tokens)]
    wide = []
    for x, step in zip(cache, (k_scale, v_scale), strict=True):
        step = {
            "tensor": lambda s: s.expand(8, page)[..., None],
            "page": lambda s: s[:, None].expand(8, page)[..., None],
            "token": lambda s: s[..., None],
            "token_head": lambda s: s,
        }[scaled](step)
        wide.append((x.float() * step[..., None]).flatten(0, 1)[slots])
    scores = torch.einsum("hd,nhd->hn", q[-1].double(), wide[0].repeat_interleave(2, 1).double())
    weights = (scores / math.sqrt(32)).softmax(-1)
    wanted = torch.einsum("hn,nhd->hd", weights, wide[1].repeat_interleave(2, 1).double())
    assert (got[0, 0].double() - wanted).abs().max() < 2e-3


def test_a_plan_is_built_once_and_its_runs_build_nothing(monkeypatch):
    k, v = new_tokens(4, 2, 16, 16, torch.bfloat16)
    cache = empty_cache(2, 4, 2, (16, 16), torch.bfloat16, "NHD")
    plan = AppendPlan(heads=2, head_dim=16, page_size=4, device="cpu")
    monkeypatch.setattr(Builder, "kernel", None)
    for count in (4, 3, 0, 4):
        plan.run(k[:count], v[:count], cache, slot_mapping=torch.arange(count))
    assert torch.equal(cache[0][0], k) and len(plan._ready) == 3


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    "low", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 0xFFFF))]
)
def test_every_number_is_rounded_as_torch_does(low, kv_dtype):
    """All 65,536 upper halves of a float32, beside ties and just above and below them."""
    bits = (torch.arange(2**16) << 16 | low).to(torch.int32)
    x = bits.view(torch.float32).reshape(128, 1, 512)
    (cache,) = empty_cache(1, 128, 1, (512,), kv_dtype, "NHD")
    append_paged_kv_cache(x, None, cache, slot_mapping=torch.arange(128))
    most = torch.finfo(kv_dtype).max
    wanted = x.clamp(-most, most).to(kv_dtype).float()
    got = cache[0].float()
    assert torch.equal(got.isnan(), x.isnan())
    assert torch.equal(got[~x.isnan()], wanted[~x.isnan()])


@settings(max_examples=25, deadline=None)
@given(
    order=st.randoms(use_true_random=False),
    page=st.integers(1, 9),
    pages=st.integers(1, 5),
    tokens=st.integers(0, 13),
    layout=st.sampled_from(["NHD", "HND"]),
)
def test_any_slots(order, page, pages, tokens, layout):
    """Each slot of the cache at most once, among numbers that are none of its slots."""
    total = pages * page
    good = order.sample(range(total), min(tokens, total))
    slots = [*good, *(order.choice([-1, -(2**62), total, total + 1, 2**62]) for _ in range(3))]
    order.shuffle(slots)
    slots = torch.tensor(slots)
    k, v = new_tokens(len(slots), 1, 8, 8, torch.float16)
    whole = empty_cache(pages + 2, page, 1, (8, 8), torch.float16, layout)
    inner = tuple(x[1:-1] for x in whole)
    stored, _ = expected(k, v, inner, (None, None), slots, page=page, layout=layout, scaled=False)
    with override(check=False):
        append_paged_kv_cache(k, v, inner, slot_mapping=slots, layout=layout)
    for got, wanted, around in zip(inner, stored, whole, strict=True):
        assert same(got, wanted)
        assert bool((around[[0, -1]].view(torch.uint8) == 0x5B).all())


def test_what_does_not_fit_is_refused():
    k, v = new_tokens(4, 2, 16, 16, torch.bfloat16)
    cache = empty_cache(3, 4, 2, (16, 16), E4M3, "NHD")
    slots, table = torch.arange(4), torch.arange(4, dtype=torch.int32).reshape(2, 2)
    about = {"heads": 2, "head_dim": 16, "page_size": 4, "kv_dtype": E4M3, "device": "cpu"}
    for wrong, said in (
        ({"kv_dtype": torch.int8}, "kv_dtype is one of"),
        ({"kv_dtype": torch.float16, "scaled": True}, "scales are of a cache of 8 bits"),
        ({"scaled": "keys"}, "one of tensor"),
        ({"rope": Rope(15)}, "an even number"),
        ({"rope": Rope(18, base=10.0)}, "at most all of a head"),
        ({"rope": Rope(8, base=-1.0)}, "a base is above 0"),
        ({"rope": 10000.0}, "rope is a flexattn.serving.Rope"),
        ({"slots": torch.int16}, "slots are int64 or int32"),
        ({"ragged": True}, "slots is None"),
        ({"layout": "NDH"}, "layout is one of"),
        ({"heads": 0}, "heads are between"),
    ):
        with pytest.raises(InputError, match=said):
            AppendPlan(**{**about, **wrong})
    plan = AppendPlan(**about)
    for changed, said in (
        ({"k": k[:3]}, r"v is torch.bfloat16 \[4, 2, 16\]"),
        ({"k": k.half()}, "torch.float16"),
        ({"kv_cache": empty_cache(3, 5, 2, (16, 16), E4M3, "NHD")}, r"it is .*\[3, 4, 2, 16\]"),
        ({"slot_mapping": None}, "slot_mapping is missing"),
        ({"slot_mapping": slots.int()}, "contiguous torch.int64"),
        ({"slot_mapping": torch.arange(8)[::2]}, "contiguous torch.int64"),
        ({"block_table": table}, "block_table is given"),
        ({"k_scale": torch.ones(1)}, "k_scale is given"),
        ({"k": torch.randn(4, 2, 17).bfloat16()[..., 1:]}, "strides"),
        ({"slot_mapping": torch.arange(9, 13)}, r"slot_mapping\[3\] is 12"),
    ):
        call = {"k": k, "v": v, "kv_cache": cache, "slot_mapping": slots, **changed}
        with pytest.raises(InputError, match=said):
            plan.run(call.pop("k"), call.pop("v"), call.pop("kv_cache"), **call)
    with pytest.raises(InputTypeError, match="slot_mapping is a list"):
        plan.run(k, v, cache, slot_mapping=[0, 1, 2, 3])
    tables = AppendPlan(**about, slots=None)
    lengths = torch.tensor([9, 2], dtype=torch.int32)
    with pytest.raises(InputError, match=r"seq_lens\[0\] is 9"):
        tables.run(k, v, cache, block_table=table, seq_lens=lengths)
    with pytest.raises(InputError, match="each request has as many"):
        tables.run(k[:3], v[:3], cache, block_table=table, seq_lens=lengths)
    with pytest.raises(InputError, match="v is missing"):
        plan.run(k, None, cache, slot_mapping=slots)
