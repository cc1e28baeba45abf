"""A kernel whose numbers are wrong is found by its first launch, and its result is never used."""

import pytest
import torch
from torch.autograd import grad

from flexattn import Selection, create_block_mask, explain, flex_attention, warm
from flexattn.catalogue import causal, relative_bias, softcap
from flexattn.errors import WrongKernelError
from flexattn.reference import attention
from flexattn.serving import AppendPlan, CascadePlan, DecodePlan, Rope
from flexattn.settings import log, override
from tests.planted import planted
from tests.support import inputs

CAP = softcap(20.0)


@pytest.fixture(autouse=True)
def first(tmp_path):
    """As users have it: the second candidate may serve, and files are kept."""
    with override(verify="first", strict=False, cache_dir=tmp_path, check=False):
        yield


@pytest.fixture
def said(monkeypatch):
    """What the log says."""
    lines = []
    monkeypatch.setattr(log, "log", lambda level, form, *args: lines.append(form % args))
    return lines


def made(L=37, S=53, heads=(2, 1), D=16, B=1):
    q, k, v = inputs(B, *heads, L, S, D, dtype=torch.float32, device="cpu")
    return q * 3, k, v


def error(got, want):
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("L", "old", "new"),
    [
        (129, "* 20.0", "* 16.0"),
        (3, "* 20.0", "* 16.0"),
        (129, "tl.exp2(", "1.01 * tl.exp2("),
    ],
    ids=["prefill's score", "decode's score", "weights that do not add up"],
)
def test_every_kernel_is_wrong(monkeypatch, said, tmp_path, L, old, new):
    """Plain torch answers, and a file says what a maintainer needs."""
    q, k, v = made(L, 60)
    mask = create_block_mask(causal, None, None, L, 60, device="cpu", BLOCK_SIZE=32)
    call = {"score_mod": CAP, "block_mask": mask, "enable_gqa": True}
    want = attention(q, k, v, score_mod=CAP, block_mask=mask).out
    with planted(monkeypatch, old, new) as found:
        assert error(flex_attention(q, k, v, **call), want) < 1e-5
        assert found
        again = len(found)
        assert error(flex_attention(q, k, v, **call), want) < 1e-5
        assert len(found) == again
    (told, *_) = [line for line in said if "computes wrong numbers" in line]
    files = list((tmp_path / "wrong").iterdir())
    assert all(str(each) in " ".join(said) for each in files) and "FLEXATTN_VERIFY" in told
    text = files[0].read_text()
    assert "FAILED the accuracy gate" in text and torch.__version__ in text and "def flex" in text


def test_the_next_kernel_serves(monkeypatch, said):
    q, k, v = made(129, 60)
    want = attention(q, k, v, score_mod=CAP).out
    first = explain(q, k, v, score_mod=CAP, enable_gqa=True)
    rows = f"BLOCK_M = {first.config.BLOCK_M}"
    with planted(monkeypatch, "* 20.0", "* 16.0", within=rows) as found:
        assert error(flex_attention(q, k, v, score_mod=CAP, enable_gqa=True), want) < 1e-5
        after = explain(q, k, v, score_mod=CAP, enable_gqa=True)
        assert found and after.config != first.config
        assert "computes wrong numbers" in str(after)
    assert not any("no kernel is right" in line for line in said)


@pytest.mark.parametrize(
    ("old", "new"),
    [("* 20.0)", "* 16.0)"), ("tl.dot(ds", "0.9 * tl.dot(ds")],
    ids=["score", "one product"],
)
def test_a_backward(monkeypatch, old, new):
    q, k, v = (x.requires_grad_() for x in made(40, 50))
    out = attention(q, k, v, score_mod=CAP).out
    want = grad(out.square().sum(), (q, k, v))
    with planted(monkeypatch, old, new, within="DQ") as found:
        got = flex_attention(q, k, v, score_mod=CAP, enable_gqa=True)
        for mine, theirs in zip(grad(got.square().sum(), (q, k, v)), want, strict=True):
            assert error(mine, theirs) < 1e-4
        assert found


@pytest.mark.parametrize("chosen", [False, True], ids=["every key", "chosen keys"])
def test_a_gradient_of_a_captured_tensor(monkeypatch, chosen):
    """A sum over the whole call, which no row shows: it is judged on a made-up one.

    The lists of chosen keys have fewer columns than there are blocks. The made-up call's mask once
    was torch's, which writes beyond its memory then: on a GPU that ended the process.
    """
    table = torch.zeros(2, 200, requires_grad=True)
    bias = relative_bias(table, 90)
    q, k, v = made(40, 50)
    keys = {}
    if chosen:
        keys["block_mask"] = Selection(torch.tensor([[[[2], [0], [3]]]]), unit=16, rows=16)
    dense = {"block_mask": keys["block_mask"].for_call(q, k)} if chosen else {}
    (want,) = grad(attention(q, k, v, score_mod=bias, **dense).out.square().sum(), table)
    with planted(monkeypatch, "sum0, mask", "sum0 * 0.9, mask") as found:
        got = flex_attention(q, k, v, score_mod=bias, enable_gqa=True, **keys)
        assert error(grad(got.square().sum(), table)[0], want) < 1e-4
        assert found


