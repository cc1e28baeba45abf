"""Kernels of a server are verified before its first request, and a wrong one gives way."""

import logging

import pytest
import torch

from examples.serving import model
from examples.serving.build import build, build_model
from examples.serving.load.checks import against_whole
from examples.serving.load.traffic import Answer, Prompt
from examples.serving.request import Limits
from flexattn.catalogue import causal
from flexattn.errors import WrongKernelError
from flexattn.settings import override
from tests.contracts import imported, vllm
from tests.contracts.requests import Requests
from tests.example_server import ids, options, prompts, together
from tests.planted import planted
from tests.serving import assert_right

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]
# Weights of another base, in the first config of each plan.
WRONG = {"old": "LOG2E = 1.44269504", "new": "LOG2E = 1.24269504", "within": "BLOCK_N = 32"}


@pytest.fixture(autouse=True)
def first(tmp_path, caplog):
    """As users have it: the second candidate may serve, and files are kept."""
    caplog.set_level(logging.INFO)
    with override(verify="first", strict=False, cache_dir=tmp_path, check=False):
        yield


def loaded(monkeypatch, of):
    """A layer in vLLM's hands when its model is loaded and profiled."""
    config = vllm.config(of.page)
    modules = vllm.modules(config)
    ours = imported(monkeypatch, modules, "flexattn.integrations.vllm")
    return vllm.Model(ours.FlexattnBackend, config, of)


def test_vllm(monkeypatch, caplog):
    of = Requests()
    with planted(monkeypatch, **WRONG) as found:
        server = loaded(monkeypatch, of)
        said, many = caplog.text, len(found)
        assert many >= 2 and "computes wrong numbers" in said and "is not used" in said
        assert "model.layers.3.attn: kernels verified by its first launch" in said
        step = of.step({"a": 21, "b": 5})
        assert_right((server.run(step), None), step.each, mask_mod=causal)
        assert len(found) == many, "nothing is built for a request"


def test_vllm_whose_cache_would_be_written_wrongly(monkeypatch):
    """There is one kernel of it: the engine does not start."""
    wrong = planted(monkeypatch, "offset = slot % PAGE", "offset = slot % PAGE * 0")
    with wrong, pytest.raises(WrongKernelError, match="stores other numbers"):
        loaded(monkeypatch, Requests())


def test_the_example_server(monkeypatch, caplog):
    monkeypatch.setitem(model.SHAPES, "tiny", model.Shape(1, 32, 48, (2, 1), 16))
    limits = Limits(batch=3, chunk=5, longest=24, page=4, pages=15)
    chosen = options(limits, attention="plan", dtype="float32", cascade_from=0)
    asked, known = prompts([9]), build_model(chosen)
    with planted(monkeypatch, **WRONG) as found:
        engine = build(chosen)
        said, many = caplog.text, len(found)
        assert many and "computes wrong numbers" in said
        assert "attention's kernels are verified by its first launch" in said
        ((given, _),) = together(engine, asked, 2)
        assert len(found) == many
    told = Prompt(tuple(asked[0]), len(given))
    exact = known.to(torch.float64)
    assert against_whole(known, exact, told, Answer(tokens=ids(given))) == ""
