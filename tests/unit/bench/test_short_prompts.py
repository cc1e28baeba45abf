"""Short prompts by configs of both templates: what is timed, and what a file of it says again."""

import pytest

from bench import short_prompts as bench
from bench.results import RowResult
from bench.runner import Method
from bench.tasks import task
from flexattn.kernels.choose.defaults import reasons
from flexattn.measure.timing import Samples
from tests.problems import H200


@pytest.fixture(autouse=True)
def a_triton_that_has_it(monkeypatch):
    monkeypatch.setattr("flexattn.kernels.hopper.family.offered", lambda: True)


def test_each_row_has_configs_of_both_templates_that_can_run():
    every = list(bench.rows())
    assert len({row.name for row in every}) == len(every)
    for row in every[::9]:
        problem = task(row, H200, "cpu").problem
        configs = bench.configs_of(problem, H200)
        assert {each.language for each in configs.values()} == {"triton", "gluon"}
        able = [each for each in configs.values() if not reasons(each, problem.structure, H200)]
        assert len(able) >= 4, row.name


def test_a_file_says_again_what_was_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "describe", lambda: {"device": "NVIDIA H200", "triton": "3.6.0"})
    row = next(each for each in bench.rows() if each.shape.d == 64)
    configs = bench.configs_of(task(row, H200, "cpu").problem, H200)
    times = dict(zip(configs, range(10, 30), strict=False))
    samples = {f"flexattn {name}": Samples((us, us)) for name, us in times.items()}
    result = RowResult(row.name, row.group, row.flops, row.kv_bytes, {}, samples, {})
    bench._save(tmp_path / "held.json", Method(), [bench._line(row, result)])
    (found,) = bench.short_prompts(tmp_path / "held.json")
    assert found.device == H200 and found.kind == "prefill"
    assert found.problem == task(row, H200, "cpu").problem
    assert found.times == {configs[name]: us for name, us in times.items()}
    assert list(bench.short_prompts(tmp_path / "none.json")) == []


def test_without_a_gpu_nothing_is_timed(capsys, monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 2
    assert "no GPU" in capsys.readouterr().err
