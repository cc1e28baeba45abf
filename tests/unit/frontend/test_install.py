"""install() lets torch's own flex_attention be served by this library, wherever it is named."""

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import flex_attention

import flexattn
from flexattn.errors import CaptureError, UnsupportedError
from flexattn.frontend import install
from flexattn.frontend.compiled import node
from flexattn.frontend.compiled.spec import MARK
from flexattn.settings import override
from tests.compiled import compiling
from tests.packs import pack
from tests.support import inputs

ORIGINAL = flex_attention.__code__


@pytest.fixture(autouse=True)
def uninstalled():
    yield
    flexattn.uninstall()
    assert flex_attention.__code__ is ORIGINAL and not install.installed()


def ramp(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx) / 8


def layer(q, k, v, *more):
    return flex_attention(q, k, v, ramp, *more)


def test_calls_are_served_by_us_until_they_are_given_back(monkeypatch):
    """Under the name that a model imported it by; what we refuse stays torch's."""
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    plain = flex_attention(q, k, v, ramp)
    with flexattn.install() as found:
        got = layer(q, k, v)
        assert torch.equal(got, flexattn.flex_attention(q, k, v, ramp))
        with flexattn.install() as again:
            assert again.served == {"flexattn": 1}
        assert install.installed()
        refused = layer(q, k, v, None, None, False, False, {"PRESCALE_QK": True, "NOPE": 1})
        assert torch.equal(refused, plain)
        ((why, count),) = [each for each in found.served.items() if each[0] != "flexattn"]
        assert why.startswith("torch: ") and "NOPE" in why and count == 1
    assert torch.equal(layer(q, k, v), plain)


def test_a_read_outside_of_a_tensor_is_told_in_checked_mode():
    """It was left to torch, whose kernels read there on a GPU."""
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    table = torch.zeros(8)
    with flexattn.install(), override(check=True), pytest.raises(CaptureError, match="table"):
        flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score + table[kv_idx])


def test_compiled_calls_are_nodes_of_ours(monkeypatch):
    """Also of a function that was compiled before; what we refuse is torch's node, unbroken."""
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    with compiling(monkeypatch, "aot_eager") as compiler:
        model = compiler.compile(layer)

        def marked():
            """Whether the node of the last graph is ours."""
            torch.testing.assert_close(model(q, k, v), wanted)
            (node,) = (x for x in compiler.counter.graphs[-1].graph.nodes if "flex" in x.name)
            return MARK in str(node.args)

        wanted = layer(q, k, v)
        assert not marked()
        with flexattn.install(eager=False) as found:
            assert marked()
            torch.testing.assert_close(layer(q, k, v), wanted)
            assert not found.served
        # Dynamo guards the code of what it traced through: the first graph serves again.
        model(q, k, v)
        assert len(compiler.counter.graphs) == 2
        torch._dynamo.reset()
        assert not marked()
        with flexattn.install():
            monkeypatch.setattr(node, "breaks", lambda _: "a test")
            torch._dynamo.reset()
            assert not marked()


def test_packed_sequences_of_torch_are_served_by_us(monkeypatch):
    """Its varlen_attn has no kernel on the CPU: whatever comes is ours."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    q, k, v, cu, _ = pack()
    wanted = flexattn.varlen_attn(q, k, v, cu, cu, 128, 128, window=(20, 0), return_lse=True)

    def layer(q, k, v, cu):
        return varlen_attn(
            q, k, v, cu, cu, 128, 128, return_aux=AuxRequest(lse=True), window_size=(20, 0),
            enable_gqa=True,
        )  # fmt: skip

    with flexattn.install() as found:
        torch.testing.assert_close(layer(q, k, v, cu), wanted)
        assert found.served == {"flexattn": 1}
        with pytest.raises((NotImplementedError, TypeError)):
            varlen_attn(q, k, v, cu, cu, 128, 128, enable_gqa=True, seqused_k=cu)
        assert any("seqused_k" in each for each in found.served)
        with compiling(monkeypatch, "aot_eager") as compiler:
            torch.testing.assert_close(compiler.compile(layer)(q, k, v, cu), wanted)
    with pytest.raises(NotImplementedError):
        layer(q, k, v, cu)


def test_a_torch_with_other_arguments_is_refused(monkeypatch):
    monkeypatch.setattr(install, "_TAKES", install._TAKES[:-1])
    with pytest.raises(UnsupportedError, match="return_aux"):
        flexattn.install()
    assert torch_flex.flex_attention is flex_attention
