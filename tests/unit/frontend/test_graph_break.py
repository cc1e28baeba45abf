"""What is left outside of compiled graphs, and an import of flexattn that stays cheap."""

import pytest
import torch

import flexattn
from flexattn.catalogue import causal
from tests.processes import python
from tests.support import block_mask, inputs


def test_import_does_not_load_the_compiler():
    code = "import sys, flexattn; assert not {'torch._dynamo', 'triton'} & {*sys.modules}"
    python("-c", code)


@pytest.fixture
def counter():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


def test_a_call_without_a_node_stands_between_two_graphs(counter):
    q, k, v = (x.requires_grad_() for x in inputs(1, 4, 2, 64, 64, 16))
    mask = block_mask(causal, q, k)

    def layer(q, k, v):
        def shifted(score, b, h, q_idx, kv_idx):
            return score + q_idx

        call = {"score_mod": shifted, "block_mask": mask, "enable_gqa": True}
        return 2 * flexattn.flex_attention(2 * q, k, v, **call)

    compiled = torch.compile(layer, backend=counter)
    assert torch.equal(compiled(q, k, v), layer(q, k, v))
    # One graph before the call and one after it: nothing of ours is traced.
    assert (counter.frame_count, counter.op_count) == (2, 2)


def test_compiled_by_itself_it_is_no_graph_at_all(counter):
    q, k, v = (x.requires_grad_() for x in inputs(1, 4, 2, 64, 64, 16))
    out, lse = torch.compile(flexattn.flex_attention, backend=counter)(
        q, k, v, enable_gqa=True, return_lse=True
    )
    wanted = flexattn.flex_attention(q, k, v, enable_gqa=True, return_lse=True)
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    assert counter.frame_count == 0
