"""Serving without a GPU and without the interpreter: what works, and what says why it does not."""

import math

import pytest
import torch

from flexattn import create_block_mask
from flexattn.catalogue import causal
from flexattn.errors import (
    InputError,
    InputTypeError,
    PlaceError,
    SignatureError,
    UnsupportedError,
)
from flexattn.serving import DecodePlan, checks, flex_decode, merge_states
from flexattn.serving.cache import describe_cache
from tests.problems import plan_of


def test_a_plan_on_the_cpu_says_what_it_needs():
    with pytest.raises(UnsupportedError, match="FLEXATTN_INTERPRET=1"):
        DecodePlan(batch=1, kv_len=16, heads=(2, 1), head_dim=16, device="cpu")


ASKED = {
    "batch": ("1", InputTypeError, "batch is '1'.*integer"),
    "kv_len": (16.5, InputTypeError, "kv_len is 16.5.*integer"),
    "q_len": (None, InputTypeError, "q_len is None"),
    "heads": (2, InputTypeError, r"heads is 2.*\(query heads, KV heads\)"),
    "heads_of_none": ((0, 1), InputError, "Hq=0.*above 0"),
    "head_dim": ((16, 16, 16), InputTypeError, "head_dim is .*D, or"),
    "dtype": ("bfloat16", InputTypeError, "dtype is 'bfloat16'.*torch.dtype.*torch.bfloat16"),
    "kv_dtype": ("fp8", InputTypeError, "kv_dtype is 'fp8'"),
    "page_size": ("16", InputTypeError, "page_size is '16'"),
    "layout": (3, InputError, "one of NHD, HND"),
    "scale": ("1", InputTypeError, "scale is a str: '1'.*one number"),
    "sinks": (torch.zeros(2), InputTypeError, r"sinks is a Tensor.*True or False.*run\(\)"),
    "config": ({"BLOCK_M": 16}, InputTypeError, "config is {'BLOCK_M': 16}.*ServingConfig"),
    "lengths": ("long", InputError, "lengths='long'.*ragged"),
    "score_mod": (3, SignatureError, "'int' is not callable"),
    "device": ("gpu", PlaceError, "device 'gpu'.*'cuda' or 'cpu'"),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_plan_of_other_types(name):
    """They raised what Python says of comparing or unpacking them, or were taken as they are."""
    value, error, words = ASKED[name]
    good = {"batch": 1, "kv_len": 16, "heads": (2, 1), "head_dim": 16, "device": "cpu"}
    with pytest.raises(error, match=f"(?s){words}"):
        DecodePlan(**good | {name.removesuffix("_of_none"): value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_a_plan_without_a_gpu():
    with pytest.raises(UnsupportedError, match=r"(?s)device 'cuda'.*no GPU.*device='cpu'"):
        DecodePlan(batch=1, kv_len=16, heads=(2, 1), head_dim=16)
    with pytest.raises(UnsupportedError, match="device 'cuda'"):
        create_block_mask(causal, None, None, 8, 8, "cuda")


RUN = {
    "a list": ({"q": [1.0]}, "q is a list.*torch.Tensor"),
    "lengths in a list": ({"seq_lens": [3]}, r"seq_lens is a list.*torch\.tensor\(seq_lens"),
    "a cache in a list": ({"kv_cache": [1, 2]}, r"kv_cache is a list.*\(K, V\)"),
    "a cache of lists": ({"kv_cache": ([1], [2])}, "kv_cache is a tuple of list, list"),
    "three caches": ({"kv_cache": (torch.zeros(1),) * 3}, "kv_cache is a tuple of Tensor, T"),
}


@pytest.mark.parametrize("name", RUN)
def test_a_run_of_other_types(name):
    arguments, words = RUN[name]
    q, k = torch.zeros(1, 1, 2, 16), torch.zeros(1, 8, 1, 16)
    good = {"q": q, "kv_cache": (k, k), "seq_lens": torch.ones(1, dtype=torch.int32)}
    with pytest.raises(InputTypeError, match=f"(?s){words}"):
        flex_decode(**good | arguments)


def test_states_merge_in_plain_torch():
    scores, v = torch.randn(5, 40), torch.randn(40, 8)
    halves = []
    for part in (slice(0, 7), slice(7, 40)):
        halves += [scores[:, part].softmax(-1) @ v[part], scores[:, part].logsumexp(-1)]
    nothing = torch.full((5, 8), math.nan), torch.full((5,), -math.inf)
    for states in (halves, [*halves[2:], *halves[:2]]):
        out, lse = merge_states(*states)
        torch.testing.assert_close(out, scores.softmax(-1) @ v)
        torch.testing.assert_close(lse, scores.logsumexp(-1))
    out, lse = merge_states(*nothing, *halves[:2])
    torch.testing.assert_close((out, lse), tuple(halves[:2]))
    written = torch.empty(5, 8), torch.empty(5)
    merge_states(*halves, out=written[0], lse=written[1])
    torch.testing.assert_close(written[0], scores.softmax(-1) @ v)
    # One of the two alone was left as it was.
    written[0].fill_(math.nan)
    assert merge_states(*halves, out=written[0])[0] is written[0]
    torch.testing.assert_close(written[0], scores.softmax(-1) @ v)


def test_states_that_do_not_match():
    out, lse = torch.zeros(3, 4, 8), torch.zeros(3, 4)
    for states in (
        (out, lse, out[:2], lse[:2]),
        (out, lse, out.half(), lse),
        (out, lse.double(), out, lse),
        (out, lse[..., None], out, lse),
    ):
        with pytest.raises(InputError):
            merge_states(*states)


def test_strides_are_counted_in_32_bits():
    """Cut to their low half they would lead into other pages."""
    maxima = plan_of(1, keys=16, heads=(2, 1), D=16)
    k = torch.empty(2, 16, 1, 16, dtype=torch.bfloat16)
    far = torch.empty_strided(
        (2, 16, 1, 16), (2**31, 16, 16, 1), dtype=torch.bfloat16, device="meta"
    )
    assert describe_cache(k, k, maxima, 64).steps_k == (256, 16, 16)
    # Of one page there is no next one.
    assert describe_cache(far[:1], far[:1], maxima, 64).steps_k == (0, 16, 16)
    with pytest.raises(InputError, match=r"below 2\*\*31"):
        describe_cache(far, far, maxima, 64)


@pytest.mark.parametrize("shape", [(0, 16, 1, 16), (2, 0, 1, 16)], ids=str)
def test_a_cache_holds_a_key(shape):
    """Kernels read some key of it, even for requests that have none."""
    maxima = plan_of(2, keys=16, heads=(2, 1), D=16, page=0)
    k = torch.empty(shape, dtype=torch.bfloat16)
    with pytest.raises(InputError, match="at least one"):
        describe_cache(k, k, maxima, 64)


def test_what_other_libraries_pass_is_told_the_way():
    """FlashInfer's and vLLM's queries are [tokens, heads, D], and torch's lengths are int64."""
    bf16 = torch.bfloat16
    plan = plan_of(2, keys=16, heads=(2, 1), D=16, page=0)
    with pytest.raises(InputError, match=r"(?s)it is \[B, at most 1, 2, 16\].*query\[:, None\]"):
        checks.rows(plan, torch.zeros(2, 2, 16, dtype=bf16), 2)
    with pytest.raises(InputError, match=r"(?s)it is int32.*seq_lens\.int\(\)"):
        checks.numbers("seq_lens", torch.tensor([3, 4]), 1)
