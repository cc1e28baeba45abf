"""What cannot be a mod is refused at the user's line, with what to do instead."""

import functools
import math
import re

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from flexattn import create_block_mask, flex_attention
from flexattn.errors import ModError, NoKernelError, SignatureError, UnsupportedError
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


def in_place_view(s, b, h, q, k):
    x = s.float().view(1)
    x += 1
    return s


def sets_an_argument(s, b, h, q, k):
    s[...] = 1.0
    return s


def out_argument(s, b, h, q, k):
    return torch.add(s, 1, out=s)


def in_place_capture(s, b, h, q, k):
    return s + table.mul_(2)[h]


def in_place_part(s, b, h, q, k):
    row = big[0]
    row += s
    return s


def sets_a_capture(s, b, h, q, k):
    big[h, k] = s
    return s


def sets_a_part(s, b, h, q, k):
    big.T[2:5].zero_()
    return s


def raises(s, b, h, q, k):
    raise LookupError("mine")


def misshapen(s, b, h, q, k):
    return s + (table + torch.ones(3)).sum()


def misshapen_beside_a_write(s, b, h, q, k):
    x = s.clone()
    x += 1
    return x + (table + torch.ones(3)).sum()


def shifts_a_truth(s, b, h, q, k):
    return s + ((q > k) << 1)


def extremes_place(s, b, h, q, k):
    return s + table.max(0)[1]


def with_i(s, b, h, q, k):
    return s * 1j


def masked_parts(s, b, h, q, k):
    x = table.clone()
    x[x > 0] = torch.ones(3)
    return s + x[h]


def random(s, b, h, q, k):
    return s + torch.rand_like(s)


def read(s, b, h, q, k):
    return s * table[0].item()


def sorts(s, b, h, q, k):
    return s + torch.sort(table)[0][h]


def decomposes_to_nothing_known(s, b, h, q, k):
    return s + torch.digamma(s)


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
        (in_place_view, ModError, r"its arguments.*\(add_\)", "x += 1"),
        (sets_an_argument, ModError, r"its arguments.*x\[\.\.\.\] = \.\.\.", "s[...] = 1.0"),
        (out_argument, ModError, r"its arguments.*\(add\)", "out=s"),
        (in_place_capture, ModError, "writes to a captured.*between calls", "table.mul_"),
        (in_place_part, ModError, r"writes to a captured.*\(add_\)", "row += s"),
        (sets_a_capture, ModError, r"writes to a captured.*x\[\.\.\.\]", "big[h, k] = s"),
        (sets_a_part, ModError, r"writes to a captured.*\(zero_\)", "zero_()"),
        (random, UnsupportedError, "random", "rand_like"),
        (read, ModError, "reads", "item"),
        (sorts, UnsupportedError, "sort", "torch.sort"),
        (decomposes_to_nothing_known, UnsupportedError, "uses torch.digamma", "digamma"),
        (wide, ModError, "200 elements.*128", "big[h].sum()"),
        (vector, ModError, r"shape \[8\]", "def vector"),
        (text, ModError, "returns 'score'", "def text"),
        (fails, ModError, "NameError.*undefined_name", "undefined_name"),
        (raises, ModError, "raised LookupError: mine", "raise LookupError"),
        (misshapen, ModError, "raised RuntimeError: The size of tensor a", "torch.ones(3)"),
        (misshapen_beside_a_write, ModError, "RuntimeError: The size of", "torch.ones(3)"),
        (shifts_a_truth, NoKernelError, "uses aten.__lshift__", "<< 1"),
        (extremes_place, NoKernelError, "uses the place of an extreme", "max(0)[1]"),
        (with_i, NoKernelError, "uses a complex as a number", "1j"),
        (masked_parts, NoKernelError, "writes to a part of a tensor", "x[x > 0]"),
    ],
)
def test_refused_with_its_line(fn, error, says, line):
    with pytest.raises(error) as caught:
        bind(fn, "score")
    message = str(caught.value)
    assert re.search(says, message, re.DOTALL), message
    assert re.search(rf"{__file__}:\d+: `[^`]*{re.escape(line)}", message), message
    assert repr(fn.__name__) in message
    assert re.search("\n  rule: .+\n  do:   .+", message), message
    assert not re.search("Fake|Proxy|Functional|unexpected keyword|NoneType", message), message


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


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda b, h, q, k: torch.where(q >= k, 0.0, -torch.inf), "float32.*True.*score_mod"),
        (lambda b, h, q, k: (q >= k).float(), "float32.*compare"),
        (lambda b, h, q, k: (q >= k).int(), "int32.*!= 0"),
        (lambda b, h, q, k: table[k], "float32.*compare"),
    ],
)
def test_a_mask_that_is_no_bool_is_refused(fn, words):
    """One to add, 0 where a score is kept, was taken for its opposite without a word."""
    x = torch.zeros(1, 1, 3, 16)
    for use in (
        lambda: bind(fn, "mask"),
        lambda: create_block_mask(fn, None, None, 3, 3, device="cpu"),
        lambda: flex_attention(x, x, x, block_mask=BlockMask.from_kv_blocks(
            torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32),
            mask_mod=fn, seq_lengths=(3, 3),
        )),
    ):  # fmt: skip
        with pytest.raises(SignatureError, match=f"(?s)mask_mod '<lambda>' .*{words}"):
            use()


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


