"""The generator of random mods: every mod traces, and its trace computes what torch computes."""

import pytest
import torch

from flexattn.errors import BuildError, ConfigError
from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import bind
from tests.random_mods import changes
from tests.random_mods.checking import check, prepared
from tests.random_mods.masks import check_mask
from tests.random_mods.mods import everywhere, random_mod
from tests.random_mods.outcomes import Outcome, failure, table

SIZES = (2, 3, 19, 23)
SHARE = 25


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(start, marks=pytest.mark.long if start >= 4 * SHARE else ())
        for start in range(0, 8 * SHARE, SHARE)
    ],
)
def test_every_mod_traces_to_what_torch_computes(start):
    """At every position; masks bit for bit."""
    draw = torch.Generator().manual_seed(0)
    names = ("b", "h", "q_idx", "kv_idx")
    score = 3 * torch.randn(SIZES, generator=draw)
    shapes = ([-1 if axis == dim else 1 for axis in range(4)] for dim in range(4))
    places = [torch.arange(n).reshape(at) for n, at in zip(SIZES, shapes, strict=True)]
    env = {"score": score, **dict(zip(names, places, strict=True))}
    for index in range(start, start + SHARE):
        mod = random_mod(0, index)
        score_mod, mask_mod = mod.make(*SIZES)
        if mask_mod is not None:
            bound = bind(mask_mod, "mask")
            got = evaluate(bound.mod, env, bound.tensors, bound.scalars).expand(SIZES)
            assert torch.equal(got, everywhere(mask_mod, *SIZES)), mod
        if score_mod is not None:
            bound = bind(score_mod, "score")
            got = evaluate(bound.mod, env, bound.tensors, bound.scalars).expand(SIZES)
            exact = everywhere(score_mod, *SIZES, score).float()
            assert exact.amax() < 1e3, mod
            torch.testing.assert_close(
                got, exact, rtol=1e-5, atol=1e-5, msg=lambda why: f"{mod}\n{why}"
            )


@pytest.mark.parametrize("index", range(12))
def test_a_random_mask_is_its_dense_mask(index):
    """`python -m tests.random_mods masks` has 5,000 of them."""
    check_mask(seed=0, index=index, longest=60)


def test_a_mod_is_its_seed_and_index():
    assert random_mod(3, 70) == random_mod(3, 70)
    assert len({str(random_mod(seed, 70)) for seed in range(9)}) == 9
    one, other = (random_mod(3, 70).make(*SIZES) for _ in range(2))
    for fn, again in zip(one, other, strict=True):
        if fn is not None:
            for cell, same in zip(fn.__closure__, again.__closure__, strict=True):
                held = [torch.as_tensor(each.cell_contents) for each in (cell, same)]
                assert torch.equal(*held)


def test_failures_of_one_cause_are_one_line_of_the_table():
    def raised(number):
        try:
            raise NameError(f"score_{number} is not defined at {number}")
        except NameError as error:
            failed = BuildError(f"/tmp/kernel_{number}.py")
            failed.__cause__ = error
            return failed

    found = [Outcome(index, **failure(raised(index))) for index in (4, 5)]
    found += [
        Outcome(6, **failure(ConfigError("no"))),
        Outcome(7, **failure(AssertionError("nan"))),
    ]
    found += [Outcome(0, "served", candidate=2)]
    lines = table(found).splitlines()
    assert lines[1].split() == ["1", "20.0", "%", "served", "by", "candidate", "2"]
    assert "failed: NameError: NAME is not defined at N (index 4, 5)" in lines[2]
    assert any("refused: ConfigError" in line for line in lines[3:])
    assert any("wrong: AssertionError" in line for line in lines[3:])


def test_the_oracle_is_never_compared_with_itself(monkeypatch):
    """Without a GPU and without the interpreter a call on the CPU is the oracle."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("tests.random_mods.checking.poison", lambda patch: None)
    with pytest.raises(RuntimeError, match="FLEXATTN_INTERPRET"):
        prepared()


@pytest.mark.parametrize("index", [3, 16, 29])
def test_numbers_of_e4m3_are_held_to_what_they_stand_for(index):
    """On the CPU plain torch computes: this is of the rule, which knows factors of heads."""
    assert check(0, index, 41, "cpu", e4m3=True).startswith("e4m3")


@pytest.mark.parametrize("index", range(0, 90, 6))
def test_random_changes(index):
    """`python -m tests.random_mods changes` has 300 of them."""
    changes.check(seed=0, index=index)


def test_a_case_of_changes_is_its_seed_and_index():
    assert changes.changing(3, 70) == changes.changing(3, 70)
    assert len({str(changes.changing(seed, 70)) for seed in range(9)}) == 9
