"""Every operation that a mod may compute compiles wherever a kernel computes something.

A sigmoid was printed as a name that no template of Hopper's defined: the kernel that serves by
default failed in the compiler, and the mod had no other.
"""

import pytest
import torch

from flexattn.errors import UnsupportedError
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig
from flexattn.mods import bind
from flexattn.mods.ops import OPS
from flexattn.neuron.tables import tabulate
from flexattn.runtime.build import compile_source
from tests.families import render
from tests.printed_ops import CASES, OFTEN, everywhere, mod
from tests.problems import H200, problem
from tests.rendered_names import undefined

HOPPER = HopperPrefillConfig(2, 64, 1, 240)
CONFIGS = {
    "hopper": ("prefill", HOPPER),
    "prefill": ("prefill", PrefillConfig(64, 64, 4, 1)),
    "decode": ("decode", DecodeConfig(16, 64, 4, 1)),
}
# Once a row, not once a score: sixty operations on a tile take the compiler a minute.
CHAINED = [
    ("score_mod", "row", "float32"),
    ("score_mod", "row", "int64"),
    ("mask_mod", "row", "bool"),
]


def source(template, wanted_mod, kind):
    form, config = CONFIGS[template]
    wanted = problem(form, 64, **{kind: wanted_mod})
    return render(wanted.structure, config, H200, "test")


TEMPLATES = [
    pytest.param(name, marks=() if name == "hopper" else pytest.mark.full_matrix)
    for name in CONFIGS
]


@pytest.mark.oldest
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    ("kind", "place", "dtype"),
    [pytest.param(*case, marks=() if case in OFTEN else pytest.mark.long) for case in CASES],
)
def test_every_name_is_defined(kind, place, dtype, template):
    assert not undefined(source(template, mod(kind, place, dtype), kind).text)


@pytest.mark.oldest
@pytest.mark.parametrize(("kind", "place", "dtype"), CHAINED)
def test_all_operations_compile_for_hopper(kind, place, dtype):
    compile_source(source("hopper", mod(kind, place, dtype), kind), H200)


@pytest.mark.oldest
@pytest.mark.releases
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_silu_and_sigmoid_compile_for_hopper(dtype):
    def silu(score, b, h, q_idx, kv_idx):
        return torch.nn.functional.silu(score) + torch.sigmoid(score)

    wanted = problem("prefill", 128, dtype=dtype, score_mod=silu)
    text = render(wanted.structure, HOPPER, H200, "test")
    assert "tl.sigmoid" not in text.text and compile_source(text, H200)


@pytest.mark.oldest
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_quotient_of_floats_that_is_truncated_compiles_for_triton(kind):
    """It was printed as `//`, which Triton has for integers alone: no template compiled it."""

    def steps(score, b, h, q_idx, kv_idx):
        return torch.div(score, 3.0, rounding_mode="trunc")

    text = source(kind, steps, "score_mod")
    assert "libdevice.trunc(" in text.text and compile_source(text, H200)


@pytest.mark.parametrize("template", ["hopper", "prefill"])
def test_lgamma_is_traced_evaluated_and_compiled(template):
    def spread(score, b, h, q_idx, kv_idx):
        return score + torch.lgamma(score * score + kv_idx)

    text = source(template, spread, "score_mod")
    assert "libdevice.lgamma(" in text.text and compile_source(text, H200)
    bound = bind(spread, "score")
    score, keys = torch.linspace(-3, 3, 7), torch.arange(7)
    value = evaluate(bound.mod, {"score": score, "kv_idx": keys}, (), ())
    torch.testing.assert_close(value, spread(score, 0, 0, 0, keys))
    with pytest.raises(UnsupportedError, match="lgamma of float32, on the score"):
        tabulate(bound.mod, (bound.mod.expr,), "trn2", packed=False)


# A kernel of one operation in every place takes seconds: each is in a score_mod or in a mask_mod.
EACH = [(name, ("score_mod", "mask_mod")[place % 2]) for place, name in enumerate(OPS)]


@pytest.mark.full_matrix
@pytest.mark.parametrize(("name", "kind"), EACH)
def test_each_operation_compiles_for_hopper_in_every_place(name, kind):
    compile_source(source("hopper", everywhere(kind, name), kind), H200)
