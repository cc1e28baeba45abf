"""Serving without a GPU and without the interpreter: what works, and what says why it does not."""

import math

import pytest
import torch

from flexattn.errors import InputError, UnsupportedError
from flexattn.serving import DecodePlan, merge_states
from flexattn.serving.cache import describe
from flexattn.serving.request import Maxima


def test_a_plan_on_the_cpu_says_what_it_needs():
    with pytest.raises(UnsupportedError, match="FLEXATTN_INTERPRET=1"):
        DecodePlan(batch=1, kv_len=16, heads=(2, 1), head_dim=16, device="cpu")


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
    maxima = Maxima(
        1, 1, 0, 16, 2, 1, 16, 16, torch.bfloat16, torch.bfloat16, 16, "NHD"
    )  # fmt: skip
    k = torch.empty(1, 16, 1, 16, dtype=torch.bfloat16)
    far = torch.empty_strided(
        (2, 16, 1, 16), (2**31, 16, 16, 1), dtype=torch.bfloat16, device="meta"
    )
    assert describe(k, k, maxima, True).steps_k == (256, 16, 16)
    with pytest.raises(InputError, match=r"below 2\*\*31"):
        describe(far, far, maxima, True)


@pytest.mark.parametrize("shape", [(0, 16, 1, 16), (2, 0, 1, 16)], ids=str)
def test_a_cache_holds_a_key(shape):
    """Kernels read some key of it, even for requests that have none."""
    maxima = Maxima(
        2, 1, 0, 16, 2, 1, 16, 16, torch.bfloat16, torch.bfloat16, 0, "NHD"
    )  # fmt: skip
    k = torch.empty(shape, dtype=torch.bfloat16)
    with pytest.raises(InputError, match="at least one"):
        describe(k, k, maxima, True)
