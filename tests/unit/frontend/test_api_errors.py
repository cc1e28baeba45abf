"""Bad input is refused with what was got, the rule it broke and what to do: never computed."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

from flexattn import create_block_mask, explain, flex_attention
from flexattn.catalogue import causal
from flexattn.errors import (
    ConfigError,
    FlexAttnError,
    InputError,
    ModError,
)

B, Hq, Hkv, L, S, D = 2, 4, 2, 37, 53, 16


def call(q=None, k=None, v=None, enable_gqa=True, **more):
    q = torch.zeros(B, Hq, L, D) if q is None else q
    k = torch.zeros(B, Hkv, S, D) if k is None else k
    v = torch.zeros(B, Hkv, S, D) if v is None else v
    return flex_attention(q, k, v, enable_gqa=enable_gqa, **more)


def zeros(*shape, **more):
    return torch.zeros(*shape, **more)


def mask(q_len=L, kv_len=S, batch=None, heads=None, size=16):
    return create_block_mask(causal, batch, heads, q_len, kv_len, "cpu", size)


def two_arguments(score, b):
    return score


def not_a_scalar(score, b, h, q_idx, kv_idx):
    return score + torch.arange(3)


def branching(score, b, h, q_idx, kv_idx):
    return score if q_idx > kv_idx else -score


# What is passed, the error, and words of its message: what was got and the rule.
REFUSED = {
    "three_dimensions": ({"q": zeros(B, L, D)}, InputError, r"\(2, 37, 16\).*\[batch, heads"),
    "not_a_tensor": ({"v": [[1.0]]}, InputError, "list.*torch.Tensor"),
    "lengths_of_key_and_value": ({"v": zeros(B, Hkv, S + 1, D)}, InputError, "54.*agree"),
    "heads_of_key_and_value": ({"v": zeros(B, 1, S, D)}, InputError, "agree in batch, heads"),
    "head_dimensions": ({"q": zeros(B, Hq, L, 24)}, InputError, "24.*same head dimension"),
    "heads_not_a_multiple": ({"q": zeros(B, 5, L, D)}, InputError, "5.*multiple"),
    "gqa_not_asked_for": ({"enable_gqa": False}, InputError, "same number.*enable_gqa=True"),
    "batches": ({"q": zeros(3, Hq, L, D)}, InputError, r"3, 4.*batch is query's, or 1"),
    "dtypes": ({"k": zeros(B, Hkv, S, D).half()}, InputError, "float16.*one dtype.*convert"),
    "devices": ({"k": zeros(B, Hkv, S, D, device="meta")}, InputError, "meta.*one device.*move"),
    "nan_scale": ({"scale": math.nan}, InputError, "nan.*finite number.*None"),
    "infinite_scale": ({"scale": -math.inf}, InputError, "-inf.*finite"),
    "a_scale_beyond_floats": ({"scale": 10**400}, InputError, "finite number"),
    "scale_in_words": ({"scale": "half"}, InputError, "scale is a str.*one number"),
    "a_scale_a_head": ({"scale": torch.ones(2)}, InputError, "scale is a Tensor.*one number"),
    "both_ways_to_ask_for_lse": (
        {"return_lse": True, "return_aux": AuxRequest(lse=True)}, InputError, "only one of them"
    ),
    # A dict has no hash: the key of a repeated call ended in Python's own TypeError.
    "statistics_in_a_dict": ({"return_aux": {"lse": True}}, InputError, "it is an AuxRequest"),
    "a_tensor_for_a_mask": ({"block_mask": zeros(L, S) == 0}, InputError, "create_block_mask"),
    "mask_of_another_length": ({"block_mask": mask(64)}, InputError, r"\(64, 53\).*exactly the"),
    "mask_of_other_keys": ({"block_mask": mask(L, 54)}, InputError, r"\(37, 54\).*anew"),
    "mask_of_another_batch": ({"block_mask": mask(batch=3)}, InputError, "batch 3.*or 1"),
    "mask_of_other_heads": ({"block_mask": mask(heads=3)}, InputError, "3 heads.*or 1"),
    "too_few_arguments": ({"score_mod": two_arguments}, ModError, "two_arguments"),
    "not_a_scalar": ({"score_mod": not_a_scalar}, FlexAttnError, "not_a_scalar.*scalar"),
    "branch_on_a_traced_value": ({"score_mod": branching}, ModError, "torch.where"),
    "not_callable": ({"score_mod": 3.0}, FlexAttnError, "3.0|float"),
    "unknown_option": ({"kernel_options": {"BLOCK_Q": 3}}, ConfigError, "BLOCK_Q.*num_warps"),
    "option_of_another_type": (
        {"kernel_options": {"num_warps": "4"}}, InputError, "'4'.*positive integer"
    ),
    "unknown_backend": ({"kernel_options": {"BACKEND": "CUDA"}}, ConfigError, "CUDA.*TRITON"),
    "options_in_a_list": ({"kernel_options": ["BLOCK_M"]}, InputError, "list.*mapping.*dict"),
    "an_option_without_a_name": ({"kernel_options": {64: 1}}, InputError, "64.*strings"),
    "sliced_mask": (
        {"block_mask": mask()[:, :, 1:2]}, InputError, "is sliced.*drops.*mask_mod.*seq_lengths"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    arguments, error, words = REFUSED[name]
    with pytest.raises(error, match=f"(?s){words}") as caught:
        call(**arguments)
    assert isinstance(caught.value, FlexAttnError)
    assert caught.value.got and caught.value.rule
    assert str(caught.value).startswith(caught.value.got)


@pytest.mark.parametrize("name", REFUSED)
def test_explain_refuses_the_same(name):
    """What no path can take is refused before a path is chosen or with it, so explain says it."""
    arguments, error, _ = REFUSED[name]
    full = {"q": zeros(B, Hq, L, D), "k": zeros(B, Hkv, S, D), "v": zeros(B, Hkv, S, D)}
    full |= {"enable_gqa": True} | arguments
    with pytest.raises(error):
        explain(full.pop("q"), full.pop("k"), full.pop("v"), **full)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"Q_LEN": -1}, "Q_LEN=-1"),
        ({"H": -2}, "H=-2"),
        ({"BLOCK_SIZE": 0}, "BLOCK_SIZE=0"),
        ({"BLOCK_SIZE": (16, -1)}, "at least 1"),
    ],
    ids=lambda x: str(x),
)
def test_block_masks_of_impossible_sizes(arguments, words):
    sizes = {"B": None, "H": None, "Q_LEN": L, "KV_LEN": S, "device": "cpu"} | arguments
    with pytest.raises(InputError, match=words):
        create_block_mask(causal, **sizes)


def test_a_mask_mod_of_four_arguments_is_wanted():
    with pytest.raises(ModError, match="mask_mod"):
        create_block_mask(lambda q_idx, kv_idx: q_idx >= kv_idx, None, None, L, S, "cpu")


def test_rows_that_the_lists_do_not_reach():
    from torch.nn.attention.flex_attention import BlockMask

    short = mask()
    cut = BlockMask.from_kv_blocks(
        short.kv_num_blocks[:, :, :1], short.kv_indices[:, :, :1], BLOCK_SIZE=16,
        seq_lengths=(L, S), mask_mod=causal,
    )  # fmt: skip
    with pytest.raises(InputError, match="1 blocks of 16 query rows for 37 rows"):
        call(block_mask=cut)


def test_a_slice_with_what_it_lost_is_a_mask():
    """It was refused as a mod that raises, which said nothing of what to do."""
    part = mask()[:, :, 1:2]
    part.mask_mod = lambda b, h, q_idx, kv_idx: causal(b, h, q_idx + 16, kv_idx)
    query = zeros(B, Hq, 16, D)
    with pytest.raises(InputError, match=r"(?s)made for lengths.*slice, set seq_lengths"):
        call(query, block_mask=part)
    part.seq_lengths = (16, S)
    assert call(query, block_mask=part).shape == query.shape


@pytest.mark.parametrize(
    "cut", [lambda lists: lists[:, :, :1], lambda lists: lists.expand(2, *lists.shape[1:])]
)
def test_full_blocks_listed_for_other_rows(cut):
    """A kernel finds both kinds of blocks in the same row, and would read past the shorter."""
    from torch.nn.attention.flex_attention import BlockMask

    whole = mask()
    odd = BlockMask.from_kv_blocks(
        whole.kv_num_blocks, whole.kv_indices, cut(whole.full_kv_num_blocks),
        cut(whole.full_kv_indices), BLOCK_SIZE=16, seq_lengths=(L, S), mask_mod=causal,
    )  # fmt: skip
    with pytest.raises(InputError, match="full_kv_num_blocks has shape"):
        call(block_mask=odd)


def test_nested_tensors_say_what_to_do():
    nested = torch.nested.nested_tensor([zeros(3, D), zeros(5, D)], layout=torch.jagged)
    with pytest.raises(InputError, match=r"(?s)nested.*document"):
        call(q=nested)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_tensors_without_strides_say_what_to_do(name):
    with pytest.raises(InputError, match="to_dense"):
        call(**{name: zeros(B, Hq, L, D).to_sparse()})


def test_errors_are_also_what_python_programs_expect():
    with pytest.raises(ValueError):
        call(scale=math.nan)
    with pytest.raises(NotImplementedError):
        call(score_mod=lambda s, b, h, q, k: s + torch.rand_like(s))


def test_nothing_is_refused_that_torch_takes():
    out, aux = call(return_aux=AuxRequest(max_scores=True))
    assert out.shape == (B, Hq, L, D) and aux.lse is None and aux.max_scores.shape == (B, Hq, L)
    out, lse = call(return_lse=True, block_mask=mask())
    assert lse.dtype == torch.float32
    assert call(k=zeros(1, Hkv, S, D), v=zeros(1, Hkv, S, 24)).shape == (B, Hq, L, 24)
    k = zeros(1, 1, 3, D)
    assert flex_attention(zeros(1, 1, 0, D), k, k).shape == (1, 1, 0, D)
