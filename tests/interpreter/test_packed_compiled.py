"""Packed sequences in compiled graphs: the kernels of eager calls, emulated."""

import pytest
import torch

import flexattn
import flexattn.frontend.packed as engine
import flexattn.runtime.ragged as packed
import tests.interpreter.test_packed_gradients as gradients
import tests.interpreter.test_packed_launch as forward
from flexattn.frontend import varlen
from flexattn.frontend.compiled import sequences
from flexattn.runtime.build import Builder, builder
from flexattn.settings import override
from tests.compiled import as_on_a_gpu, compiling
from tests.packs import alone, offsets

TARGET = gradients.TARGET
on_hopper = gradients.on_hopper

pytestmark = pytest.mark.compiled


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """Tensors of the CPU count as those of a small Hopper; its kernels as they are made."""
    found = []

    class Both(Builder):
        def kernel(self, source, target, index):
            if source.language != "gluon":
                return builder().kernel(source, target, -1)
            backwards = source.entry.startswith("flexattn_hopper_backward")
            found.append((gradients if backwards else forward).Emulated(source))
            return found[-1]

    forward.on_hopper.__wrapped__(monkeypatch)
    monkeypatch.setattr(packed, "builder", Both)
    for module, name in ((engine, "is_readable"), (sequences, "is_readable")):
        monkeypatch.setattr(module, name, lambda *given: True)
    monkeypatch.setattr(varlen, "reads_packs", lambda device: True)
    monkeypatch.setattr(engine, "detect", lambda _: TARGET)
    as_on_a_gpu(monkeypatch)
    with override(verify="first", check=False, cache_dir=tmp_path):
        yield found


def close(got, wanted):
    for mine, right in zip(got, wanted, strict=True):
        worst = (mine.double() - right).abs().max()
        assert worst <= 0.02 * right.abs().max(), float(worst)


CASES = {
    "causal": ({"causal": True}, [70, 1, 0, 99], None),
    "window": ({"window": (40, 0)}, [70, 1, 0, 99], None),
    "other keys": ({}, [40, 80, 1], [90, 9, 7]),
}  # fmt: skip
QUICK = "window"


@pytest.mark.parametrize(
    "name",
    [each if each == QUICK else pytest.param(each, marks=pytest.mark.long) for each in CASES],
)
def test_gradients_by_the_kernels_of_eager_calls(name, launches, monkeypatch):
    """New lengths in the same tensor, a column of a table, compile nothing; no list is read."""
    asked, q_lens, k_lens = CASES[name]
    one = k_lens is None
    q, k, v, dout, cu_q, cu_k = gradients.made(q_lens, k_lens or q_lens, heads=(2, 2))
    if one:
        cu_q = cu_k = torch.stack((cu_q, cu_q + 1), 1)[:, 0]
    given = (torch.stack((q, k, v), 1),) if one else (q, k, v)

    def attend(cu_q, cu_k, *given):
        q, k, v = (given[0] * 1).unbind(1) if one else given
        return flexattn.varlen_attn(q, k, v, cu_q, cu_k, scale=0.1, **asked)

    left, right = asked.get("window", (-1, 0 if asked.get("causal") else -1))
    with compiling(monkeypatch) as found:
        model = found.compile(attend)
        for turn in range(2):
            if turn:
                cu_q.copy_(offsets(q_lens[::-1]))
                cu_k.copy_(offsets((k_lens or q_lens)[::-1]))
            leaves = [x.clone().requires_grad_() for x in given]
            out = model(cu_q, cu_k, *leaves)
            got = out, *torch.autograd.grad(out, leaves, dout)
            exact = [x.double().requires_grad_() for x in given]
            parts = exact[0].unbind(1) if one else exact
            wanted, _ = alone(*parts, cu_q, cu_k, left=left, right=right, scale=0.1)
            close(got, (wanted, *torch.autograd.grad(wanted, exact, dout.double())))
        assert found.counter.frame_count == 1 and not found.called and not found.differentiated
    # A kernel that the document mask judges wrong would be made twice.
    assert len(launches) == 2 and all(len(each.launched) >= 2 for each in launches)
