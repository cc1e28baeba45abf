"""What a forward shows to autograd, and what a backward reads, in first and in later calls."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from flexattn import create_block_mask, flex_attention
from flexattn.block_mask.lists import lazy_mask
from tests.support import inputs


def leaves():
    return [x.requires_grad_() for x in inputs(1, 1, 1, 16, 16, 16)]


def learned():
    """Score_mods that nobody has called: by name, each with what it learns."""
    bias, gate = (torch.linspace(-1, 1, 65, requires_grad=True) for _ in range(2))
    return {
        "a number": (lambda s, b, h, i, j: s * 1.25, []),
        "a bias": (lambda s, b, h, i, j: torch.tanh(s) + bias[i - j + 32], [bias]),
        "saved by autograd": (lambda s, b, h, i, j: s * gate[h].sigmoid(), [gate]),
    }


def documents():
    ids = torch.tensor([0] * 8 + [1] * 8)
    return ids, create_block_mask(
        lambda b, h, i, j: ids[i] == ids[j], None, None, 16, 16, "cpu", 8
    )


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [("a number", False), ("a bias", True), ("saved by autograd", False)],
)
def test_a_checkpoint_around_the_first_call_with_a_mod(name, reentrant):
    """The first call ran autograd inside of the forward: CheckpointError, "6 tensors saved during
    forward, 5 during recomputation"; later calls passed."""
    mod, tables = learned()[name]
    given, (_, mask) = leaves(), documents()

    def call(q, k, v):
        return flex_attention(q, k, v, mod, mask).square().sum()

    checkpoint(call, *given, use_reentrant=reentrant).backward()
    first = [x.grad for x in (*given, *tables)]
    plain = torch.autograd.grad(call(*given), [*given, *tables])
    assert all(map(torch.equal, first, plain))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", learned())
def test_hooks_see_as_much_of_the_first_call_as_of_others(name, deterministic):
    (mod, tables), given, (_, mask) = learned()[name], leaves(), documents()
    if deterministic and tables:
        mod = lambda s, b, h, i, j: s + tables[0].detach()[i]  # noqa: E731
    seen = []
    torch.use_deterministic_algorithms(deterministic)
    try:
        for _ in range(3):
            packed = []
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda x, packed=packed: packed.append(x.shape) or x, lambda x: x
            )
            with hooks:
                flex_attention(*given, mod, mask)
            seen.append(packed)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen[0] and seen[0] == seen[1] == seen[2]


def test_what_is_saved_may_lie_on_the_cpu_and_hooks_may_be_off():
    """Lists that come back from elsewhere are other tensors: a mask is made of them."""
    (mod, tables), given, (_, mask) = learned()["a bias"], leaves(), documents()
    with torch.autograd.graph.save_on_cpu():
        out = flex_attention(*given, mod, mask)
    mask.kv_indices.zero_()  # a copy was saved: nothing raises, and nothing is wrong
    found = torch.autograd.grad(out.square().sum(), [*given, *tables])
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        plain = flex_attention(*given, learned()["a bias"][0], documents()[1]).square().sum()
    assert all(map(torch.equal, found[:3], torch.autograd.grad(plain, given)))


REWRITTEN = {
    "counts of partial blocks": lambda call: call["mask"].kv_num_blocks,
    "partial blocks": lambda call: call["mask"].kv_indices,
    "counts of full blocks": lambda call: call["mask"].full_kv_num_blocks,
    "full blocks": lambda call: call["mask"].full_kv_indices,
    "a table of the mask": lambda call: call["ids"],
    "a table of the score": lambda call: call["bias"],
    "sinks": lambda call: call["sinks"],
}


def attended():
    """A call with what it reads: its output, its leaves and its other tensors."""
    given, (ids, mask) = leaves(), documents()
    call = {"ids": ids, "mask": mask, "bias": torch.ones(2), "sinks": torch.zeros(1)}
    bias = call["bias"]

    def again():
        mod = again.mod
        return flex_attention(*given, mod, mask, sinks=call["sinks"])

    again.mod = lambda s, b, h, i, j: s + bias[h]
    return given, call, again


@pytest.mark.parametrize(
    ("name", "repeated"), [*((name, False) for name in REWRITTEN), ("full blocks", True)]
)
def test_what_is_rewritten_before_the_backward_raises_as_autograd_does(name, repeated):
    """Lists that were kept for all steps and rewritten for the next one gave gradients of the new
    mask for the old output, without a word."""
    given, call, again = attended()
    if repeated:
        torch.autograd.grad(again().sum(), given)
    out = again()
    REWRITTEN[name](call).mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), given)


def test_a_mask_that_was_given_other_lists_is_differentiated_as_it_was():
    given, call, again = attended()
    plain = torch.autograd.grad(again().square().sum(), given)
    out, mask = again(), call["mask"]
    mask.full_kv_num_blocks = torch.zeros_like(mask.full_kv_num_blocks)
    found = torch.autograd.grad(out.square().sum(), given)
    assert all(map(torch.equal, found, plain))


def test_lists_of_inference_mode_are_read_as_they_are():
    """They cannot be saved, nor tell when they are written to."""
    given, (_, mask) = leaves(), documents()
    plain = torch.autograd.grad(flex_attention(*given, block_mask=mask).square().sum(), given)
    with torch.inference_mode():
        lists = [
            x.clone()
            for x in (
                mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
            )
        ]  # fmt: skip
    for _ in range(2):
        other = lazy_mask(tuple(lists), mask.BLOCK_SIZE, mask.mask_mod, mask.seq_lengths)
        found = torch.autograd.grad(flex_attention(*given, block_mask=other).square().sum(), given)
        assert all(map(torch.equal, found, plain))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, 2))
        self.project = torch.nn.Linear(16, 16)

    def forward(self, x):
        def mod(s, b, h, i, j):
            return s + self.bias[h] * (i - j)

        return flex_attention(self.project(x), x, x, mod, documents()[1])


@pytest.mark.long
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
def test_a_sharded_layer_whose_forward_is_computed_again():
    """FSDP2 of one process, around a checkpoint: as the bare layer."""
    x = inputs(1, 1, 1, 16, 16, 16)[0]
    torch.manual_seed(0)
    plain = Layer()
    sharded = Layer()
    sharded.load_state_dict(plain.state_dict())
    plain(x).square().sum().backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(sharded)
        for _ in range(2):
            sharded.zero_grad()
            checkpoint(sharded, x, use_reentrant=False).square().sum().backward()
        found = [x.grad.full_tensor() for x in sharded.parameters()]
    finally:
        dist.destroy_process_group()
    for one, other in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad)
