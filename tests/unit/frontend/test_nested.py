"""Nested tensors become packed ones with a document mask, and come back."""

import pytest
import torch

from flexattn import and_masks, create_block_mask, flex_attention, pack
from flexattn.catalogue import causal, document_ids
from flexattn.errors import InputError, InputTypeError, LayoutError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
LENGTHS = [3, 0, 17, 1]


def rows(heads, width, lengths=LENGTHS):
    draw = torch.Generator().manual_seed(heads * width)
    return [torch.randn(n, heads, width, generator=draw).requires_grad_() for n in lengths]


def nested(parts, layout=torch.jagged):
    return torch.nested.as_nested_tensor(parts, layout=layout).transpose(1, 2)


def attend(packed, mask_mod):
    lengths = packed.query.shape[2], packed.key.shape[2]
    mask = create_block_mask(mask_mod, None, None, *lengths, "cpu", 16)
    return flex_attention(
        packed.query, packed.key, packed.value, block_mask=mask, enable_gqa=True, return_lse=True
    )


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("keys", [LENGTHS, [2, 4, 1, 9]], ids=str)
def test_there_and_back(layout, keys):
    parts = rows(4, 8), rows(2, 8, keys), rows(2, 6, keys)
    packed = pack(*(nested(each, layout) for each in parts))
    same = keys is LENGTHS
    out, lse = attend(packed, and_masks(packed.mask_mod, causal) if same else packed.mask_mod)
    found, norms = packed.unpack(out).unbind(), packed.unpack(lse).unbind()
    for i, (q, k, v) in enumerate(zip(*parts, strict=True)):
        mask = create_block_mask(causal, None, None, len(q), len(k), "cpu") if same else None
        alone = [each.transpose(0, 1)[None] for each in (q, k, v)]
        wanted = flex_attention(*alone, block_mask=mask, enable_gqa=True, return_lse=True)
        torch.testing.assert_close((found[i], norms[i]), (wanted[0][0], wanted[1][0]))


def test_gradients_reach_the_sequences():
    parts = rows(2, 8), rows(2, 8), rows(2, 8)
    packed = pack(*map(nested, parts))
    packed.unpack(attend(packed, packed.mask_mod)[0]).values().sum().backward()
    assert all(each.grad is not None for each in (*parts[0], *parts[1], *parts[2]))


def test_jagged_tensors_are_not_copied():
    q, k, v = (nested(rows(2, 8)).detach() for _ in "qkv")
    packed = pack(q, k, v)
    assert packed.query.data_ptr() == q.values().data_ptr() and packed.q_offsets is q.offsets()


def test_document_ids_of_offsets():
    offsets = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    found = document_ids(offsets)
    assert found.tolist() == [0, 0, 0, 2, 2] and found.dtype == torch.int32


GOOD = nested(rows(2, 8))
REFUSED = {
    "a list": ([1.0], InputTypeError, "query is a list.*nested tensor"),
    "dense": (torch.zeros(1, 2, 3, 8), LayoutError, "query is not nested.*as they are"),
    "ragged elsewhere": (GOOD.transpose(1, 2), LayoutError, r"dimension 1.*x.transpose\(1, 2\)"),
    "fewer sequences": (nested(rows(2, 8, [3])), InputError, "lengths.*as many sequences"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    query, error, words = REFUSED[name]
    with pytest.raises(error, match=f"(?s){words}"):
        pack(query, GOOD, GOOD)


def test_strided_ones_whose_heads_are_ragged():
    turned = nested(rows(2, 8), torch.strided).transpose(1, 2)
    with pytest.raises(LayoutError, match=r"(?s)sequences.*transpose\(1, 2\)"):
        pack(turned, turned, turned)


def test_unpack_wants_what_was_packed():
    packed = pack(GOOD, GOOD, GOOD)
    with pytest.raises(InputError, match="for 21 packed rows"):
        packed.unpack(torch.zeros(1, 2, 20, 8))


def test_the_refusal_of_nested_tensors_names_the_way():
    with pytest.raises(LayoutError, match=r"(?s)query is a nested.*flexattn\.pack.*unpack"):
        flex_attention(GOOD, GOOD, GOOD)
