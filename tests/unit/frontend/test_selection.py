"""Selections on the CPU: plain torch's results, compiled graphs, and what is refused."""

import pytest
import torch

from flexattn import Selection, create_block_mask, explain, flex_attention
from flexattn.catalogue import causal
from flexattn.errors import InputError, InputTypeError
from tests.selections import drawn, mask_of

INDICES = torch.tensor([[[[0, 3], [1, -1], [2, 2], [9, 0]]]])


def given(q_len=256, heads=2):
    draw = torch.Generator().manual_seed(q_len)
    shapes = ((heads, q_len), (2, 256), (2, 256))
    return [torch.randn(1, h, n, 16, generator=draw) for h, n in shapes]


@pytest.mark.parametrize("seed", range(4))
def test_plain_torch_sees_the_same_keys(seed):
    selection, (batch, Hq, Hkv, q_len, kv_len) = drawn(seed, (1, 16, 48, 128))
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, h, n, 16, generator=draw)
        for h, n in ((Hq, q_len), (Hkv, kv_len), (Hkv, kv_len))
    )
    mask = mask_of(selection, q, k)
    found, right = (
        flex_attention(q, k, v, block_mask=x, enable_gqa=True) for x in (selection, mask)
    )
    torch.testing.assert_close(found, right)


def test_a_block_mask_as_a_selection():
    q, k, v = given()
    mask = create_block_mask(causal, None, None, 256, 256, "cpu", 64)
    found = flex_attention(q, k, v, block_mask=Selection.from_block_mask(mask))
    assert torch.equal(found, flex_attention(q, k, v, block_mask=mask))


@pytest.mark.parametrize("rows", [64, 1], ids=["blocks", "rows"])
def test_a_compiled_graph_makes_its_lists(rows):
    q, k, v = given()

    def attend(indices):
        chosen = Selection(indices, None, 64, rows, causal)
        return flex_attention(q, k, v, block_mask=chosen)

    indices = INDICES if rows == 64 else INDICES.repeat_interleave(64, 2)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for some in (indices, indices.flip(2)):
        torch.testing.assert_close(compiled(some), attend(some))


def test_explain_takes_it():
    assert explain(*given(), block_mask=Selection(INDICES, None, 64, 64)).route == "reference"


def test_what_does_not_fit_is_refused():
    q, k, v = given()
    with pytest.raises(InputTypeError, match="int32"):
        Selection(INDICES.float())
    with pytest.raises(InputError, match="batch, heads, blocks of rows, k"):
        Selection(INDICES[0])
    with pytest.raises(InputError, match="without the last one"):
        Selection(INDICES, INDICES[..., 0, 0])
    with pytest.raises(InputError, match="above 0"):
        Selection(INDICES, unit=0)
    with pytest.raises(InputError, match="each block of rows has a choice"):
        flex_attention(q, k, v, block_mask=Selection(INDICES, None, 64, 128))
    three = given(heads=6)[0]
    chosen = Selection(INDICES.expand(1, 3, 4, 2), None, 64, 64)
    with pytest.raises(InputError, match="its heads are 1"):
        flex_attention(three, k, v, block_mask=chosen, enable_gqa=True)
    with pytest.raises(InputError, match="floating"):
        Selection.from_topk(INDICES, 2)
