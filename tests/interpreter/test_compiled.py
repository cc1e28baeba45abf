"""Under torch.compile the kernel that an eager call launches runs in the place of torch's node."""

import pytest
import torch

import flexattn
from flexattn.catalogue import causal
from flexattn.runtime.backward import BackwardLaunch
from flexattn.runtime.launch import ForwardLaunch
from tests.compiled import as_on_a_gpu, compiling
from tests.support import DECODE, PREFILL, block_mask, inputs, poison

# What our launches write is watched here.
pytestmark = pytest.mark.compiled


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(PREFILL, id="prefill"),
        pytest.param(DECODE, id="decode", marks=pytest.mark.long),
    ],
)
def test_the_same_launch_serves_compiled_and_eager_calls(monkeypatch, kind):
    """One kernel for both: its source, its config and its record; captured values and all."""
    length = 5 if kind is DECODE else 37
    q, k, v = inputs(2, 4, 2, length, 53, 16)
    mask = block_mask(causal, q, k, 16)
    launches, run = [], ForwardLaunch.run

    def poisoned(launch, *given):
        launches.append(launch)
        with pytest.MonkeyPatch.context() as patch:
            poison(patch)
            return run(launch, *given)

    monkeypatch.setattr(ForwardLaunch, "run", poisoned)

    def layer(q, k, v, table, slope):
        def mod(score, b, h, q_idx, kv_idx):
            return torch.tanh(score) + slope * table[h, kv_idx]

        call = {"block_mask": mask, "enable_gqa": True, "kernel_options": kind}
        return flexattn.flex_attention(q, k, v, mod, **call)

    with compiling(monkeypatch) as found:
        model = found.compile(layer)
        for slope in (0.5, -1.25, 3.0):
            table = torch.randn(4, 53)
            got, wanted = model(q, k, v, table, slope), layer(q, k, v, table, slope)
            assert torch.equal(got, wanted)
            compiled, eager = launches[-2:]
            assert compiled.choice.source.text == eager.choice.source.text
            assert compiled.choice.config == eager.choice.config
        assert len(found.called) == 3 and len(found.counter.graphs) <= 3


def test_the_same_launch_serves_compiled_and_eager_gradients(monkeypatch):
    """Of q, k, v and a captured table, through out and lse; runs of the mask and all."""
    as_on_a_gpu(monkeypatch)
    table = torch.linspace(-1, 1, 2 * 27).reshape(2, 27)
    given = [x.requires_grad_() for x in (*inputs(1, 2, 1, 21, 27, 16), table)]
    mask = block_mask(causal, *given[:2], 16)
    assert mask.q_num_blocks is not None
    launches, run = [], BackwardLaunch.run

    def kept(launch, *more):
        launches.append(launch)
        return run(launch, *more)

    monkeypatch.setattr(BackwardLaunch, "run", kept)

    def layer(q, k, v, table):
        def mod(score, b, h, q_idx, kv_idx):
            return torch.tanh(score) + table[h, kv_idx]

        call = {"enable_gqa": True, "return_lse": True, "kernel_options": PREFILL}
        out, lse = flexattn.flex_attention(q, k, v, mod, mask, **call)
        return out.square().sum() + lse.sum()

    with compiling(monkeypatch) as found:
        model = found.compile(layer)
        mine, eager = (torch.autograd.grad(call(*given), given) for call in (model, layer))
        assert len(found.differentiated) == 1
        # Once gradients of the new lists for the old output, as those of an eager call.
        loss = model(*given)
        mask.kv_indices.mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, given)
    compiled, own = launches
    assert compiled.choice.source.text == own.choice.source.text and compiled.runs == own.runs
    for got, wanted in zip(mine, eager, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
