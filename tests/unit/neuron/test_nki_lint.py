"""The lint of rendered NKI sources: each construct that the compiler refuses is found, by line."""

import pytest

from flexattn.errors import KernelError
from flexattn.neuron.config import NkiDecodeConfig, NkiPrefillConfig
from flexattn.neuron.lint import findings, lint
from flexattn.neuron.source import render_nki, render_nki_combine
from flexattn.problem import Shape
from tests.cases import CASES
from tests.covering import each_choice
from tests.nki import kernel_of, problem_of

REFUSED = {
    "if x is None:\n        pass": "Is",
    "y = [i for i in range(4)]": "comprehension",
    "y = lambda a: a": "lambda",
    "assert x": "assert",
    "y = 4 in (3, 4)": "In",
    "y = f'{x}'": "f-string",
    "nisa.tensor_copy(x, x)": "positional",
    "nisa.nc_matmul(dst=x, stationary=x, moving=x)": "accumulate",
    "nisa.tensor_copy(dst=x, src=x, mask=x)": "mask=",
    "i = nl.arange(128)": "nl.arange",
    "for i in nl.affine_range(4):\n        pass": "affine_range",
    "y = nl.load(x)": "nl.load",
    "t = nl.ndarray((1, 1), dtype=nl.float32)": "buffer",
    "t = nl.ndarray((1, 1), dtype=nl.float32, buffer='sbuf')": "string",
    "y = sorted((1, 2))": "sorted",
    "def inner():\n        return 1": "inner function",
    "y = {1: 2}": "dict",
    "global y": "global",
    "import numpy": "numpy",
}


@pytest.mark.parametrize("line", REFUSED, ids=REFUSED.values())
def test_a_construct_is_found(line):
    found = findings(kernel_of(line))
    assert any(REFUSED[line] in each for each in found), found
    with pytest.raises(KernelError, match="refuses"):
        lint(kernel_of(line))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("@nki.jit", "@nki.jit(mode='x')", "decorators"),
        ("import nki\n", "import nki\nimport neuronxcc.nki\n", "neuronxcc"),
        ("kernel(x)", "kernel(x, *, scale)", "keyword-only"),
        ("kernel(x)", "kernel(*x)", "without a number"),
        ("return out", "pass", "no result"),
        ("@nki.jit", "state = {}\n\n\n@nki.jit", "module level"),
    ],
)
def test_a_function_that_is_no_kernel(old, new, words):
    assert any(words in each for each in findings(kernel_of("pass").replace(old, new)))


def test_a_plain_kernel_passes():
    assert findings(kernel_of("for i in range(min(4, len(x.shape))):\n        pass")) == []


RENDERED = [
    ("prefill", NkiPrefillConfig(128, 512, transpose="dma")),
    ("prefill", NkiPrefillConfig(64, 256, mask="affine", evict="scalar")),
    ("decode", NkiDecodeConfig(128, 512, 4, mask="select")),
]


@each_choice(entry=CASES, rendered=RENDERED)
def test_what_is_rendered_passes(entry, rendered):
    built = entry.make(2, 4, 2, 141, 173)
    kind, config = rendered
    problem, *_ = problem_of(
        kind, Shape(2, 4, 2, 141, 173, 192, 64), score_mod=built.score_mod,
        mask_mod=built.mask_mod, lse=True, max_scores=True,
    )  # fmt: skip
    lint(render_nki(problem, config, "trn2", "t").text)
    if kind == "decode":
        lint(render_nki_combine(problem, "trn2").text)
