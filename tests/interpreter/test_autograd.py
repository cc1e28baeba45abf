"""Autograd around calls of kernels: what it saves, what it refuses, what it leaves alone."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexattn
from flexattn import explain, flex_attention
from flexattn.catalogue import causal
from flexattn.errors import ConfigError, UnsupportedError
from flexattn.frontend import gradients
from tests.support import inputs


def leaves(**sizes):
    return [x.requires_grad_() for x in inputs(1, 2, 2, 21, 27, **sizes)]


def capped(s, b, h, q, k):
    return 4.0 * torch.tanh(s / 4.0)


def wanted(call, given, *more):
    return torch.autograd.grad(call(*given).square().sum(), [*given, *more])


def attend(q, k, v, **more):
    return flex_attention(q, k, v, capped, **more)


def test_explain_says_what_differentiates():
    given = leaves()
    table = torch.ones(2, requires_grad=True)
    found = explain(*given, lambda s, b, h, q, k: 3 * torch.tanh(s) + table[h])
    assert found.route == "interpreter" and "query requires grad" in found.why
    assert found.backward.captured == ("score_buf0_grad",)
    assert "BLOCK_N1" in str(found) and "atomic" in str(found) and "tanh(score)" in str(found)
    with torch.no_grad():
        assert explain(*given, capped).backward is None
    tiles = {"BLOCK_M1": 16, "bwd_BLOCK_N1": 64, "BLOCK_M2": 64, "bwd_num_warps": 8}
    config = explain(*given, capped, kernel_options=tiles).backward.config
    assert (config.BLOCK_M1, config.BLOCK_N1, config.BLOCK_M2) == (16, 64, 64)
    assert config.num_warps == 8


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(reentrant):
    given = leaves()
    plain = wanted(attend, given)
    again = [x.detach().requires_grad_() for x in given]
    checkpoint(attend, *again, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(again, plain, strict=True))


def test_saved_tensors_may_be_moved_and_packed():
    """What comes back from a hook lies dense, whatever the layout was."""
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in leaves())
    given = [x.requires_grad_() for x in (q, k, v)]
    plain = wanted(attend, given)
    pack, unpack = (lambda x: x.clone(memory_format=torch.contiguous_format)), (lambda x: x)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        found = wanted(attend, given)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_autocast_converts_the_inputs_and_gives_gradients_of_their_dtype():
    given = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*given)
    assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out.float().square().sum(), given)
    rounded = [x.detach().bfloat16().requires_grad_() for x in given]
    plain = torch.autograd.grad(attend(*rounded).float().square().sum(), rounded)
    assert all(x.dtype == torch.float32 for x in found)
    assert all(torch.equal(x, y.float()) for x, y in zip(found, plain, strict=True))


def test_gradients_have_none_of_their_own():
    given = leaves()
    first = torch.autograd.grad(attend(*given).square().sum(), given, create_graph=True)
    with pytest.raises(UnsupportedError, match="no backward"):
        first[0].sum().backward()
    # A graph that nobody follows is no matter.
    x = torch.ones(2, requires_grad=True)
    loss = x.square().sum() + attend(*given).sum()
    grads = torch.autograd.grad(loss, [x, *given], create_graph=True)
    grads[0].sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))


def test_some_inputs_alone():
    q, k, v = leaves()
    whole = wanted(attend, [q, k, v])
    for place, x in enumerate((q, k, v)):
        fixed = [y.detach() for y in (q, k, v)]
        fixed[place] = x
        (found,) = torch.autograd.grad(attend(*fixed).square().sum(), [x])
        assert torch.equal(found, whole[place])


def test_a_captured_table_alone():
    """Nothing of q, k and v is asked for, and a table that nobody asks for stays without."""
    q, k, v = leaves()
    table, other = (torch.full((2,), x, requires_grad=True) for x in (0.5, 0.25))

    def mod(s, b, h, q, k):
        return capped(s + table[h], b, h, q, k) * other[h]

    *_, whole = wanted(lambda *given: flex_attention(*given, mod), [q, k, v], table)
    out = flex_attention(q.detach(), k.detach(), v.detach(), mod)
    (found,) = torch.autograd.grad(out.square().sum(), [table])
    torch.testing.assert_close(found, whole)
    other.requires_grad_(False)
    out = flex_attention(q.detach(), k.detach(), v.detach(), mod)
    out.square().sum().backward()
    torch.testing.assert_close(table.grad, whole)
    assert other.grad is None


def test_hooks_run_and_a_graph_serves_twice():
    given = leaves()
    plain = wanted(attend, given)
    given[0].register_hook(lambda grad: 2 * grad)
    seen = []
    out = attend(*given)
    out.register_hook(lambda grad: seen.append(grad.shape))
    out.grad_fn.register_prehook(lambda grads: seen.append(len(grads)))
    loss = out.square().sum()
    for times in (1, 2):
        loss.backward(retain_graph=times == 1)
        for x, grad, factor in zip(given, plain, (2, 1, 1), strict=True):
            assert torch.equal(x.grad, times * factor * grad)
    assert seen == [out.shape, 3] * 2
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_an_output_that_is_expanded_or_lse_alone():
    """The gradient of a sum is one number seen everywhere; that of out is None beside lse's."""
    given = leaves()
    found = torch.autograd.grad(attend(*given).sum(), given)
    dense = torch.autograd.grad(attend(*given), given, torch.ones(1, 2, 21, 16))
    assert all(map(torch.equal, found, dense))
    _, lse = flex_attention(*given, capped, return_lse=True)
    grads = torch.autograd.grad(lse.sum(), given, allow_unused=True)
    scores = 4 * torch.tanh(given[0] @ given[1].mT / 4 / 4)
    plain = torch.autograd.grad(scores.logsumexp(-1).sum(), given[:2])
    for one, other in zip(grads, plain, strict=False):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not grads[2].any()


