"""What has not run on a GPU yet is used there only where it is asked for."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flexattn.errors import SettingsError, UnsupportedError
from flexattn.frontend.admission import make_call
from flexattn.frontend.attention import route_of
from flexattn.frontend.call import Call
from flexattn.frontend.compiled import lowering, mark, node, rules
from flexattn.settings import override, read


def on_a_gpu(**options):
    """An admitted call of a GPU's tensors that want gradients; no GPU is needed for its route."""
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in "qkv")
    call = make_call(q, k, v, None, None, None, False, False, options or None, None)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 8, 16, device="cuda").requires_grad_() for _ in "qkv")
    return call._replace(q=q, k=k, v=v)


def test_torch_differentiates_on_a_gpu_unless_the_backward_is_asked_for():
    with override(experimental=frozenset()):
        route, why = route_of(on_a_gpu())
        assert route == "torch" and "FLEXATTN_EXPERIMENTAL=backward" in why
        with pytest.raises(UnsupportedError, match="DETERMINISTIC"):
            route_of(on_a_gpu(DETERMINISTIC=True))
    with override(experimental=frozenset({"backward"})):
        assert route_of(on_a_gpu())[0] == "kernel"


def test_a_call_breaks_a_graph_unless_a_node_is_asked_for(monkeypatch):
    call = Call(*(torch.randn(1, 2, 8, 16) for _ in "qkv"), *[None] * 11)
    assert rules.breaks(call) == ""
    monkeypatch.setattr(rules, "NODES", False)
    assert "FLEXATTN_EXPERIMENTAL=compile" in rules.breaks(call)


def test_a_nodes_gradients_are_torchs_unless_the_backward_is_asked_for(monkeypatch):
    """Its lowering sees the mark alone, which is a part of the key of Inductor's cache."""
    monkeypatch.setattr(node, "GRADIENTS", False)
    marks = node._marked(on_a_gpu())
    assert mark.MARK in marks and mark.BACKWARD not in marks
    assert lowering.lower_backward(*[None] * 11, marks, (), (), options={}) is None
    monkeypatch.setattr(node, "GRADIENTS", True)
    assert mark.BACKWARD in node._marked(on_a_gpu())


@pytest.mark.parametrize("text", ["forward", "backward,forward", "backward compile"])
def test_another_name_is_refused(text):
    with pytest.raises(SettingsError, match="backward and compile"):
        read({"FLEXATTN_EXPERIMENTAL": text})
    assert read({"FLEXATTN_EXPERIMENTAL": "compile,"}).experimental == {"compile"}
