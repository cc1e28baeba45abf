"""Mods on Neuron: what becomes a table, what a mask becomes, and what is refused, by name."""

import pytest
import torch

from flexattn.catalogue import causal, sliding_window
from flexattn.errors import UnsupportedError
from flexattn.mods import bind, site
from flexattn.mods.numbers import divisors
from flexattn.neuron.config import NkiDecodeConfig, NkiPrefillConfig
from flexattn.neuron.run import prepare
from flexattn.neuron.source import print_mods, render_nki
from flexattn.problem import Shape
from tests.cases import case
from tests.nki import check, problem_of

SHAPE = Shape(2, 4, 2, 141, 173, 64, 64)
CONFIGS = {"prefill": NkiPrefillConfig(128, 512), "decode": NkiDecodeConfig(128, 512)}

# The tables of a case, by the kind of what they vary with; all else is computed on the chip.
TABLES = {
    ("noop", "prefill"): "",
    ("causal", "prefill"): "",
    ("alibi", "prefill"): "uniform",
    ("t5_bias", "prefill"): "relative",
    ("relative_bias", "prefill"): "relative",
    ("window_bias_out_of_range", "prefill"): "relative",
    ("document", "prefill"): "row key",
    ("document_offsets", "prefill"): "row row",
    ("padding", "prefill"): "uniform",
    ("flamingo", "prefill"): "key key",
    ("natten_2d", "prefill"): "row key row key",
    ("checkerboard", "prefill"): "row key",
    ("head_bias", "prefill"): "pair",
    ("tree", "prefill"): "pair key",
    ("length_temperature", "prefill"): "row",
    ("alibi", "decode"): "row row",
    ("relative_bias", "decode"): "pair",
    ("padding", "decode"): "uniform",
}


@pytest.mark.parametrize(("name", "kind"), TABLES)
def test_what_becomes_a_table(name, kind):
    built = case(name).make(2, 4, 2, 141, 173)
    problem, *_ = problem_of(kind, SHAPE, score_mod=built.score_mod, mask_mod=built.mask_mod)
    mods = print_mods(problem, CONFIGS[kind], "trn2")
    assert " ".join(table.kind for table in mods.tables) == TABLES[name, kind]


@pytest.mark.parametrize(
    ("form", "calls"),
    [
        ("range", {"range_select": 1, "affine_select": 0, "tensor_copy_predicated": 0}),
        ("affine", {"range_select": 0, "affine_select": 2, "tensor_copy_predicated": 0}),
        ("select", {"range_select": 0, "affine_select": 0, "tensor_copy_predicated": 1}),
    ],
)
def test_a_window_in_each_form(form, calls):
    """Both of its bounds fit one range_select; affine_select takes one each."""
    problem, *_ = problem_of("prefill", SHAPE, mask_mod=sliding_window(9))
    text = render_nki(problem, NkiPrefillConfig(128, 512, mask=form), "trn2", "t").text
    assert {name: text.count(f"nisa.{name}(") for name in calls} == calls


def test_a_range_select_spares_the_maximum():
    problem, *_ = problem_of("prefill", SHAPE, mask_mod=causal)
    mods = print_mods(problem, NkiPrefillConfig(128, 512), "trn2")
    assert mods.mask.reduces and not mods.mask.needs_sbuf and "s" in mods.tiles


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_not_less_may_be_no_number(kind):
    """~(x < 0.5) was printed as x >= 0.5, which a NaN is not: kept keys were lost."""
    bias = torch.tensor([float("nan"), 0.0, 1.0] * 5)
    check(1, 2, 1, 4, 15, mask_mod=lambda b, h, q_idx, kv_idx: ~(bias[kv_idx] < 0.5), kind=kind)


def test_one_source_for_what_means_the_same():
    def other(b, h, q_idx, kv_idx):
        return ~(kv_idx > q_idx)

    texts = []
    for mask_mod in (causal, other):
        problem, *_ = problem_of("prefill", SHAPE, mask_mod=mask_mod)
        texts.append(render_nki(problem, CONFIGS["prefill"], "trn2", "t").hash)
    assert texts[0] == texts[1]


def digamma(score, b, h, q, k):
    return score * torch.log1p(score.abs())


def truncated(score, b, h, q, k):
    return score + (score * 2).to(torch.int32)


def by_data(score, b, h, q, k):
    return score + (q - k) // (q + k + 1)


