"""Plans of serving take the next config where one does not build."""

import pytest
import torch

import flexattn.serving.kernels as serving
from flexattn.errors import BuildError
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.settings import override
from tests.failing_builds import H200, LASTING, Builder, gluon, spills
from tests.problems import plan_of

PROBLEM = plan_of(8)


@pytest.fixture
def planned(monkeypatch):
    """Builds a plan's kernels with a builder that compiles nothing; returns them."""
    monkeypatch.setattr(serving, "detect", lambda device: H200)

    def build(builder, config=None):
        monkeypatch.setattr(serving, "builder", lambda: builder)
        return serving.build(PROBLEM, torch.device("cuda", 0), config)

    return build


def test_a_plan_takes_the_other_template_where_one_is_refused(planned, said):
    """A DecodePlan ended in BuildError where the warp-private kernel did not build."""
    error = LASTING["the compiler"][0]
    found = planned(Builder(gluon(error)))
    assert not found.config.warp_private and "sigmoid" in str(found.choice.attempts[0])
    assert "serves instead" in said()[0]
    again = Builder(gluon(error))
    assert planned(again).config == found.config and set(again.languages) == {"triton"}
    with override(strict=True), pytest.raises(BuildError, match="sigmoid"):
        planned(Builder(gluon(error)))


def test_a_plan_that_nothing_serves_says_why_of_each(planned):
    with pytest.raises(BuildError, match="sigmoid") as caught:
        planned(Builder(lambda source: LASTING["the compiler"][0]))
    assert "BLOCK_M=8 " in str(caught.value) and "BLOCK_N=16 " in str(caught.value)
    error = LASTING["a check"][0]
    with pytest.raises(BuildError) as caught:
        planned(Builder(lambda source: error), ServingConfig(16, 64, 4, 3, 1))
    assert caught.value is error


def test_a_plans_loops_that_spill_give_way(planned):
    found = planned(Builder(spills=spills(gluon=999, triton=0)))
    assert not found.config.warp_private
