"""Sinks: an extra column of the softmax, its gradients, what is refused, and the key."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

import flexattn
from flexattn.catalogue import causal
from flexattn.device import named
from flexattn.errors import InputError, UnsupportedError
from flexattn.frontend import attention, call as calls
from flexattn.neuron.family import default_config
from flexattn.problem.inputs import add_sinks
from flexattn.records.record import key_of
from flexattn.reference import Precision
from flexattn.verify.gate import judge
from flexattn.verify.oracle import make_sinks
from tests.cases import CASES, case
from tests.problems import problem
from tests.support import assert_judged, call_of, inputs, sinks
from tests.tasks import make_task


def column(q, k, v, logits, mask=None):
    """gpt-oss: sinks are one more column of the scores, which goes before values are weighed."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    sink = logits.view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    combined = torch.cat([scores, sink], -1)
    return combined.softmax(-1)[..., :-1] @ v, combined.logsumexp(-1)


def test_a_sink_is_one_more_column():
    q, k, v = inputs(2, 4, 2, 37, 53, dtype=torch.float64)
    logits = sinks(4, torch.float64)
    got = flexattn.flex_attention(q, k, v, enable_gqa=True, return_lse=True, sinks=logits)
    torch.testing.assert_close(got[0], column(q, k, v, logits)[0])
    torch.testing.assert_close(got[1], column(q, k, v, logits)[1].float())


@pytest.mark.parametrize("entry", CASES[::4], ids=str)
def test_the_column_under_every_mod(entry):
    """add_sinks of the oracle without sinks is the oracle with them."""
    (q, k, v), call = call_of(entry, 2, 4, 2, 37, 53, block=16)
    logits = sinks(4)
    plain = flexattn.reference.attention(q, k, v, precision=Precision.ORACLE, **call)
    got = flexattn.reference.attention(q, k, v, precision=Precision.ORACLE, sinks=logits, **call)
    out, lse = add_sinks(plain.out, plain.lse, logits)
    torch.testing.assert_close((got.out, got.lse), (out, lse))
    assert torch.equal(got.max_scores, plain.max_scores)
    assert torch.isfinite(got.lse).all() and not got.out.isnan().any()


def weighed(out, lse):
    draw = torch.Generator().manual_seed(7)
    return sum(
        (x.double() * torch.randn(x.shape, generator=draw, dtype=torch.float64)).sum()
        for x in (out, lse)
    )


def test_gradients_are_those_of_the_column():
    q, k, v = (x.requires_grad_() for x in inputs(1, 4, 2, 9, 11, dtype=torch.float64))
    logits = sinks(4, torch.float64).requires_grad_()
    mask = torch.ones(9, 11, dtype=torch.bool).tril()
    listed = flexattn.create_block_mask(causal, None, None, 9, 11, "cpu", 16)
    got = flexattn.flex_attention(
        q, k, v, block_mask=listed, enable_gqa=True, return_lse=True, sinks=logits
    )
    given = (q, k, v, logits)
    mine = torch.autograd.grad(weighed(*got), given)
    theirs = torch.autograd.grad(weighed(*column(q, k, v, logits, mask)), given)
    # lse is float32.
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_no_gradient_is_nan_where_a_row_has_no_key():
    lse = torch.tensor([[[0.5, -math.inf]], [[-math.inf, 0.5]]], dtype=torch.float64)
    out = torch.randn(2, 1, 2, 3, dtype=torch.float64)
    for sink in (0.3, -math.inf):
        given = [x.clone().requires_grad_() for x in (out, lse, torch.full((1,), sink).double())]
        found, total = add_sinks(*given)
        for gradient in torch.autograd.grad(found.sum() + total.nan_to_num().sum(), given):
            assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("return_lse", [False, True])
