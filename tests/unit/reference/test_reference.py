"""The oracle against torch's own eager flex_attention, and where it goes further than torch."""

import math
import threading

import pytest
import torch
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import flexattn
from flexattn.catalogue import Built, causal, padding
from flexattn.errors import InputError
from flexattn.reference import Precision, attention, oracle as reference
from flexattn.reference.rounding import Rounding
from tests.cases import CASES, case

B, L, S, E, EV = 2, 37, 53, 16, 24
EAGER = [c for c in CASES if c.torch_eager]


def inputs(Hq=3, Hkv=1, L=L, S=S, Bkv=B, dtype=torch.float32, grad=False):
    draw = torch.Generator().manual_seed(1)
    shapes = (B, Hq, L, E), (Bkv, Hkv, S, E), (Bkv, Hkv, S, EV)
    return [torch.randn(s, generator=draw).to(dtype).requires_grad_(grad) for s in shapes]


def block_mask(mask_mod, Hq=3, L=L, S=S):
    if mask_mod is None:
        return None
    return create_block_mask(mask_mod, B, Hq, L, S, device="cpu", BLOCK_SIZE=16)


def torch_math(q, k, v, built, mask):
    """torch's eager rule without Dynamo, which the public function starts for each new mod.

    On the CPU it also differentiates, which the public function refuses to.
    """
    if mask is None:
        mask = create_block_mask(lambda b, h, q, k: q >= 0, None, None, L, S, device="cpu")
    score_mod = built.score_mod or (lambda score, b, h, q_idx, kv_idx: score)
    scale = 1 / math.sqrt(q.shape[-1])
    out, lse, top = math_attention(q, k, v, score_mod, mask.as_tuple(), scale, {})
    return out, lse * math.log(2), top * math.log(2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("Hkv", [3, 1], ids=["gqa1", "gqa3"])
@pytest.mark.parametrize("entry", EAGER, ids=str)
def test_every_case_agrees_with_torch(entry, Hkv):
    q, k, v = inputs(Hkv=Hkv)
    built = entry.make(B, 3, Hkv, L, S)
    mask = block_mask(built.mask_mod)
    got = attention(q, k, v, score_mod=built.score_mod, block_mask=mask)
    out, lse, top = torch_math(q, k, v, built, mask)
    torch.testing.assert_close(got.out, out, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(got.lse, lse, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(got.max_scores, top)
    assert not got.out.isnan().any()


@pytest.mark.filterwarnings("ignore")
def test_torchs_rule_is_its_public_function():
    q, k, v = inputs(Hkv=1)
    built = case("alibi_causal_document").make(B, 3, 1, L, S)
    mask = block_mask(built.mask_mod)
    out, lse = flex_attention(q, k, v, built.score_mod, mask, enable_gqa=True, return_lse=True)
    assert torch.equal(out, torch_math(q, k, v, built, mask)[0])
    assert torch.equal(lse, torch_math(q, k, v, built, mask)[1])


@pytest.mark.parametrize(
    "name", ["causal", "softcap_30", "relative_bias", "head_bias", "symmetric_bias", "t5_bias"]
)
def test_gradients_agree_with_torch(name):
    q, k, v = inputs(grad=True)
    built = case(name).make(B, 3, 1, L, S)
    mask = block_mask(built.mask_mod)
    wanted = [q, k, v, *(t.requires_grad_() for t in built.learned)]
    draw = torch.Generator().manual_seed(2)
    weight, lse_weight = torch.randn(B, 3, L, EV, generator=draw), torch.randn(B, 3, L)

    def gradients(out, lse):
        return torch.autograd.grad((out * weight).sum() + (lse * lse_weight).sum(), wanted)

    mine = gradients(*attention(q, k, v, score_mod=built.score_mod, block_mask=mask)[:2])
    theirs = gradients(*torch_math(q, k, v, built, mask)[:2])
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_chained_index_has_a_gradient():
    q, k, v = inputs(grad=True)
    built = case("chained_index").make(B, 3, 1, L, S)
    (bias,) = built.learned
    bias.requires_grad_()
    attention(q, k, v, score_mod=built.score_mod).lse.sum().backward()
    # Each row's weights add up to one, and so do the gradients of the bias over its kinds.
    torch.testing.assert_close(bias.grad.sum(-1), torch.full((B, 3), float(L)))


@pytest.mark.parametrize(("scores", "kv"), [(S * 5, 2**27), (2**26, 1), (L * S * 3, 2**27)])
@pytest.mark.parametrize("name", ["alibi_causal_document", "chained_index", "random_blocks"])
def test_slicing_changes_nothing(monkeypatch, name, scores, kv):
    q, k, v = inputs(Hq=6, Hkv=2, grad=True)
    built = case(name).make(B, 6, 2, L, S)
    options = {"score_mod": built.score_mod, "block_mask": block_mask(built.mask_mod, Hq=6)}
    whole = attention(q, k, v, **options)
    monkeypatch.setattr(reference, "_SLICE_SCORES", scores)
    monkeypatch.setattr(reference, "_SLICE_KV", kv)
    assert reference._slice_sizes(B, 6, 3, L, S, E + EV) != (B, 6, L)
    sliced = attention(q, k, v, **options)
    torch.testing.assert_close(sliced, whole)
    grads = [torch.autograd.grad(run.out.square().sum(), (q, k, v)) for run in (whole, sliced)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("length", "keys"), [(0, S), (L, 0), (0, 0), (1, S), (1, 1), (L, 1)])
def test_short_lengths(length, keys):
    q, k, v = inputs(L=length, S=keys, grad=True)
    for precision in Precision:
        score_mod = case("alibi").make(B, 3, 1, L, S).score_mod
        got = attention(q, k, v, score_mod=score_mod, precision=precision)
        assert got.out.shape == (B, 3, length, EV)
        assert got.lse.shape == got.max_scores.shape == (B, 3, length)
        assert (got.lse == -math.inf).all() == (keys == 0 or length == 0), precision
    got.out.sum().backward()
    if keys == 0:
        assert not got.out.any()


def test_fully_masked_rows():
    q, k, v = inputs(grad=True)
    mask = block_mask(lambda b, h, q_idx, kv_idx: (q_idx % 3 != 1) & (kv_idx <= q_idx))
    got = attention(q, k, v, block_mask=mask)
    assert not got.out[:, :, 1::3].any()
    assert (got.lse[:, :, 1::3] == -math.inf).all()
    assert (got.max_scores[:, :, 1::3] == -math.inf).all()
    assert got.lse[:, :, ::3].isfinite().all()
    got.out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("name", ["poisoned_bias", "reciprocal_of_padding", "log_of_padding"])
def test_poison_in_removed_lanes_reaches_no_gradient(name):
    q, k, v = inputs(grad=True)
    built = case(name).make(B, 3, 1, L, S)
    mask = block_mask(built.mask_mod)
    attention(q, k, v, score_mod=built.score_mod, block_mask=mask).out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_infinite_slopes_in_removed_lanes():
    q, k, v = inputs(grad=True)
    scales = (torch.arange(S) < 40).float().requires_grad_()
    mask = block_mask(padding(torch.tensor([31, 40])))

    def score_mod(score, b, h, q_idx, kv_idx):
        return score / scales[kv_idx] + torch.log(scales[kv_idx])

    got = attention(q, k, v, score_mod=score_mod, block_mask=mask)
    (got.out.sum() + got.lse.sum()).backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, scales))
    assert not scales.grad[40:].any()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_values_of_removed_lanes_are_not_met(poison):
    q, k, v = inputs()
    mask = block_mask(padding(torch.tensor([31, 31])))
    clean = attention(q, k, v, block_mask=mask)
    k[:, :, 31:], v[:, :, 31:] = poison, poison
    torch.testing.assert_close(attention(q, k, v, block_mask=mask), clean)
    v[:, :, 3] = math.nan
    assert attention(q, k, v, block_mask=mask).out.isnan().all()


def test_removed_lanes_may_read_out_of_range():
    q, k, v = inputs()
    entry = case("window_bias_out_of_range").make(B, 3, 1, L, S)
    (table,) = entry.learned

    def clamped(score, b, h, q_idx, kv_idx):
        return score + table[(q_idx - kv_idx).clamp(0, len(table) - 1)]

    mask = block_mask(entry.mask_mod)
    got = attention(q, k, v, score_mod=entry.score_mod, block_mask=mask)
    torch.testing.assert_close(got, attention(q, k, v, score_mod=clamped, block_mask=mask))


def test_kept_lanes_may_not():
    q, k, v = inputs()
    table = torch.zeros(S - 1)
    with pytest.raises(IndexError, match=r"score_mod reads .* b=0, h=0, q_idx=0, kv_idx=52"):
        attention(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s + table[kv_idx])
    mask = block_mask(causal)
    mask.mask_mod = lambda b, h, q_idx, kv_idx: table[kv_idx + 40] == 0
    with pytest.raises(IndexError, match="mask_mod"):
        attention(q, k, v, block_mask=mask)


def test_a_mod_may_be_constant():
    """A captured tensor without dimensions was refused by the trace that checks a call."""
    q, k, v = inputs()
    keep, constant = torch.tensor(True), torch.tensor(0.75)
    mask = flexattn.create_block_mask(lambda *positions: keep, None, None, L, S, "cpu", 16)
    out = flexattn.flex_attention(q, k, v, lambda *_: constant, mask, enable_gqa=True)
    even = v.mean(2, keepdim=True).expand(-1, 3, L, -1)
    torch.testing.assert_close(out, even)


def test_block_lists_decide():
    q, k, v = inputs()
    lists = torch.tensor([[[[0, 2, 1, 3], [1, 0, 2, 3], [9, 0, 0, 0]]]], dtype=torch.int32)
    counts = torch.tensor([[[2, 0, 1]]], dtype=torch.int32)
    bare = BlockMask.from_kv_blocks(
        counts, lists, BLOCK_SIZE=16, seq_lengths=(L, S), compute_q_blocks=False
    )
    listed = torch.zeros(L, S, dtype=torch.bool)
    listed[:16, :16] = listed[:16, 32:48] = True
    expect = attention(
        q, k, v, score_mod=lambda s, b, h, m, n: torch.where(listed[m, n], s, -math.inf)
    )
    torch.testing.assert_close(attention(q, k, v, block_mask=bare), expect)
    full = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), lists, counts, lists, 16, causal, (L, S), compute_q_blocks=False
    )
    torch.testing.assert_close(attention(q, k, v, block_mask=full), expect)