def test_an_infinite_derivative_of_a_removed_lane(said):
    """Triton 3.6 to 3.9 were right on random mod 255, where the check found each kernel wrong.

    The root's derivative is infinite at t[0] - t[0], which only lanes above the diagonal read: a
    zero that autograd multiplies with it is no number, unless these lanes are left out.
    """
    table = torch.linspace(-1.0, 2.0, 17).requires_grad_()

    def root(score, b, h, q_idx, kv_idx):
        d = q_idx - kv_idx
        return score * (table[d.clamp(-8, 8) + 8] - table[d.clamp(0, 16)]).abs() ** 0.5

    q, k, v = made(16, 16)
    mask = create_block_mask(causal, None, None, 16, 16, device="cpu", BLOCK_SIZE=16)
    (want,) = grad(attention(q, k, v, score_mod=root, block_mask=mask).out.square().sum(), table)
    out = flex_attention(q, k, v, score_mod=root, block_mask=mask, enable_gqa=True)
    assert error(grad(out.square().sum(), table)[0], want) < 1e-4
    assert not any("computes wrong numbers" in line for line in said)


@pytest.mark.parametrize("form", [{}, {"page_size": 16, "q_len": 3, "mask_mod": causal}])
def test_a_plan(monkeypatch, form):
    """Before its first request: no other config has been raced, so it says that none is left."""
    with (
        planted(monkeypatch, "* 20.0", "* 16.0"),
        pytest.raises(WrongKernelError, match="no kern"),
    ):
        DecodePlan(
            batch=4, kv_len=400, heads=(4, 2), head_dim=32, score_mod=CAP, dtype=torch.float32,
            device="cpu", **form,
        )  # fmt: skip


def test_a_cascade(monkeypatch):
    """The first pass alone is wrong: what it leaves is judged once it is merged."""
    about = {"batch": 3, "prefix_len": 100, "own_len": 60, "heads": (2, 1), "head_dim": 32}
    with planted(monkeypatch, "* 20.0", "* 16.0", within="ROW_LENS") as found:
        with pytest.raises(WrongKernelError, match="cascade"):
            CascadePlan(score_mod=CAP, dtype=torch.float32, device="cpu", **about)
        assert found


@pytest.mark.parametrize(
    ("old", "new"), [("tl.where(is_first[None, :], -other", "tl.where(is_first[None, :], other"),
                     ("offset = slot % PAGE", "offset = slot % PAGE * 0")],
)  # fmt: skip
def test_an_append(monkeypatch, old, new):
    with planted(monkeypatch, old, new), pytest.raises(WrongKernelError, match="other numbers"):
        AppendPlan(heads=2, head_dim=32, page_size=8, rope=Rope(16, base=100.0), device="cpu")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_of_the_callers_are_no_fault(said, value):
    """A made-up call is judged in their place."""
    q, k, v = made()
    k[0, 0, 5] = v[0, 0, 7, 3] = value
    flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 1.5, enable_gqa=True)
    assert not any("wrong numbers" in line for line in said)


def test_a_mod_that_jumps_is_no_fault(said):
    """Scores of whole numbers, a step of which either rounding of a product may take."""
    q, k, v = (x.sign() for x in made())
    step = {"score_mod": lambda s, b, h, i, j: torch.floor(s * 4 / 0.25**0.5), "scale": 0.3}
    flex_attention(q, k, v, enable_gqa=True, **step)
    assert not any("wrong numbers" in line for line in said)


def test_the_callers_modes_see_nothing():
    """Hooks on saved tensors are called as often by a first call as by a later one."""
    q, k, v = (x.requires_grad_() for x in made())
    counts = []
    for _ in range(2):
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
            out = flex_attention(q, k, v, score_mod=CAP, enable_gqa=True)
        out.sum().backward()
        counts.append(len(seen))
    assert counts[0] == counts[1]


def test_dropout_is_judged_by_the_same_bits(monkeypatch):
    """Plain torch, which answers in the end, drops the weights that a right kernel drops."""
    q, k, v = made(40, 50)

    def dropped():
        torch.manual_seed(3)
        return flex_attention(q, k, v, dropout_p=0.3, enable_gqa=True)

    want = dropped()
    with planted(monkeypatch, "inverse[:, None]", "0.9 * inverse[:, None]") as found:
        assert error(dropped(), want) < 1e-5
        assert found


def test_ranks_decide_alike(monkeypatch):
    """Processes of a group have inputs of their own: each judges the same made-up call."""
    mask = create_block_mask(causal, None, None, 40, 50, device="cpu", BLOCK_SIZE=16)
    q, k, v = made(40, 50, B=2)
    want = attention(q, k, v, score_mod=CAP, block_mask=mask).out
    seen = []
    monkeypatch.setattr("flexattn.frontend.plan.judged_apart", lambda q: True)
    monkeypatch.setattr("flexattn.frontend.plan.judge_rows", seen.append)
    with planted(monkeypatch, "* 20.0", "* 16.0") as found:
        got = flex_attention(q, k, v, score_mod=CAP, block_mask=mask, enable_gqa=True)
        assert error(got, want) < 1e-5
    assert found and not seen


def test_warm(monkeypatch):
    layer = {
        "heads": [2, 1],
        "head_dim": 16,
        "dtype": "float32",
        "score": {"mod": "flexattn.catalogue:softcap", "args": [20.0]},
    }
    work = {"layers": [{**layer, "calls": [{"q_len": 129}, {"q_len": 40, "backward": True}]}]}
    with planted(monkeypatch, "* 20.0", "* 16.0"), pytest.raises(WrongKernelError, match="right"):
        warm(work, device="cpu")


def test_always_looks_at_each_launch(monkeypatch):
    q, k, v = made()
    looked = []
    import flexattn.frontend.plan as verified

    judged = verified.judge_rows
    monkeypatch.setattr(verified, "judge_rows", lambda *args: looked.append(1) or judged(*args))
    with planted(monkeypatch, "no such text", ""):
        for mode, times in (("first", 1), ("always", 3), ("off", 0)):
            looked.clear()
            with override(verify=mode):
                for _ in range(3):
                    flex_attention(q, k, v, score_mod=CAP, enable_gqa=True)
            assert len(looked) == times, mode
