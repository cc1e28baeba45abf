"""Mods that no kernel computes: plain torch does on the CPU, torch's compiled kernel on a GPU.

An eager call refused what torch.compile(flex_attention) serves, on CPU tensors too.
"""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import TorchDynamoException

from flexattn import create_block_mask, explain, flex_attention
from flexattn.errors import NoKernelError
from flexattn.frontend import attention, install
from flexattn.frontend.call import make_call
from flexattn.frontend.plan import plan
from flexattn.mods import bind
from flexattn.mods.bind import stats
from tests.random_mods.mods import everywhere

WIDE = torch.randn(2, 200, generator=torch.Generator().manual_seed(0))
SQUARE = WIDE[0, :64].view(8, 8)


def on_the_diagonal(s, b, h, q, k):
    x = SQUARE.clone()
    x.diagonal().fill_(3)
    return s + x[q % 8, k % 8]


def inputs():
    return torch.randn(3, 1, 2, 24, 16, generator=torch.Generator().manual_seed(0)).unbind()


SCORES = {
    "digamma": lambda s, b, h, q, k: torch.digamma(s * s + 1.0),
    "nextafter": lambda s, b, h, q, k: torch.nextafter(s, k.float()),
    "sort": lambda s, b, h, q, k: s + torch.sort(WIDE[h])[0][0],
    "a long sum": lambda s, b, h, q, k: s + WIDE[h].sum(),
    "bessel": lambda s, b, h, q, k: s + torch.special.bessel_j0(q - k),
    "backwards": lambda s, b, h, q, k: s + WIDE[h].flip(0)[k],
    "deviation": lambda s, b, h, q, k: s + SQUARE[q % 8].std(),
    "a line of a table": lambda s, b, h, q, k: s + torch.diagonal(SQUARE, 1)[q % 7],
    "a line that is written": on_the_diagonal,
    "angle": lambda s, b, h, q, k: s + torch.angle(s) + torch.signbit(s),
}


@pytest.mark.parametrize("name", SCORES)
def test_on_the_cpu_plain_torch_computes_it(name):
    q, k, v = inputs()
    q.requires_grad_()
    found, lse = flex_attention(q, k, v, score_mod=SCORES[name], return_lse=True)
    scores = everywhere(SCORES[name], 1, 2, 24, 24, q @ k.mT / 4)
    expected = scores.softmax(-1) @ v
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    if name != "nextafter":  # torch has no derivative of it
        one, other = (torch.autograd.grad(x.square().sum(), q) for x in (found, expected))
        torch.testing.assert_close(one, other)
    assert explain(q, k, v, score_mod=SCORES[name]).route == "reference"


def coprime(b, h, q, k):
    return torch.gcd(q + 1, k + 1) == 1


def test_its_block_mask_is_torchs(caplog):
    q, k, v = inputs()
    with caplog.at_level(logging.WARNING):
        mask = create_block_mask(coprime, None, None, 24, 24, device="cpu", BLOCK_SIZE=8)
    assert "uses torch.gcd: torch's create_block_mask makes its lists" in caplog.text
    kept = torch.gcd(torch.arange(1, 25)[:, None], torch.arange(1, 25)) == 1
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=kept)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), expected)


def test_it_is_traced_once():
    for _ in range(3):
        with pytest.raises(NoKernelError, match=r"(?s)uses torch.digamma.*rule: .*do: "):
            bind(SCORES["digamma"], "score")
    assert stats().traces == 1


class Elsewhere:
    """What looks like a tensor on a GPU."""

    is_cuda, dtype, requires_grad = True, torch.float32, False
    device = torch.device("cuda")

    def numel(self):
        return 1


@pytest.fixture
def on_a_gpu(monkeypatch):
    """An admitted call that says it is there; what reads memory is not asked."""
    monkeypatch.setattr(attention, "check_memory", lambda tensors: None)
    monkeypatch.setattr(attention, "tangent", lambda tensors: None)

    def made(**more):
        call = make_call(*inputs(), SCORES["digamma"], **more)
        return call._replace(q=Elsewhere())

    return made


def test_on_a_gpu_torchs_kernel_serves_it(on_a_gpu):
    route, why = attention.route_of(on_a_gpu())
    assert route == "torch" and "uses torch.digamma" in why


def test_what_torchs_kernel_does_not_know_is_refused_there(on_a_gpu):
    call = on_a_gpu()
    with pytest.raises(NoKernelError, match="digamma"):
        attention.route_of(call._replace(q=Elsewhere(), k=torch.zeros(1, dtype=torch.float16)))


def test_a_mod_that_torch_does_not_compile_is_refused_in_our_words(monkeypatch):
    def fails(*tensors, **more):
        raise TorchDynamoException("LoweringException of FakeTensor(...)")

    monkeypatch.setattr(install, "torch_flex_attention", lambda: fails)
    call = make_call(*inputs(), SCORES["sort"])
    with pytest.raises(NoKernelError, match=r"(?s)^score_mod.*uses aten.sort.*rule: .*do: "):
        attention._torch(call)


def test_no_plan_is_made_of_it():
    with pytest.raises(NoKernelError, match="digamma"):
        plan(make_call(*inputs(), SCORES["digamma"]))


def test_what_vmap_cannot_map_either_is_refused_in_our_words():
    def mod(s, b, h, q, k):
        x = torch.zeros(2)
        x[0] = torch.digamma(s)
        return x.sum()

    with pytest.raises(NoKernelError, match=r"(?s)writes to a part of a tensor.*rule: "):
        flex_attention(*inputs(), score_mod=mod)