def test_one_batch_of_keys_for_all():
    q, k, v = inputs(Bkv=1)
    got = attention(q, k, v, score_mod=case("alibi").make(B, 3, 1, L, S).score_mod, scale=0.3)
    again = attention(
        q,
        k.expand(B, -1, -1, -1),
        v.expand(B, -1, -1, -1),
        score_mod=case("alibi").make(B, 3, 1, L, S).score_mod,
        scale=0.3,
    )
    torch.testing.assert_close(got, again)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_precisions(dtype):
    q, k, v = inputs(dtype=dtype)
    runs = {p: attention(q, k, v, precision=p) for p in Precision}
    work = torch.float64 if dtype == torch.float64 else torch.float32
    for p, run in runs.items():
        oracle = p is Precision.ORACLE
        assert run.out.dtype == (torch.float64 if oracle else dtype)
        assert run.lse.dtype == run.max_scores.dtype == (torch.float64 if oracle else work)
    errors = {p: (run.lse - runs[Precision.ORACLE].lse).abs().max() for p, run in runs.items()}
    rounds = dtype.itemsize == 2
    assert (errors[Precision.ROUNDED] > 20 * errors[Precision.WORKING]) == rounds
    assert errors[Precision.ROUNDED] < 8 * torch.finfo(dtype).eps