def test_training_is_torchs_rescaled(monkeypatch, return_lse):
    """What a GPU hands to torch, with torch's own eager rule, which the CPU can differentiate."""

    def eager(q, k, v, *, score_mod, block_mask, scale, enable_gqa, kernel_options, return_aux):
        assert enable_gqa and return_aux == torchs.AuxRequest(lse=True, max_scores=False)
        mask = block_mask or torchs.create_block_mask(
            lambda b, h, q, k: q >= 0, None, None, q.shape[2], k.shape[2], device="cpu"
        )
        mod = score_mod or (lambda score, b, h, q_idx, kv_idx: score)
        from torch._higher_order_ops.flex_attention import math_attention

        out, lse, _ = math_attention(q, k, v, mod, mask.as_tuple(), scale, {})
        return out, torchs.AuxOutput(lse=lse * math.log(2), max_scores=None)

    monkeypatch.setattr("flexattn.frontend.install.torch_flex_attention", lambda: eager)
    q, k, v = (x.requires_grad_() for x in inputs(1, 4, 2, 37, 53))
    logits = sinks(4).requires_grad_()
    call = calls.make_call(q, k, v, None, None, None, True, return_lse, None, None, logits)
    got = attention._torch(call)
    assert (got.lse is not None) == return_lse and got.max_scores is None
    right = column(*(x.double() for x in (q, k, v, logits)))
    torch.testing.assert_close(got.out.double(), right[0], rtol=1e-4, atol=1e-5)
    lse, wanted = (got.lse, right[1]) if return_lse else (got.out * 0, right[0] * 0)
    mine = torch.autograd.grad(weighed(got.out, lse), (q, k, v, logits))
    theirs = torch.autograd.grad(weighed(right[0], wanted), (q, k, v, logits))
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_learned_sinks_alone_want_gradients():
    q, k, v = inputs(1, 2, 2, 5, 7)
    call = calls.make_call(
        q, k, v, None, None, None, False, False, None, None, sinks(2).requires_grad_()
    )
    assert attention.route_of(call)[0] == "reference"
    assert attention.wants_grad(call) == "sinks"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1.0, 2.0], "list.*torch.Tensor"),
        (torch.zeros(3), r"\(3,\), query has 2 heads.*one logit for each query head"),
        (torch.zeros(1, 2), r"\(1, 2\)"),
        (torch.zeros(2, dtype=torch.int64), "int64.*float16, .*convert"),
        (torch.zeros(2, dtype=torch.float64), "float64.*query's"),
        (torch.zeros(2, device="meta"), "sinks is on meta, query on cpu.*one device"),
        (torch.zeros(4)[::2].double(), "float64"),
    ],
    ids=["list", "heads", "dimensions", "integers", "double", "device", "strided"],
)
def test_what_is_refused(given, words):
    q, k, v = inputs(1, 2, 2, 5, 7)
    for call in (flexattn.flex_attention, flexattn.explain):
        with pytest.raises(InputError, match=f"(?s){words}"):
            call(q, k, v, sinks=given)


def test_no_key_at_all_leaves_the_sink():
    q, k, v = inputs(1, 2, 2, 5, 7)
    call = calls.make_call(
        q, k[:, :, :0], v[:, :, :0], None, None, None, False, True, None, None, sinks(2)
    )
    for outputs in (attention._empty(call), attention._reference(call)):
        assert not outputs.out.any()
        assert torch.equal(outputs.lse, sinks(2)[None, :, None].expand(1, 2, 5))


def test_a_key_with_sinks_is_another_one_and_those_without_keep_their_names():
    plain, other = problem("decode"), problem("decode", sinks="bfloat16")
    assert key_of(plain) != key_of(other) == key_of(problem("decode", sinks="float32"))
    assert key_of(plain).family() != key_of(other).family()
    # The folder of the shipped decode records, which were made before there were sinks.
    shape = replace(plain, B=8, Hq=32, Hkv=8, kv_len=8192)
    plain = replace(shape, structure=replace(plain.structure, lse=False))
    assert key_of(plain).family() == "163ab6b0a118d83b6aa1dff4"
    assert other.describe() == f"{problem('decode').describe()} sinks"


def test_the_gate_sees_rows_that_a_sink_alone_reaches():
    """Their lse is finite; a value that is left in them is a fault, and no budget excuses it."""
    (q, k, v), call = call_of(case("random_blocks_empty_rows"), 1, 2, 2, 37, 53, block=16)
    call["sinks"] = sinks(2)
    oracle = flexattn.reference.attention(q, k, v, precision=Precision.ORACLE, **call)
    rounded = flexattn.reference.attention(q, k, v, precision=Precision.ROUNDED, **call)
    empty = oracle.max_scores == -math.inf
    assert empty.any() and torch.isfinite(oracle.lse).all()
    assert_judged(flexattn.reference.attention(q, k, v, **call), q, k, v, **call)
    bad = oracle.out.float()
    bad[empty] = 1e-9
    verdict = judge((bad, None, None), oracle, rounded, torch.float32)
    assert not verdict.passed and "fully masked" in verdict.message()


def test_a_task_is_judged_with_its_sinks():
    task = make_task((1, 4, 2, 9, 33, 16, 16), named("nvidia-h200"), sinks="bfloat16")
    made = make_sinks(task.problem, torch.device("cpu"))
    assert made.shape == (4,) and made.dtype == torch.bfloat16
    assert make_sinks(problem(), torch.device("cpu")) is None


def test_neuron_says_that_it_has_none():
    with pytest.raises(UnsupportedError, match="sinks on trn2"):
        default_config(problem("decode", 64, sinks="bfloat16"), "trn2")
