"""What a worker judges by: mods printed back from their Expr agree with the user's callables."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings, strategies as st

import flexattn
from flexattn.catalogue import causal
from flexattn.kernels.printers.torch_printer import mask_callable, score_callable
from flexattn.mods import bind
from flexattn.problem import DENSE, Layout, Shape, Sparsity, make_problem
from flexattn.problem.facts import layout_of
from flexattn.reference import Precision, attention
from flexattn.runtime.launch import Lists
from flexattn.verify import oracle as oracles
from flexattn.verify.oracle import kept_lanes, make_inputs, oracle
from tests.cases import CASES
from tests.problems import problem
from tests.support import block_mask, inputs
from tests.tasks import make_task

SIZES = {"B": 2, "Hq": 4, "Hkv": 2, "L": 45, "S": 61}
BLOCK = 16


def built(entry):
    case = entry.make(**SIZES)
    score = None if case.score_mod is None else bind(case.score_mod, "score")
    mask = None if case.mask_mod is None else bind(case.mask_mod, "mask")
    return case, score, mask


def of_lists(mask):
    lists = Lists.of(mask)
    return lists, lists.sparsity(mask.BLOCK_SIZE, 2)


@pytest.mark.parametrize("entry", CASES, ids=str)
def test_an_expr_is_the_callable_that_it_came_from(entry):
    case, score, mask = built(entry)
    q, k, v = inputs(*SIZES.values())
    mine = {
        "score_mod": score_callable(score),
        "block_mask": block_mask(case.mask_mod, q, k, BLOCK),
    }
    theirs = {"score_mod": case.score_mod, "block_mask": mine["block_mask"]}
    if mask is not None:
        theirs["block_mask"] = block_mask(case.mask_mod, q, k, BLOCK)
        mine["block_mask"].mask_mod = mask_callable(mask)
    for precision, close in ((Precision.ORACLE, 1e-6), (Precision.ROUNDED, 2e-3)):
        a, b = (attention(q, k, v, precision=precision, **call) for call in (mine, theirs))
        for got, wanted in zip(a, b, strict=True):
            torch.testing.assert_close(got, wanted, rtol=close, atol=close, equal_nan=True)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "slices"])
@pytest.mark.parametrize("entry", CASES[::3], ids=str)
def test_the_judge_passes_what_is_right_and_fails_what_is_not(entry, whole, monkeypatch):
    if not whole:
        monkeypatch.setattr(oracles, "WHOLE_SCORES", 0)
    case, score, mask = built(entry)
    q, k, v = inputs(*SIZES.values(), dtype=torch.bfloat16)
    listed = block_mask(case.mask_mod, q, k, BLOCK)
    lists, sparsity = (None, None) if listed is None else of_lists(listed)
    judge = oracle(q, k, v, 0.2, score, mask, lists, sparsity)
    # Without blocks that are listed but say nothing, an unmasked case stays unmasked.
    right = attention(q, k, v, score_mod=case.score_mod, block_mask=listed, scale=0.2)
    got = right.out, right.lse.float(), right.max_scores.float()
    verdict = judge(got)
    assert verdict.passed, verdict.message()
    assert not judge((got[0] * 1.1 + 0.05, *got[1:])).passed
    assert not judge((got[0], got[1] + 0.1, got[2])).passed
    assert not judge((got[0][:, :, 1:], *got[1:])).passed


def test_lists_alone_decide_where_there_is_no_mask_mod():
    """A BlockMask made of lists; slices and the whole agree on what it keeps."""
    q, k, v = inputs(1, 2, 1, 64, 64)
    fixed = {"BLOCK_SIZE": BLOCK, "seq_lengths": (64, 64)}
    num = torch.tensor([[[1, 2, 1, 0]]], dtype=torch.int32)
    idx = torch.tensor([[[[1, 0, 2, 3], [0, 3, 1, 2], [2, 0, 1, 3], [0, 1, 2, 3]]]])
    mask = flexattn.BlockMask.from_kv_blocks(num, idx.int(), None, None, **fixed)
    lists, sparsity = of_lists(mask)
    lane = kept_lanes(lists, sparsity, None, 64)
    rows = torch.arange(64)
    got = lane(torch.tensor(0), torch.tensor(1), rows[:, None], rows[None, :])
    dense = torch.zeros(4, 4, dtype=torch.bool)
    dense[[0, 1, 1, 2], [1, 0, 3, 2]] = True
    assert torch.equal(got, dense.repeat_interleave(16, 0).repeat_interleave(16, 1))
    right = attention(q, k, v, block_mask=mask)
    judge = oracle(q, k, v, 1 / 4, None, None, lists, sparsity)
    assert judge((right.out, right.lse, right.max_scores)).passed


def test_full_blocks_skip_the_mask_mod():
    mask = flexattn.create_block_mask(causal, None, None, 64, 64, "cpu", BLOCK_SIZE=BLOCK)
    lists, sparsity = of_lists(mask)
    lane = kept_lanes(lists, sparsity, lambda b, h, q, k: (q < 0) & (k < 0), 64)
    rows = torch.arange(64)
    got = lane(torch.tensor(0), torch.tensor(0), rows[:, None], rows[None, :])
    assert int(got.sum()) == 6 * BLOCK * BLOCK


@given(
    D=st.integers(1, 130),
    Dv=st.integers(1, 130),
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    contiguous=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    is_aligned=st.booleans(),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
)
@settings(max_examples=60, deadline=None)
def test_inputs_are_laid_out_as_the_problem_says(D, Dv, lengths, contiguous, is_aligned, dtype):
    layout = Layout(*contiguous, is_aligned)
    shape = Shape(2, 4, 2, *lengths, D, Dv)
    made = make_inputs(
        make_problem("prefill", dtype, shape, None, None, None, layout), torch.device("cpu")
    )
    q, k, v = made
    assert q.shape == (2, 4, lengths[0], D) and v.shape == (2, 2, lengths[1], Dv)
    assert k.shape == (2, 2, lengths[1], D)
    assert laid(*made) == layout
    assert all(str(x.dtype) == f"torch.{dtype}" for x in made)


def laid(*tensors):
    return layout_of(*tensors)


def test_a_batch_of_queries_with_stride_0_is_not_aligned():
    """A tensor descriptor knows no stride of 0; for the keys' batch alone kernels ask for it."""
    q, k = torch.zeros(1, 2, 8, 64), torch.zeros(1, 2, 8, 64)
    assert laid(q, k, k).aligned
    many = q.expand(3, -1, -1, -1)
    assert laid(many.contiguous(), many, many).aligned and not laid(many, k, k).aligned
    assert not laid(q, k[:, :1].expand(-1, 2, -1, -1), k).aligned