def test_scores_reach_the_mod_in_working_precision():
    seen = set()

    def spy(score, b, h, q_idx, kv_idx):
        seen.add((score.dtype, (q_idx / 3).dtype))
        return score

    q, k, v = inputs(dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = [attention(q, k, v, score_mod=spy, precision=p) for p in Precision]
    assert seen == {(torch.float64, torch.float64), (torch.float32, torch.float32)}
    assert torch.get_default_dtype() == torch.float32
    torch.testing.assert_close(got[2], attention(q, k, v))


def test_oracles_of_two_threads_leave_the_default_dtype():
    """The one that began second read float64 as the default, ended last, and left it behind: a
    float32 model of the next test was made in float64."""
    inside, second_inside, first_ended = (threading.Event() for _ in range(3))
    q, k, v = inputs()

    def first(score, b, h, q_idx, kv_idx):
        inside.set()
        second_inside.wait(0.3)  # in vain, now that the second waits for the first
        return score

    def second(score, b, h, q_idx, kv_idx):
        second_inside.set()
        first_ended.wait(5)
        return score

    def oracle(mod):
        attention(q, k, v, score_mod=mod, precision=Precision.ORACLE)

    threads = [threading.Thread(target=oracle, args=(mod,)) for mod in (first, second)]
    try:
        threads[0].start()
        assert inside.wait(5)
        threads[1].start()
        threads[0].join()
        first_ended.set()
        threads[1].join()
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_tf32_keeps_ten_bits():
    rounding = Rounding(torch.float32, None, None, torch.float32, tf32=True)
    x = torch.randn(4001, generator=torch.Generator().manual_seed(0))
    bits = rounding.load(x).view(torch.int32)
    assert not (bits & 0x1FFF).any()
    assert (rounding.load(x) - x).abs().div(x.abs()).max() <= 2**-11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_gradients_of_tables_in_16_bits_are_added_up_in_32(dtype):
    """A learned bias by distance, each of whose elements some 200 scores read.

    Autograd added them up in the table's dtype, as no kernel does, and lost each part below the
    sum's last place. The gate forgave eight times what it should, and the CPU path trained so.
    """
    q, k, v = inputs(L=160, S=160, dtype=dtype)
    table = torch.randn(3, 320, generator=torch.Generator().manual_seed(2)).to(dtype)
    dout = torch.randn(B, 3, 160, EV, generator=torch.Generator().manual_seed(3)).to(dtype)

    def gradient(precision, table):
        table = table.requires_grad_()
        found = attention(
            q, k, v, score_mod=lambda s, b, h, q, k: s + table[h, q - k + 160], precision=precision
        )
        return torch.autograd.grad(found.out, table, dout.to(found.out.dtype))[0]

    exact = gradient(Precision.ORACLE, table.double())
    got = gradient(Precision.WORKING, table.clone())
    assert got.dtype == dtype
    # One rounding of each score's part, and one of the sum.
    assert (got - exact).abs().max() < exact.abs().max() * torch.finfo(dtype).eps


def test_shapes_that_do_not_fit():
    q, k, v = inputs()
    for bad in [(q[0], k, v), (q, k, v[:, :, 1:]), (q[:1], k, v), (q, k.repeat(1, 2, 1, 1), v)]:
        with pytest.raises(InputError):
            attention(*bad)
    with pytest.raises(InputError, match="is a multiple of the key heads"):
        attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))
    with pytest.raises(InputError, match="block_mask has 1 blocks"):
        attention(q, k, v, block_mask=block_mask(causal, L=7))


def test_a_built_case_may_be_empty():
    assert case("noop").make(B, 3, 1, L, S) == Built()
