"""The ladder: which rungs are here, stubs known for stubs, and AWS's simulator where it is."""

import sys

import pytest
import torch

from flexattn.neuron import instance as module
from flexattn.neuron.config import NkiDecodeConfig, NkiPrefillConfig
from flexattn.neuron.instance import real_package, rungs
from flexattn.neuron.run import prepare
from flexattn.problem import Shape
from tests.cases import case
from tests.nki import problem_of
from tests.support import inputs

SIMULATE, WHY = real_package()
STUBS = {
    # What the public index's `nki` does, in spirit: installs, and refuses to be imported.
    "refuses": ('raise ImportError("this is not the package you want")', "placeholder"),
    "empty": ("", "no `simulate`"),
    "old": ("def jit(f):\n    return f", "no `simulate`"),
    "broken": ("import a_missing_part", "lacks a_missing_part"),
}


@pytest.mark.parametrize("name", STUBS)
def test_a_stub_is_known_for_what_it_is(name, tmp_path, monkeypatch):
    text, words = STUBS[name]
    (tmp_path / "nki.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nki", raising=False)
    simulate, why = real_package()
    monkeypatch.delitem(sys.modules, "nki", raising=False)
    assert simulate is None and words in why and "pip.repos.neuron.amazonaws.com" in why


def test_a_package_that_simulates_is_the_real_one(tmp_path, monkeypatch):
    (tmp_path / "nki.py").write_text("def simulate(kernel):\n    return kernel")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nki", raising=False)
    assert real_package()[0] is not None and rungs()[2].available
    monkeypatch.delitem(sys.modules, "nki", raising=False)


def test_the_ladder_claims_no_more_than_it_has():
    found = {rung.name: rung for rung in rungs()}
    assert list(found) == ["lint", "interpreter", "simulator", "device"]
    assert found["lint"].available and found["interpreter"].available
    assert found["device"].available or found["device"].why
    assert "never been run" in found["device"].proves
    assert module.WHERE in found["simulator"].why or found["simulator"].available


def _listed(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.neuron
@pytest.mark.skipif(SIMULATE is None, reason=WHY)
@pytest.mark.parametrize("name", ["noop", "causal", "alibi_causal_document", "t5_bias"])
@pytest.mark.parametrize("config", [NkiPrefillConfig(128, 512), NkiDecodeConfig(128, 512, 2)])
def test_the_simulator_agrees_with_the_interpreter(name, config):
    """The same source in both; AWS's simulates trn3 unless its environment says otherwise."""
    kind = "decode" if isinstance(config, NkiDecodeConfig) else "prefill"
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        built = case(name).make(1, 4, 2, 141, 300, dtype=dtype)
        problem, score, mask = problem_of(
            kind,
            Shape(1, 4, 2, 141, 300, 64, 64),
            dtype,
            built.score_mod,
            built.mask_mod,
            lse=True,
        )
        prepared = prepare(problem, config, "trn3", scale=0.125, score=score, mask=mask)
        q, k, v = inputs(1, 4, 2, 141, 300, 64, dtype=dtype)
        functions = {id(prepared.source): prepared.function, id(prepared.combine): prepared.merge}

        def simulated(source, given):
            results = SIMULATE(functions[id(source)][prepared.cores])(*given)
            return [torch.as_tensor(each) for each in _listed(results)]

        ours, theirs = prepared.interpret(q, k, v), prepared.run(q, k, v, simulated)
        torch.testing.assert_close(theirs.out, ours.out, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(theirs.lse, ours.lse, rtol=tolerance, atol=tolerance)
