"""The lint of rendered NKI sources: what NKI 0.7 refuses is found, by line, and nothing else."""

import pytest

from flexattn.errors import KernelError
from flexattn.neuron.run import findings, lint
from tests.nki import kernel_of

REFUSED = {
    "nisa.tensor_copy(dst=x, src=x, mask=x)": "mask=",
    "i = nl.arange(128)": "nl.arange",
    "for i in nl.affine_range(4):\n        pass": "use range",
    "for i in nl.dynamic_range(4):\n        pass": "use nl.fori_loop",
    "t = nl.ndarray((1, 1), dtype=nl.float32, buffer='sbuf')": "string",
    "y = STATE[0]": "the name STATE",
    "import numpy": "numpy",
}
# What NKI specialises by tracing Python, which older versions refused.
ALLOWED = (
    "if x is None:\n        pass",
    "y = [i for i in range(4)]",
    "y = lambda a: a",
    "assert x",
    "y = f'{x}'",
    "y = sorted((1, 2))",
    "def inner():\n        return 1",
    "nisa.tensor_copy(x, x)",
)


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
        ("return out", "pass", "no result"),
        ("@nki.jit", "state = {}\n\n\n@nki.jit", "module level"),
    ],
)
def test_a_function_that_is_no_kernel(old, new, words):
    assert any(words in each for each in findings(kernel_of("pass").replace(old, new)))


@pytest.mark.parametrize("line", ALLOWED)
def test_all_of_python_passes(line):
    assert findings(kernel_of(line)) == []