numbers, by_head, array = [0.1] * 8, {0: 0.5}, np.zeros(8, dtype=np.float32)
# What a score_mod does in Python with what it is given, and what to do instead.
IN_PYTHON = {
    "a list": (lambda s, b, h, q, k: s + numbers[k], r"Python list.*torch\.tensor\(the_list\)"),
    "a tuple": (lambda s, b, h, q, k: s + (1.0, 2.0)[h], "tuple"),
    "a range": (lambda s, b, h, q, k: s + sum(range(k)), "range"),
    "math": (lambda s, b, h, q, k: math.exp(s), r"math\.exp.*torch\.exp\(score\)"),
    "float": (lambda s, b, h, q, k: s * float(q), "as a Python float"),
    "int": (lambda s, b, h, q, k: s * int(q), r"Python int.*x\.long\(\)"),
    "item": (lambda s, b, h, q, k: s * q.item(), "in Python.*with the tensor itself"),
    "tolist": (lambda s, b, h, q, k: s * q.tolist(), "in Python.*with the tensor itself"),
    "a dict": (lambda s, b, h, q, k: s + by_head[h], "in a dict.*torch.tensor"),
    "a dict of pairs": (lambda s, b, h, q, k: s + {(0, 0): 1}[h, q], "in a dict"),
    "numpy's exp": (lambda s, b, h, q, k: np.exp(s), "numpy.*torch's function of that name"),
    "numpy's where": (lambda s, b, h, q, k: np.where(q > k, s, -1e9), "numpy"),
    "an array": (lambda s, b, h, q, k: s + array[k], r"numpy.*torch\.from_numpy\(array\)"),
    "a captured tensor as an array": (
        lambda s, b, h, q, k: s + torch.from_numpy(table.numpy())[k], "numpy"
    ),
    "a write": (lambda s, b, h, q, k: (table.__setitem__(0, 1), s)[1], "captured.*between calls"),
    "a write where it is": (
        lambda s, b, h, q, k: (table.__setitem__(k, s), s)[1], "captured.*between calls"
    ),
    "a number": (lambda s, b, h, q, k: 1.0, r"returns 1\.0.*torch\.full_like\(score, 1\.0\)"),
    "nothing": (lambda s, b, h, q, k: None, "returns None.*`return`"),
    "two": (lambda s, b, h, q, k: (s, s), "returns a tuple of 2.*return one of them"),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PYTHON)
def test_python_on_traced_values(name):
    """numpy raised ".numpy() is not supported", a dict a KeyError, plain torch errors of vmap."""
    mod, words = IN_PYTHON[name]
    x = torch.zeros(1, 1, 3, 16)
    for use in (lambda: bind(mod, "score"), lambda: flex_attention(x, x, x, mod)):
        with pytest.raises(ModError, match=f"(?s)score_mod '<lambda>' .*{words}") as caught:
            use()
        assert caught.value.rule and caught.value.do
        assert "lambda" in caught.value.got  # its line


def test_numbers_of_numpy_are_numbers():
    mod = bind(lambda s, b, h, q, k: np.float32(2) * s + np.int64(1), "score")
    assert str(mod.mod.expr) == str(bind(lambda s, b, h, q, k: 2.0 * s + 1, "score").mod.expr)


class Holder:
    def __init__(self):
        self.tables = {"far": torch.zeros(8, device="meta")}

    def mod(self, s, b, h, q, k):
        return s + self.tables["far"][k]


def named_mod(bias):
    return lambda s, b, h, q, k: s + bias[k]


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, device="meta"), requires_grad=False)

    def mod(self, s, b, h, q, k):
        return s + self.weight[k]

    def added(self, bias, s, b, h, q, k):
        return s + bias[k]


def emptied():
    gone, far = 1.0, torch.zeros(8, device="meta")

    def mod(s, b, h, q, k):
        return s + (far[k] if k is not None else gone)

    cell = mod.__closure__[mod.__code__.co_freevars.index("gone")]
    del cell.cell_contents
    return mod


FAR = torch.zeros(8, device="meta")
CAPTURES = {
    "a method's argument": (functools.partial(Module().added, FAR), "captures `bias`"),
    "a parameter": (Module().mod, "captures `self.weight`"),
    "an empty cell": (emptied(), "captures `far`"),
    "a closure": (named_mod(FAR), "captures `bias`, of shape [8] on meta, and is called on cpu"),
    "an inner function": (lambda *args: named_mod(FAR)(*args), "captures `FAR`"),
    "an object": (Holder().mod, "captures `self.tables['far']`, of shape [8] on meta"),
    "a partial": (
        functools.partial(lambda s, b, h, q, k, bias: s + bias[k], bias=FAR), "captures `bias`"
    ),
    "two devices": (
        lambda s, b, h, q, k: s + table[k] * FAR[k],
        "`table`, of shape [8] on cpu, and `FAR`, of shape [8] on meta",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAPTURES)
def test_captures_elsewhere_are_named(name):
    """meta tensors passed for the CPU's, and plain torch raised an error without a name."""
    mod, words = CAPTURES[name]
    x = torch.zeros(1, 1, 8, 16)
    with pytest.raises(ModError, match=r"(?s)score_mod '\S+' .*to\('cpu'\)") as caught:
        flex_attention(x, x, x, mod)
    assert words in caught.value.got
