"""What Python computes of captured numbers follows Python's rules, whatever they change to."""

import functools
import math
import pickle

import pytest
import torch

from flexattn.errors import ModError
from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import bind
from flexattn.mods.bind import stats
from tests.random_mods import changes

PLACES = {"b": torch.tensor(0), "h": torch.tensor(1), "q_idx": torch.tensor(6)}
KEYS = torch.arange(9)
TABLE = torch.arange(8.0) / 4
# A mod's text, and pairs (n, m) in turn. Each of the first eight was wrong in silence.
RULES = {
    "sum of conditions": ("s + ((n > 2) + (m > 2)) * 0.5 * k", [(5, 0), (0, 5), (5, 5)]),
    "steps of one number": (
        "s + ((n > 2) + (n > 4) + (n > 8)) * 0.3 * k", [(1, 0), (3, 0), (9, 0)],
    ),
    "float64 comparison": ("s + (n == 0.1) * 2.0 * k", [(1.0, 0), (0.5, 0), (0.1, 0)]),
    "comparison of two": ("s + (n < m) * k", [(1.0, 2.0), (3.0, 2.0), (1e9 + 1, 1e9 + 2)]),
    "float64 difference": ("s + (n - m) * k", [(1.5, 1.0), (2.5, 1.0), (1e8 + 0.5, 1e8)]),
    "1 - decay": ("s + (1 - n) * 1e5 * k", [(0.9, 0), (0.99, 0), (0.9999999, 0)]),
    "beyond 64 bits": ("s + (n * n % 7) * k", [(3, 0), (5, 0), (3037000500, 0), (10**30, 0)]),
    "isinstance": (
        "s + (n if isinstance(n, (int, float)) else n.abs()) * k", [(1.5, 0), (2.5, 0), (-1.5, 0)],
    ),
    "power of two": ("torch.where(q - k < 2 ** n, s, -s)", [(1, 0), (2, 0), (3, 0), (1, 0)]),
    "power of two numbers": ("s + n ** m * k", [(1, 3), (2, 3), (-3, 2), (2, -1), (2.0, 0.5)]),
    "exponent of a position": ("s + k ** n + k ** 0", [(0, 0), (1, 0), (3, 0), (0, 0)]),
    "shifted condition": ("s + ((n > 2) << 2) * k", [(1, 0), (3, 0)]),
    "steps and remainders": (
        "s + k // n + k % (n + m) + (k << m)", [(2, 1), (3, 1), (3, 2), (7, 0)],
    ),
    "minimum": ("s * min(n, m) + max(n, 2, m)", [(1, 5), (7, 5), (7, 9)]),
    "branch": ("s + n * k if n > m else s - n * k", [(1, 2), (3, 2), (4, 2), (1, 2)]),
    "length": (
        "sum((s * i for i in range(n // 2)), start=m * s)", [(2, 1), (5, 1), (4, 3), (8, 3)],
    ),
    "C function": ("s * math.exp(-n) + math.gcd(int(m), 6)", [(1, 4), (2, 4), (2, 9)]),
    "rounded": ("s * round(n, 1) + math.floor(n) * k + round(m)", [(0.26, 1.5), (1.74, 2.5)]),
    "element": ("s + TABLE[n] * TABLE[-m]", [(1, 1), (2, 1), (7, 8)]),
    "slice": ("s + TABLE[n:].sum()", [(1, 0), (2, 0), (7, 0)]),
    "divmod": ("s + divmod(n, m)[1] * k + pow(n, 3, m)", [(5, 3), (-5, 3), (11, 4)]),
    "clamp": ("s.clamp(n, 2) + k.clamp(max=m)", [(1, 5), (-1, 5), (-1, 3.5)]),
    "full": ("torch.full_like(s, n) + k * torch.tensor(m)", [(1.5, 2), (2.5, 2), (2.5, 3)]),
    "text": ("s * float(f'{n}') + len(str(m))", [(1, 10), (2, 10), (2, 1000)]),
    "key": ("s * {1: 2.0, 2: 3.0}.get(n, 4.0) + cached(m)", [(1, 1), (2, 1), (2, 5), (3, 1)]),
    "none of them": ("s * (n or m or 1)", [(0, 0), (0, 2), (3, 2), (0, 0)]),
    "type": ("s * (n if type(n) is int else 0)", [(1, 0), (2, 0), (3, 0)]),
    "signs of zero": ("s + math.copysign(1.0, n) * k", [(0.0, 0), (-0.0, 0), (2.0, 0)]),
    "infinity": ("s.clamp(min=-n) * (m - m == 0)", [(1.0, 1.0), (math.inf, 1.0), (2.0, math.inf)]),
    "pickled": ("s * loads(n)", [(1, 0), (2, 0), (4, 0)]),
}  # fmt: skip


