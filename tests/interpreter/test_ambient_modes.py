"""An ambient mode decides for us what it decides for torch, and nothing else.

create_block_mask made some tensors of its own on the default device, whatever `device` said; what
was made once and kept in inference mode could not be read by a backward later.
"""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flexattn import flex_attention
from flexattn.mods.bind import clear
from flexattn.serving import DecodePlan, ServingConfig
from tests.serving import assert_right, batch, run
from tests.support import PREFILL, block_mask, inputs


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def float64():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES = {
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "fake": FakeTensorMode,
    "deterministic": deterministic,
    "dtype": float64,
}


def attended(q, k, v, learned):
    """out and the gradients of q, k, v and, where it is learned, a table that is captured."""
    clear()
    table = torch.linspace(-1, 1, 53, dtype=torch.float32, device="cpu")
    ids = torch.arange(53, device="cpu") // 20
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    if learned:
        leaves.append(table.requires_grad_())

    def mod(score, b, h, q_idx, kv_idx):
        return score * 0.5 + table[kv_idx]

    mask = block_mask(lambda b, h, q_idx, kv_idx: ids[q_idx] >= ids[kv_idx], q, k, 16)
    out = flex_attention(*leaves[:3], mod, mask, kernel_options=PREFILL)
    return (out, *torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("mode", ["device", "deterministic", "dtype"])
def test_a_call_and_its_gradients(mode):
    given = inputs(1, 2, 2, 37, 53, 16)
    # Whose gradient is added up in no order.
    learned = mode != "deterministic"
    wanted = attended(*given, learned)
    with MODES[mode]():
        got = attended(*given, learned)
    assert all(map(torch.equal, got, wanted))


def test_what_was_first_asked_in_inference_mode_is_differentiated_later():
    """The mask and its lists by key, the traces and all that a first call keeps."""
    q, k, v = inputs(1, 2, 2, 37, 53, 16)
    with torch.inference_mode():
        clear()
        mask = block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx // 2, q, k, 16)
        assert mask.q_indices is not None and not mask.q_indices.is_inference()
        flex_attention(q, k, v, None, mask, kernel_options=PREFILL)
    q.requires_grad_()
    flex_attention(q, k, v, None, mask, kernel_options=PREFILL).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_made_under_it(mode):
    each = batch([1] * 3, [60, 3, 17], 2, 1)
    maxima = {"batch": 3, "kv_len": 64, "heads": (2, 1), "head_dim": 16, "lse": True}
    with MODES[mode]():
        plan = DecodePlan(
            **maxima, dtype=each.q.dtype, device="cpu", config=ServingConfig(16, 16, 4, 2)
        )
    assert_right(run(plan, each), each)
