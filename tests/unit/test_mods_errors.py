"""What cannot be a mod is refused at the user's line, with what to do instead."""

import re

import pytest
import torch

from flexattn.errors import ModError, UnsupportedError
from flexattn.mods import bind

table = torch.randn(8)
big = torch.randn(4, 200)


def branching(s, b, h, q, k):
    if q > k:
        return s
    return -s


def in_place(s, b, h, q, k):
    s += 1
    return s


def in_place_capture(s, b, h, q, k):
    return s + table.mul_(2)[h]


def random(s, b, h, q, k):
    return s + torch.rand_like(s)


def read(s, b, h, q, k):
    return s * table[0].item()


def hidden_read(s, b, h, q, k):
    return s * torch.full((), torch.tensor(2.0)) * float(table[h])


def sorts(s, b, h, q, k):
    return s + torch.sort(table)[0][h]


def decomposes_to_nothing_known(s, b, h, q, k):
    return s + torch.hypot(s, s)


def wide(s, b, h, q, k):
    return s + big[h].sum()


def vector(s, b, h, q, k):
    return s + table


def text(s, b, h, q, k):
    return "score"


def fails(s, b, h, q, k):
    return s + undefined_name  # noqa: F821


@pytest.mark.parametrize(
    ("fn", "error", "says", "line"),
    [
        (branching, ModError, "branches.*torch.where", "if q > k:"),
        (in_place, ModError, "in place.*score = score", "s += 1"),
        (in_place_capture, ModError, "in place", "table.mul_"),
        (random, UnsupportedError, "random", "rand_like"),
        (read, ModError, "reads", "item"),
        (hidden_read, ModError, "reads|branches", "float"),
        (sorts, UnsupportedError, "sort", "torch.sort"),
        (decomposes_to_nothing_known, UnsupportedError, "uses prims.hypot", "hypot"),
        (wide, ModError, "200 elements.*128", "big[h].sum()"),
        (vector, ModError, r"shape \[8\]", "def vector"),
        (text, ModError, "returns a str", "def text"),
        (fails, ModError, "NameError.*undefined_name", "undefined_name"),
    ],
)
def test_refused_with_its_line(fn, error, says, line):
    with pytest.raises(error) as caught:
        bind(fn, "score")
    message = str(caught.value)
    assert re.search(says, message, re.DOTALL), message
    assert re.search(rf"{__file__}:\d+: `[^`]*{re.escape(line)}", message), message
    assert repr(fn.__name__) in message


def test_refused_again_the_second_time():
    for _ in range(2):
        with pytest.raises(ModError):
            bind(branching, "score")


@pytest.mark.parametrize(
    ("fn", "kind", "expected"),
    [
        (lambda b, h, q, k: q >= k, "score", r"takes 4.*\(score, b, h, q_idx, kv_idx\)"),
        (lambda s, b, h, q, k: s, "mask", r"takes 5.*\(b, h, q_idx, kv_idx\)"),
    ],
)
def test_wrong_arity_says_the_signature(fn, kind, expected):
    with pytest.raises(ModError, match=re.compile(expected, re.DOTALL)):
        bind(fn, kind)


def test_arguments_with_defaults_do_not_count():
    assert bind(lambda b, h, q, k, w=3: q - k < w, "mask").scalars == ()


def test_no_source_still_names_function_and_line():
    scope = {}
    exec("\n\ndef nowhere(s, b, h, q, k):\n    return s if q > k else -s", scope)
    with pytest.raises(ModError, match=r"'nowhere' \(<string>:4\)"):
        bind(scope["nowhere"], "score")


def test_captures_on_another_device():
    far = torch.empty(8, device="meta")
    with pytest.raises(ModError, match="meta"):
        bind(lambda s, b, h, q, k: s + far[h], "score", "cpu")
    near = torch.tensor(2.0)
    assert bind(lambda s, b, h, q, k: s * near, "score", "cuda").tensors[0] is near
    with pytest.raises(ModError, match=r"to\('cuda'\)"):
        bind(lambda s, b, h, q, k: s + table[h], "score", "cuda")