def test_max_scores_have_no_gradient():
    given = leaves()
    asked = flexattn.AuxRequest(lse=True, max_scores=True)
    _, aux = flex_attention(*given, return_aux=asked)
    assert aux.lse.requires_grad and not aux.max_scores.requires_grad


def test_what_was_written_since_is_seen():
    given = leaves()
    out = attend(*given)
    with torch.no_grad():
        given[1].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def added(table):
    return lambda s, b, h, q, k: s + table[h]


def test_nothing_is_kept_alive():
    given = leaves()
    table = torch.ones(2, requires_grad=True)
    biased = added(table)
    mask = flexattn.create_block_mask(causal, None, None, 21, 27, "cpu", 16)
    out = flex_attention(*given, biased, mask)
    out.sum().backward()
    gone = [weakref.ref(x) for x in (*given, out, table, mask)]
    for x in given:
        x.grad = None
    del given, out, table, mask, biased, x
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


REFUSED = {
    "an operation without a derivative": (
        lambda s, b, h, q, k: torch.special.gammaln(s.abs() + 1.0), "lgamma"
    ),
    "torch has none either": (lambda s, b, h, q, k: s + s // 2.0, "floor_div"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_before_anything_runs(name):
    mod, word = REFUSED[name]
    with pytest.raises(UnsupportedError, match=word):
        flex_attention(*leaves(), mod)


def test_numbers_that_cannot_run_are_refused_before_the_forward():
    with pytest.raises(ConfigError, match="tensor descriptors"):
        attend(*leaves(), kernel_options={"bwd_USE_TMA": True})


class _Tripled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2.0

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 3.0


TABLE = torch.linspace(0.5, 1.5, 27, requires_grad=True)


def _without_grad(s, b, h, q, k):
    with torch.no_grad():
        known = TABLE[k] * 2
    return s + known


OWN = {
    "a score detached": lambda s, b, h, q, k: s.detach() * TABLE[k] + s,
    "a table detached": lambda s, b, h, q, k: s * TABLE[k].detach(),
    "the first key detached": lambda s, b, h, q, k: torch.where(k == 0, s.detach(), s),
    "little detached": lambda s, b, h, q, k: 0.985 * s + (0.015 * s).detach(),
    "no_grad": _without_grad,
    "a Function": lambda s, b, h, q, k: _Tripled.apply(s),
}


@pytest.mark.parametrize("name", OWN)
def test_what_a_mod_keeps_from_autograd_is_kept(name):
    """256 random positions said whether a mod has its expression's derivative, up to 2 %: what
    was detached at the first key alone, or by less, had wrong gradients."""
    given = leaves()
    found = explain(*given, OWN[name])
    assert found.route == ("reference" if name == "a Function" else "interpreter")
    assert ("autograd Function" in found.why) == (name == "a Function")
    attended = flex_attention(*given, OWN[name]).square().sum()
    grads = torch.autograd.grad(attended, [*given, TABLE], allow_unused=True)

    scores = given[0] @ given[1].mT / 4
    k = torch.arange(27)
    modded = OWN[name](scores, 0, 0, 0, k)
    plain = (torch.softmax(modded, -1) @ given[2]).square().sum()
    for one, other in zip(
        grads, torch.autograd.grad(plain, [*given, TABLE], allow_unused=True), strict=True
    ):
        if other is None or one is None:
            assert one is None or not one.any()
        else:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_torch_func_takes_the_reference():
    given = leaves()

    def loss(q):
        return attend(q, *(x.detach() for x in given[1:])).square().sum()

    found = torch.func.grad(loss)(given[0].detach())
    (plain,) = torch.autograd.grad(loss(given[0]), [given[0]])
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


def test_no_query_and_no_key_have_gradients_of_zero():
    q, k, v = leaves()
    for sizes in ((0, 27), (21, 0)):
        x, y, z = q[:, :, : sizes[0]], k[:, :, : sizes[1]], v[:, :, : sizes[1]]
        grads = torch.autograd.grad(flex_attention(x, y, z).sum(), [q, k, v])
        assert not any(g.any() for g in grads)


def test_a_captured_tensor_that_is_computed():
    """The gradient goes on to what it was made of."""
    given = leaves()
    weight = torch.linspace(-1, 1, 2, requires_grad=True)
    slopes = torch.exp(weight)
    out = flex_attention(*given, lambda s, b, h, q, k: s * slopes[h])
    (found,) = torch.autograd.grad(out.square().sum(), [weight])
    scores = given[0] @ given[1].mT / 4 * torch.exp(weight)[:, None, None]
    plain = (torch.softmax(scores, -1) @ given[2]).square().sum()
    torch.testing.assert_close(
        found, torch.autograd.grad(plain, [weight])[0], rtol=1e-4, atol=1e-5
    )


def test_gradients_of_lse_at_any_address():
    """Kernels are told that rows of statistics begin at whole 16 bytes; a view need not."""
    given = leaves()
    out, lse = flex_attention(*given, return_lse=True)
    wide = torch.linspace(-1, 1, lse.numel() + 1)
    shifted = wide[1:].view(lse.shape)
    assert shifted.is_contiguous() and shifted.data_ptr() % 16
    found = torch.autograd.grad([out, lse], given, [torch.ones_like(out), shifted], True)
    plain = torch.autograd.grad([out, lse], given, [torch.ones_like(out), shifted.clone()])
    assert all(map(torch.equal, found, plain))


def test_functions_of_one_code_and_one_expression_are_told_apart():
    """Which of two functions a wrapper calls decides, and both compute the same."""

    def wrapped(inner):
        return lambda s, b, h, q, k: inner(s) * 2.0

    given = leaves()
    plain, detached = wrapped(lambda s: s + 1.0), wrapped(lambda s: s.detach() + 1.0)
    for mod, derivative in ((plain, "2"), (detached, "0"), (plain, "2")):
        found = explain(*given, mod)
        assert found.route == "interpreter"
        assert found.backward.score_gradient.startswith(derivative)


def test_a_backward_without_a_record_is_listed_for_the_tuner(monkeypatch):
    listed = []
    monkeypatch.setattr(gradients, "note", lambda *given: listed.append(given))
    wanted(attend, [x.requires_grad_() for x in inputs(1, 2, 2, 18, 20)])
    ((problem, _, how, score, mask),) = listed
    assert (problem.structure.kind, how, mask) == ("backward", "default", None)
    assert score.mod.kind == "score"