@functools.cache
def cached(number):
    return number * 2


def loads(number):
    return pickle.loads(pickle.dumps(number))


def outer(text, n, m):
    scope = {"torch": torch, "math": math, "TABLE": TABLE, "cached": cached, "loads": loads}
    exec(
        f"def outer(n, m):\n    def mod(s, b, h, q, k): return {text}\n"
        "    def change(*new):\n        nonlocal n, m\n        n, m = new\n    return mod, change",
        scope,
    )
    return scope["outer"](n, m)


def computed(bound, score, keys=KEYS):
    env = {"score": score, "kv_idx": keys} | PLACES
    return evaluate(bound.mod, env, bound.tensors, bound.scalars)


@pytest.mark.parametrize("case", RULES)
def test_numbers_follow_pythons_rules(case):
    """A changed number became a tensor, and what Python computed of it followed tensor rules:
    True + True was 1, floats had 32 bits, ints wrapped, and 2 ** n was refused."""
    text, values = RULES[case]
    mod, change = outer(text, *values[0])
    score = torch.linspace(-2, 2, 9)
    for n, m in values:
        change(n, m)
        for _ in range(2):
            got = computed(bind(mod, "score"), score)
            want = torch.stack(
                [mod(s, *PLACES.values(), k) for s, k in zip(score, KEYS, strict=True)]
            )
            torch.testing.assert_close(got.float(), want.float(), rtol=1e-6, atol=1e-6)
    assert cached.cache_info().currsize == 0 or type(cached(5)) is int


@pytest.mark.parametrize(
    ("text", "values", "most"),
    [
        ("s + n * m % 7 * k", [(i, i + 3) for i in range(1, 12)], 2),
        ("s + (1 - n) * 1e5 * k", [(i / 16, 0) for i in range(1, 12)], 2),
        ("s + TABLE[n]", [(i % 8, 0) for i in range(12)], 2),
    ],
)
def test_changing_numbers_have_few_mods(text, values, most):
    mod, change = outer(text, *values[0])
    found = set()
    for n, m in [*values, *values]:
        change(n, m)
        found.add(bind(mod, "score").mod)
    assert len(found) <= most
    before = stats().traces
    for n, m in values:
        change(n, m)
        bind(mod, "score")
    assert stats().traces == before


@pytest.mark.parametrize(
    ("text", "values", "error"),
    [
        ("s + m // n * k", [(2, 1), (3, 1), (0, 1)], "ZeroDivisionError"),
        ("s + n * k", [(2, 1), (3, 1), (2**70, 1)], "Overflow"),
    ],
)
def test_what_python_raises_of_a_number_is_raised(text, values, error):
    """A number that was an argument divided by zero without a word."""
    mod, change = outer(text, *values[0])
    for n, m in values[:-1]:
        change(n, m)
        bind(mod, "score")
    change(*values[-1])
    with pytest.raises(Exception, match=error):
        bind(mod, "score")
    change(*values[1])
    assert torch.isfinite(computed(bind(mod, "score"), torch.tensor(1.0))).all()


@pytest.mark.parametrize("index", range(2, 32, 3))
def test_random_expressions_of_numbers(index):
    """`python -m tests.random_mods changes` has a hundred of them."""
    assert changes.check(15, index)


def test_torchs_tracer_writes_nothing(capfd):
    """Each number that torch's tracer refused as a tensor left its traceback on stderr."""
    for n in (1, 3, 4):
        bind(outer("s + ((n > 2) << 2)", n, 0)[0], "score")
    with pytest.raises(ModError, match="__lshift__"):
        bind(outer("s + ((k > 2) << n)", 1, 0)[0], "score")
    assert "Traceback" not in capfd.readouterr().err