def sine(score, b, h, q, k):
    return torch.sin(score)


@pytest.mark.parametrize(
    ("score_mod", "words"),
    [(digamma, "log1p"), (truncated, "int32"), (by_data, "floor_div"), (sine, "sin")],
)
@pytest.mark.parametrize("target", ["trn1", "trn3"])
def test_what_cannot_be_expressed_names_operation_and_target(score_mod, words, target):
    problem, *_ = problem_of("prefill", SHAPE, score_mod=score_mod)
    with pytest.raises(UnsupportedError, match=f"(?s){words}.*{target}"):
        render_nki(problem, CONFIGS["prefill"], target, "t")


def test_integers_past_float32_are_refused():
    def score_mod(score, b, h, q, k):
        return score + (q * 4099 - k * 4093)

    problem, *_ = problem_of("prefill", Shape(1, 1, 1, 8192, 8192, 64, 64), score_mod=score_mod)
    with pytest.raises(UnsupportedError, match=r"2\^24"):
        render_nki(problem, CONFIGS["prefill"], "trn2", "t")


def test_a_table_of_every_pair_has_a_limit():
    which = torch.zeros(70000, 2, dtype=torch.int32)

    def score_mod(score, b, h, q, k):
        return score + which[q, which[k, 0]]

    problem, score, _ = problem_of(
        "prefill", Shape(1, 1, 1, 9, 70000, 64, 64), score_mod=score_mod
    )
    big, *_ = problem_of("prefill", Shape(1, 1, 1, 70000, 70000, 64, 64), score_mod=score_mod)
    with pytest.raises(UnsupportedError, match=r"(?s)load.*70000|load.*4900000000.*trn2"):
        prepare(big, CONFIGS["prefill"], "trn2", scale=1.0, score=score)
    prepare(problem, CONFIGS["prefill"], "trn2", scale=1.0, score=score)


def test_a_table_holds_integers_that_float32_holds():
    ids = torch.tensor([2**23] * 64)

    def mask_mod(b, h, q, k):
        return ids[q] == ids[k]

    with pytest.raises(UnsupportedError, match=r"(?s)8388608.*trn2"):
        check(1, 1, 1, 64, 64, mask_mod=mask_mod)


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, q, k: torch.where((q - k) % 5 == 2, s, s - 1.0),
        lambda s, b, h, q, k: s / (1.0 + h * 0.5) + (q + 1.0) / (k + 2.0),
        lambda s, b, h, q, k: s + torch.floor(s * 3) - torch.ceil(s) + torch.round(s),
        lambda s, b, h, q, k: torch.sigmoid(s) * torch.exp(-s.abs()) + torch.erf(s),
        lambda s, b, h, q, k: s / (1.5 + s * s) + torch.minimum(s, s * 0.5),
        lambda s, b, h, q, k: torch.where(s > 0, 1.0, -1.0) + h * 0.25 - b,
        lambda s, b, h, q, k: -s + torch.exp2(s) * (q < k) + torch.sqrt(s * s + 1.0),
        lambda s, b, h, q, k: s * 0.0 + 0.5,
        lambda s, b, h, q, k: (q * 0.01).to(torch.float32),
    ],
    ids=range(9),
)
@pytest.mark.parametrize("kind", CONFIGS)
def test_operations_between_rows_and_keys(score_mod, kind):
    check(2, 2, 1, 21, 45, kind=kind, score_mod=score_mod)


def test_captured_numbers_are_arguments_once_they_differ():
    def window(width):
        def score_mod(score, b, h, q_idx, kv_idx):
            return torch.where(q_idx - kv_idx <= width, score, score * 0.5)

        return score_mod

    for width in (3, 5, 8):
        check(1, 1, 1, 21, 45, score_mod=window(width))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_divisor_that_changes_is_a_number_of_the_schedule(kind, monkeypatch):
    """The chip divides by a product; a captured divisor was refused at its second value."""
    monkeypatch.setattr(site, "MAX_CONSTANT_DIVISORS", 1)

    def cycled(n):
        return lambda score, b, h, q_idx, kv_idx: score + ((score > 0) + kv_idx) % n * 0.25

    for n in (3, 5, 4):
        check(1, 1, 1, 21, 45, kind=kind, score_mod=cycled(n))
    assert divisors(bind(cycled(9), "score").mod.expr)
