"""Which plans have a kernel of their own for prefills, and what is left to the streaming one."""

import threading

import pytest
import torch

import flexattn.runtime.ragged as ragged
import flexattn.serving.kernels as serving
from flexattn.catalogue import causal
from flexattn.device import named
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.runtime.build import builder
from flexattn.runtime.outcomes import memory
from flexattn.settings import override
from tests.failing_builds import LASTING, Builder, gluon
from tests.problems import plan_of


@pytest.fixture(autouse=True)
def place(tmp_path):
    """A directory of this test's own, and nothing that an earlier test knew."""
    memory().forget()
    with override(cache_dir=tmp_path, cache=(), mode="off", strict=False):
        yield
    memory().forget()


@pytest.fixture
def planned(monkeypatch):
    """The kernels of a plan for a device that is not here."""

    def build(arch="nvidia-h200", builder=None, config=None, problem=None, **asked):
        work = problem or plan_of(8, **{"total_q": 2048, **asked})
        monkeypatch.setattr(serving, "detect", lambda device: named(arch))
        monkeypatch.setattr(serving, "builder", lambda: builder or Builder())
        return serving.build(work, torch.device("cuda", 0), config)

    return build


@pytest.mark.parametrize(
    "asked",
    [
        {}, {"mask": causal}, {"page": 256}, {"layout": "HND"}, {"D": 64}, {"D": 256}, {"D": 96},
        {"sinks": True, "lse": True}, {"dtype": torch.float16, "kv": torch.float16},
        {"page": 1}, {"page": 24, "layout": "HND"},
    ],
    ids=range(11),
)  # fmt: skip
def test_hopper_serves_prefills(planned, asked):
    found = planned(**asked)
    prefills = found.prefills
    assert isinstance(prefills.choice.config, HopperPrefillConfig)
    assert isinstance(found.config, ServingConfig)
    assert prefills.choice.problem.structure.phase == "prefill"
    assert "PREFILLS" in found.attend.source.text
    assert "PREFILLS" in prefills.row_tiles.source.text
    assert prefills.grid.programs <= found.target.num_sms


@pytest.mark.parametrize(
    "asked",
    [
        {"arch": "nvidia-b200"}, {"arch": "nvidia-a100"}, {"page": 0},
        {"page": 1, "kv": torch.float8_e4m3fn}, {"total_q": 128}, {"batch_invariant": True},
        {"scales": "token"}, {"dtype": torch.float32, "kv": torch.float32},
        {"config": ServingConfig(64, 64, 4, 3, 2, combine="launch")},
        {"problem": plan_of(8, q_len=16)},
    ],
    ids=range(10),
)  # fmt: skip
def test_one_kernel_serves_all(planned, asked):
    found = planned(**asked)
    assert found.prefills is None and "PREFILLS" not in found.attend.source.text


def test_a_plan_of_prefills_alone_has_no_other_kernel(planned):
    found = planned(problem=plan_of(8, q_len=512, mask=causal))
    assert found.attend is None and found.combine is None
    assert found.choice is found.prefills.choice
    assert "PREFILLS" not in found.prefills.row_tiles.source.text
    assert found.prefills.grid.num_tiles >= 8 * 512 // 128


def test_a_kernel_that_does_not_build_gives_way(planned):
    """The streaming kernel then serves the prefills too."""
    found = planned(builder=Builder(gluon(LASTING["the compiler"][0])))
    assert found.prefills is None and "PREFILLS" not in found.attend.source.text


class Together(Builder):
    """The first kernel of each thread waits for that of all others."""

    def __init__(self, threads):
        super().__init__()
        self.here, self.own = threading.Barrier(threads, timeout=60), threading.local()

    def kernel(self, source, device, index):
        if not hasattr(self.own, "began"):
            self.own.began = True
            self.here.wait()
        return super().kernel(source, device, index)


def test_kernels_of_prefills_and_of_decodes_are_compiled_at_once(planned):
    """One after the other they took a server's first start seconds more."""
    builder().clear()
    # The forward, who awaits it, what lists its tiles, and the decodes'.
    found = planned(builder=Together(4))
    assert found.prefills is not None and found.attend is not None


def test_what_lists_the_tiles_is_rendered_once(planned, monkeypatch):
    """A pack of another length has the same kernels: nothing renders again.

    Threads that build the first one's may have rendered it at the same time, so it is equal.
    """
    builder().clear()
    first = planned()
    monkeypatch.setattr(ragged, "render_row_tiles", None)
    monkeypatch.setattr(ragged, "begin", None)
    again = planned(total_q=4096)
    assert again.prefills.row_tiles.source == first.prefills.row_tiles.source
