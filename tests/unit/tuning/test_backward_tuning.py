"""A workload's call says backward = true: two problems, of which one is its gradients'."""

import json

import pytest
import torch
from typer.testing import CliRunner

from flexattn import create_block_mask
from flexattn.catalogue import causal, relative_bias
from flexattn.cli.app import app
from flexattn.errors import InputError, UnsupportedError
from flexattn.frontend.call import make_call
from flexattn.frontend.gradients import choice_of
from flexattn.kernels.choose.defaults import space
from flexattn.kernels.choose.options import NONE
from flexattn.measure.task import call_of
from flexattn.mods.bind import clear
from flexattn.records.environment import environment
from flexattn.records.record import Decision, Gated, Record, Trial, key_of
from flexattn.records.store import Store
from flexattn.records.why import why
from flexattn.runtime.candidates import candidates_of
from flexattn.runtime.key_lists import BothLists
from flexattn.settings import override
from flexattn.tuning.evaluator import subject_of
from flexattn.tuning.tasks import distinct, task_from, task_of
from flexattn.tuning.workload import parse_workload
from tests.problems import H200

CPU = torch.device("cpu")
DRY = ("--dry-run", "--json")


def rows(**call):
    layer = {
        "heads": [4, 2], "head_dim": 64, "sinks": True, "scale": -0.5,
        "score": {"mod": "flexattn.catalogue:softcap", "args": [30.0]},
        "mask": "flexattn.catalogue:causal",
    }  # fmt: skip
    said = {"name": "train", "mixes": [[2, 300, 300]], "backward": True, **call}
    return parse_workload({"layers": [{**layer, "calls": [said]}]}, "x", "x").rows


def test_a_differentiated_call_is_a_forward_with_lse_and_a_backward():
    forward, backward = rows()
    assert (forward.title, backward.title) == (
        "x train B2 300x300", "x train B2 300x300 backward",
    )  # fmt: skip
    one, other = (task_of(each, H200, CPU) for each in (forward, backward))
    assert one.problem.structure.lse and one.kind == "prefill" and one.by_key is None
    assert other.kind == "backward" and other.by_key is not None
    assert not other.policy.graph and other.policy.cold_l2
    # The forward's key is that of a call without lse: a preset of prefill has tuned it already.
    (plain,) = rows(backward=False)
    kept, others = distinct([task_of(plain, H200, CPU), one, other])
    assert [task.kind for task in kept] == ["prefill", "backward"] and len(others) == 1
    assert len(rows(mixes=[[2, 300, 300], [1, 70, 70]])) == 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"backward": 1}, "true or false"),
        ({"dtype": "float8_e4m3fn"}, "eight bits"),
        ({"kind": "serving"}, "plans"),
        ({"kind": "backward"}, "prefill, decode or serving"),
    ],
)
def test_what_has_no_backward_is_refused(call, words):
    with pytest.raises(InputError, match=words):
        rows(**call)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("learned", [True, False])
def test_a_task_is_what_a_call_with_gradients_would_look_up(masked, learned):
    table = torch.zeros(4, 601).requires_grad_(learned)
    row = rows(block_size=64)[1]
    score_mod, mask_mod = relative_bias(table, 300), causal if masked else None
    task = task_from(row, score_mod, mask_mod, H200, CPU)
    clear()
    q, k, v = (
        torch.zeros(2, heads, 300, 64, dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    mask = create_block_mask(causal, None, None, 300, 300, "cpu", 64) if masked else None
    sinks = torch.zeros(4, dtype=torch.bfloat16)
    call = make_call(q, k, v, score_mod, mask, -0.5, True, False, None, None, sinks)
    problem, _ = choice_of(call)
    assert problem == task.problem and problem.structure.grads == ((0,) if learned else ())
    assert not task.score.tensors[0].requires_grad, "a task is data for other processes"


def test_lists_by_key_know_their_runs_whoever_asks_first():
    """A call's gradients were checked before its mask's class was known, and kept without runs."""
    mask = create_block_mask(causal, None, None, 300, 300, "cpu", 64)
    lists = BothLists.of(mask)
    assert lists.by_query.runs is not None and lists.by_key.runs is not None


def test_a_record_of_a_backward_serves_and_is_told(tmp_path):
    task = task_of(rows()[1], H200, CPU)
    assert task.policy.graph == environment("backward", H200).graph
    subject = subject_of(task, environment("backward", H200, task.policy), "quick")
    assert len(subject.configs) > 4 and subject.key == key_of(task.problem)
    winner = subject.configs[2]
    gate = Gated("dk max", 1e-3, 2e-3, 1e-3, True)
    trials = tuple(
        Trial(config, gate=gate, screening=(9.0, 9.0), finals=(us,) * 8)
        for config, us in ((subject.configs[0], 9.0), (winner, 6.0))
    )
    record = Record(
        subject.key, subject.environment, task.policy, "measured", subject.sizes, trials,
        Decision(1, 0, 1.5, 1e-3, 1.02, 0.95, "faster"), made="2026-11-20", title=task.title,
    )  # fmt: skip
    Store(tmp_path).write(record)
    with override(cache=(tmp_path,), cache_dir=tmp_path / "none", mode="replay"):
        first = next(candidates_of(task.problem, H200, NONE))
        assert (first.config, first.how) == (winner, "hit") and first.measured
        found = why(task.problem, H200)
        assert found.how == "hit" and found.found.origin.startswith("tuned: 1.50x")
        done = CliRunner().invoke(app, ["show", "--kind", "backward", "--json"])
    assert [each["title"] for each in json.loads(done.stdout)["records"]] == [task.title]


def test_its_kernel_is_rendered_without_a_device():
    done = CliRunner().invoke(app, ["render", "causal", "--kind", "backward", "--json"])
    found = json.loads(done.stdout)
    assert found["problem"].startswith("backward bfloat16") and "DK" in found["source"]


def test_it_goes_by_the_registry():
    """Every family of the kind that the device has is searched."""
    from flexattn.kernels.choose.registry import families, family_of

    task = task_of(rows(scale=0.1)[1], H200, CPU)
    found = {family_of(config).name for config in space(task.problem, H200)}
    assert found == {each.name for each in families("backward", H200)}


def test_neuron_has_no_gradients():
    with pytest.raises(UnsupportedError, match="gradients run on GPUs"):
        call_of(task_of(rows()[1], H200, CPU))
    with override(cache=()):
        done = CliRunner().invoke(
            app,
            ["tune", "--preset", "training", "--only", "bert", "--device", "trn2", *DRY],
        )
    titles = [each["title"] for each in json.loads(done.stdout)["problems"]]
    assert len(titles) == 2 and not any("backward" in title for title in titles)
    done = CliRunner().invoke(app, ["render", "causal", "--kind", "backward", "--device", "trn2"])
    assert done.exit_code == 2 and "gradients run on GPUs" in done.output
