"""Whether a compiled graph's gradients are those of its mod's expression."""

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from flexattn.frontend.compiled import joint
from flexattn.mods.graph import Captured, read_graph


def table_of(score, b, h, q_idx, kv_idx, table):
    return torch.tanh(score) * table[h, kv_idx] + table[h, q_idx]


def detached(score, b, h, q_idx, kv_idx, table):
    return score.detach() * table[h, kv_idx] + score


@torch.no_grad()
def kept(score):
    """Of which a graph keeps nothing."""
    return 0.015 * score


def without_grad(score, b, h, q_idx, kv_idx, table):
    return kept(score) * 60 * table[h, kv_idx] + score


def one_key_without_grad(score, b, h, q_idx, kv_idx, table):
    return torch.where(kv_idx == 100, kept(score), 0.015 * score) * table[h, kv_idx]


def little_without_grad(score, b, h, q_idx, kv_idx, table):
    return (0.985 * score + kept(score)) * table[h, kv_idx]


def capped(score, b, h, q_idx, kv_idx, table):
    return 20.0 * torch.tanh(score / 20.0) + table[h, kv_idx]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("mod", "same"),
    [
        (table_of, True),
        (capped, True),
        (detached, True),
        (without_grad, False),
        (one_key_without_grad, False),
        (little_without_grad, False),
    ],
)
def test_a_graph_that_keeps_something_from_autograd_is_torchs(mod, same, dtype):
    """torch's graphs lose what was computed without grad mode: the derivative would be another.

    Random positions missed a single key, and what was less than 2 % of a gradient. The captured
    tensor has a million elements, and the check reads a smaller one in its place. A graph of 16
    bits rounds scores and gradients between its operations. The check once took that for another
    function, and torch's backward computed the gradients of every soft cap in bfloat16.
    """
    from torch._higher_order_ops.flex_attention import create_fw_bw_graph
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    table = torch.empty(2, 2**20, requires_grad=True)
    index = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    given = torch.zeros((), dtype=dtype, requires_grad=True), *index
    with TransformGetItemToIndex():
        graph, backward = create_fw_bw_graph(mod, given, (table,))
        forward = make_fx(graph)(*given, table)
        lowered = make_fx(backward, decomposition_table=select_decomp_table())
        backward = lowered(*given, torch.ones((), dtype=dtype), table)
    captures = [Captured(tuple(table.shape), "float32")]
    examples = joint.Examples(captures)
    bound = examples.bound(read_graph(forward, "score", captures))
    assert joint.with_gradients(backward) == [0]
    assert examples.tensors[0].numel() <= 2**18
    assert joint.joint_agrees(backward, bound, examples, (1, 2, 9, 111)) is same