def test_strides_and_addresses_of_whole_16_bytes_are_aligned():
    wide, odd = torch.zeros(2, 2, 8, 72), torch.zeros(2, 2, 8, 67)
    q = wide[..., :64]
    assert laid(q, q, q).aligned
    assert not laid(q, q, odd[..., :64]).aligned and not laid(q, wide[..., 1:65], q).aligned


def test_inputs_are_equal_each_time_and_differ_from_one_another():
    first, second = (make_inputs(problem(q_len=9, kv_len=9), torch.device("cpu")) for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[1], first[2])


def test_a_task_travels():
    """Values, strides and the mods' identity, in a message that any process reads."""
    from flexattn.device import named

    bias = torch.randn(8, 6).T
    task = make_task(
        (2, 8, 2, 64, 64, 32, 32),
        named("nvidia-h200"),
        score_mod=lambda s, b, h, q, k: s + bias[h % 6, q % 8],
        mask_mod=causal,
    )
    back = pickle.loads(pickle.dumps(task))
    assert back.problem == task.problem and hash(back.problem) == hash(task.problem)
    assert back.score.mod.expr is task.score.mod.expr
    assert back.score.tensors[0].stride() == bias.stride() and back.scale == 1 / math.sqrt(32)
    assert torch.equal(back.lists.kv_idx, task.lists.kv_idx)
    assert task.problem.structure.layout == DENSE
    assert task.problem.structure.sparsity == Sparsity(128, 128, True, False)
