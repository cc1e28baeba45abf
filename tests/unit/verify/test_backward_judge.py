"""Gradients are judged where they are wrong, whole or in some heads, with all that heads share."""

import pytest
import torch

from flexattn.catalogue import causal
from flexattn.device import named
from flexattn.measure.runner import saved_of
from flexattn.runtime.backward import Gradients
from flexattn.tuning.tasks import task_from
from flexattn.tuning.workload import parse_workload
from flexattn.verify import made_up as backward
from flexattn.verify.gate import Verdict
from flexattn.verify.made_up import Differentiated, judge_of

CPU = torch.device("cpu")
TABLE = torch.linspace(-1, 1, 3 * 90).view(3, 90)


def learned(score, b, h, q_idx, kv_idx):
    return score + LEARNED[h // 2, q_idx - kv_idx + 44]


LEARNED = TABLE.clone().requires_grad_()


def made_saved(dtype):
    layer = {"heads": [6, 2], "head_dim": [24, 16], "dtype": dtype, "block_size": 16}
    call = {"mixes": [[3, 37, 43]], "backward": True}
    row = parse_workload({"layers": [{**layer, "calls": [call]}]}, "x", "x").rows[1]
    task = task_from(row, learned, causal, named("nvidia-h200"), CPU)
    made = saved_of(task, CPU)
    assert made.out.dtype == made.call.q.dtype and made.lse.dtype == torch.float32
    return made


def made_call(dtype="float32"):
    return made_saved(dtype).call


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_saved_is_what_a_kernel_stores(dtype):
    """Of scores rounded to 16 bits, lse was another's: weights that a kernel made of it did not
    add up to 1, delta was no mean of theirs, and one learned table in forty was red."""
    made = made_saved(dtype)
    given = made.call
    scores, values = scores_of(given, *(x.float() for x in (given.q, given.k, given.v)), TABLE)
    weights = torch.exp(scores - made.lse[..., None])
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 6, 37), rtol=0, atol=1e-5)
    # Weights are rounded before they meet values, and so is what comes out.
    bound = 2.0 * torch.finfo(given.q.dtype).eps * (weights @ values.abs()) + 1e-6
    assert ((made.out - weights @ values).abs() <= bound).all()


def scores_of(given, q, k, v, table):
    """The modified scores [3, 6, 37, 43], and each query head's values."""
    rows, keys = torch.arange(37)[:, None], torch.arange(43)
    heads = torch.arange(6)[:, None, None]
    k, v = (x.repeat_interleave(3, 1) for x in (k, v))
    scores = q @ k.mT * given.scale + table[heads // 2, rows - keys + 44]
    return torch.where(rows >= keys, scores, -torch.inf), v


def gradients(given: Differentiated) -> Gradients:
    """By plain torch, of what a kernel is given."""
    inputs = given.q, given.k, given.v, LEARNED.detach()
    leaves = [x.clone().requires_grad_() for x in inputs]
    scores, values = scores_of(given, *leaves)
    out = torch.softmax(scores, -1) @ values
    dq, dk, dv, dtable = torch.autograd.grad(out, leaves, given.dout)
    return Gradients(dq, dk, dv, (dtable,), given.dout)


def test_right_gradients_pass_and_each_wrong_one_is_red():
    given = made_call()
    assert given.slots == (0,) and not given.score.tensors[0].requires_grad
    assert len(given.heads) == 6
    judge = judge_of(given)
    right = gradients(given)
    assert judge(right).passed, judge(right).message()
    for name in ("dq", "dk", "dv"):
        x = getattr(right, name).clone()
        x[-1, -1, 11] *= 1.001
        assert not judge(right._replace(**{name: x})).passed, name
        x[1, 0, 3, 2] = torch.nan
        assert judge(right._replace(**{name: x})).faults, name
    assert not judge(right._replace(captured=(right.captured[0] * 1.001,))).passed
    assert judge(right._replace(dq=right.dq.double())).faults


def test_a_large_shape_is_judged_in_three_heads(monkeypatch):
    """What heads share, as the gradient of a table, is the sum of these heads' parts alone."""
    monkeypatch.setattr(backward, "WHOLE_SCORES", 0)
    monkeypatch.setattr(backward, "SLICE_SCORES", 43 * 10)
    given = made_call()
    assert given.heads == ((0, 0), (1, 1), (2, 1))
    whole = given.dout.clone()
    judge = judge_of(given)
    with given.judged_alone():
        right = gradients(given)
        assert not given.dout[0, 3:].any() and given.dout[1, 3:].all()
    assert torch.equal(given.dout, whole)
    assert judge(right).passed, judge(right).message()
    assert not judge(gradients(given)).passed, "the table's gradient has all heads' parts"
    for place in given.heads:
        wrong = right.dk.clone()
        wrong[place][7] *= 1.001
        assert not judge(right._replace(dk=wrong)).passed


def test_the_oracle_is_float64_and_the_reference_run_in_the_inputs_dtype(monkeypatch):
    given, seen = made_call("bfloat16"), {}
    monkeypatch.setattr(backward, "judge_named", lambda got, *both: seen.update(a=both) or judged)
    judged = Verdict((), (), ())
    judge_of(given)(Gradients(given.q, given.k, given.v, (LEARNED,), given.dout))
    exact, rounded = seen["a"]
    assert {x.dtype for x in exact.values()} == {torch.float64}
    assert {x.dtype for name, x in rounded.items() if len(name) == 2} == {torch.bfloat16}
