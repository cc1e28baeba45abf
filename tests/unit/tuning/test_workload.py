"""A workload file becomes rows, and rows the tasks and keys that dispatch would make."""

import json
import math
import textwrap
from dataclasses import replace

import pytest
import torch

from flexattn import create_block_mask
from flexattn.catalogue import sliding_window, softcap
from flexattn.device import INTERPRETER
from flexattn.errors import InputError
from flexattn.frontend import plan
from flexattn.frontend.call import make_call
from flexattn.mods.bind import clear
from flexattn.problem import Shape
from flexattn.records.record import key_of
from flexattn.tuning.tables import read_file
from flexattn.tuning.tasks import distinct, plan_task, task_of, tasks
from flexattn.tuning.workload import ModPath, parse_workload, policy_for, read
from tests.problems import H200, problems_asked

CPU = torch.device("cpu")

GOOD = """
title = "A model"
models = ["someone/model"]
note = "made up"
dtype = "float16"

[[layers]]
name = "local"
heads = [8, 2]
head_dim = [192, 128]
scale = 0.25
score = { mod = "flexattn.catalogue:softcap", args = [30.0] }
mask = { mod = "flexattn.catalogue:sliding_window", args = [63] }

[[layers.calls]]
name = "prefill"
batch = [1, 2]
q_len = [300, 700]
block_size = [64, 32]

[[layers.calls]]
name = "decode"
mask = { mod = "flexattn.presets.mods:last_keys", args = [64, "$B", "$kv_len"] }
mixes = [[3, 1, 1000]]
policy = { graph = false, min_ms = 1.5 }

[[layers.calls]]
name = "plain"
kind = "decode"
mask = ""
score = ""
sinks = true
q_len = 4
kv_len = [77, 99]
"""


def parsed(text, suffix=".toml", tmp_path=None):
    path = tmp_path / f"mine{suffix}"
    path.write_text(textwrap.dedent(text))
    return read(path)


def test_rows_of_a_file(tmp_path):
    found = parsed(GOOD, tmp_path=tmp_path)
    assert (found.name, found.title, found.models) == ("mine", "A model", ("someone/model",))
    assert [row.title for row in found.rows] == [
        "mine local prefill B1 300x300",
        "mine local prefill B1 700x700",
        "mine local prefill B2 300x300",
        "mine local prefill B2 700x700",
        "mine local decode B3 1000",
        "mine local plain B1 4x77",
        "mine local plain B1 4x99",
    ]
    prefill, decode, plain = found.rows[0], found.rows[4], found.rows[5]
    assert prefill.shape == Shape(1, 8, 2, 300, 300, 192, 128) and prefill.dtype == "float16"
    assert prefill.score == ModPath("flexattn.catalogue:softcap", (30.0,))
    assert prefill.block_size == (64, 32) and decode.block_size == (128, 128)
    assert (prefill.kind, plain.kind) == (None, "decode")
    assert plain.mask is None and plain.score is None and plain.scale == 0.25
    assert plain.sinks and not prefill.sinks
    policy = policy_for("decode", H200, decode.policy)
    assert (policy.graph, policy.cold_l2, policy.min_ms) == (False, True, 1.5)


def test_policies_are_those_that_dispatch_looks_for():
    decode, prefill = policy_for("decode", H200), policy_for("prefill", H200)
    assert (decode.graph, decode.cold_l2) == (True, True)
    assert (prefill.graph, prefill.cold_l2) == (False, True)
    assert not policy_for("decode", INTERPRETER).graph


def test_json_says_the_same(tmp_path):
    rows = parsed(GOOD, tmp_path=tmp_path).rows
    text = json.dumps(dict(read_file(tmp_path / "mine.toml")))
    assert parsed(text, ".json", tmp_path).rows == rows
    with pytest.raises(InputError, match="the file is valid json"):
        parsed("{", ".json", tmp_path)


def test_yaml_says_the_same(tmp_path):
    yaml = pytest.importorskip("yaml")
    rows = parsed(GOOD, tmp_path=tmp_path).rows
    text = yaml.safe_dump(dict(read_file(tmp_path / "mine.toml")))
    assert parsed(text, ".yaml", tmp_path).rows == rows


LAYER = "[[layers]]\nheads = [4, 2]\nhead_dim = 64\n{}\n[[layers.calls]]\nq_len = 64\n{}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("title = 3\n" + LAYER.format("", ""), ["title = 3", "string"]),
        ("titl = 'x'", ["'titl'", "did you mean title?"]),
        ("", ["layers = None", "[[layers]]"]),
        ("[[layers]]\nheads = [4, 2]\nhead_dim = 64", ["layers[0]: calls = None"]),
        (LAYER.format("head = 3", ""), ["layers[0]: 'head'", "did you mean heads?"]),
        (LAYER.format("", "mask_mod = 'x:y'"), ["layers[0]: calls[0]: 'mask_mod'"]),
        (LAYER.format("", "mask = 'my-mod'"), ["calls[0]: mask = 'my-mod'", "package.module"]),
        (LAYER.format("score = {mod = 3}", ""), ["layers[0]: score: mod = 3", "string"]),
        (LAYER.format("", "mask = {mod='a:b', args=['$S']}"), ["'$S'", "$kv_len"]),
        (LAYER.format("dtype = 'int8'", ""), ["layers[0]: dtype = 'int8'", "bfloat16"]),
        (LAYER.format("", "batch = 0"), ["calls[0]: batch = 0", "at least 1"]),
        (LAYER.format("", "kind = 'both'"), ["kind = 'both'", "prefill, decode or serving"]),
        (LAYER.format("", "mixes = [[1, 1, 5]]"), ["mixes", "instead of batch"]),
        (LAYER.format("", "policy = {graph = 1}"), ["policy: graph = 1", "true or false"]),
        (LAYER.format("", "policy = {rounds = []}"), ["policy: rounds = []"]),
        (LAYER.format("scale = 'big'", ""), ["scale = 'big'", "number"]),
        (LAYER.format("", "block_size = [1, 2, 3]"), ["block_size", "[query rows, keys]"]),
        (LAYER.replace("[4, 2]", "[4, 3]").format("", ""), ["heads = [4, 3]", "a multiple"]),
        (LAYER.replace("q_len = 64", "kv_len = 3").format("", ""), ["a call has q_len"]),
        (LAYER.replace("q_len = 64", "mixes = [[1, 2]]").format("", ""), ["lists of 3 integers"]),
        (LAYER.format("", "name = 'a'") + "\n[[layers.calls]]\nq_len=64\nname='a'", ["two rows"]),
        ("a = [", ["valid toml"]),
    ],
    ids=lambda value: None if isinstance(value, list) else "",
)
def test_errors_name_file_table_and_key(text, words, tmp_path):
    with pytest.raises(InputError) as caught:
        parsed(text, tmp_path=tmp_path)
    assert "mine.toml" in caught.value.got
    for word in words:
        assert word in str(caught.value)


def test_files_that_are_no_workload(tmp_path):
    with pytest.raises(InputError, match=r"suffix '\.ini'"):
        read(tmp_path / "mine.ini")
    with pytest.raises(InputError, match="No such file"):
        read(tmp_path / "mine.toml")


def plans(**call):
    layer = {"heads": [4, 2], "head_dim": 64, "calls": [{"mixes": [[8, 1, 300]], **call}]}
    return parse_workload({"layers": [layer]}, "x", "x").rows


def test_pages_and_classes_make_plans_of_a_call():
    assert [row.served for row in plans(page_size=0)] == [None]
    rows = plans(page_size=[16, 64], lengths=["uniform", "ragged"], kv_dtype="float8_e4m3fn")
    assert [(row.served.page, row.served.lengths) for row in rows] == [
        (16, "uniform"), (16, "ragged"), (64, "uniform"), (64, "ragged"),
    ]  # fmt: skip
    assert rows[1].title == "x B8 300 page 16 ragged" and rows[0].kind is None
    (contiguous,) = plans(kind="serving")
    assert contiguous.served.page == 0 and contiguous.title == "x B8 300"
    found = [plan_task(row, H200) for row in rows]
    assert len({key_of(task.problem) for task in found}) == 4
    assert found[1].kv_lens[0] == 300 > found[1].kv_lens[1]
    assert found[0].policy.graph and found[0].problem.structure.scaled
    (fine,) = plans(page_size=16, kv_dtype="float8_e4m3fn", scaled="token_head")
    assert plan_task(fine, H200).problem.structure.scales == "token_head"
    assert key_of(plan_task(fine, H200).problem) not in {key_of(task.problem) for task in found}
    assert list(tasks(rows, H200)) == [], "calls alone"
    (chosen,) = plans(page_size=16, selection=[128, 16])
    assert "chosen 128x16" in str(key_of(plan_task(chosen, H200).problem))
    (invariant,) = plans(page_size=16, batch_invariant=True)
    assert plan_task(invariant, H200).problem.structure.split_keys > 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"lengths": "ragged"}, "kind = .serving"),
        ({"page_size": 16, "selection": 128}, "k, unit"),
        ({"page_size": 16, "kind": "decode"}, "with page_size"),
        ({"page_size": 16, "lengths": "long"}, "uniform, ragged, mixed"),
        ({"kind": "paged"}, "prefill, decode or serving"),
    ],
)
def test_plans_that_make_no_sense(call, words):
    with pytest.raises(InputError, match=words):
        plans(**call)


def test_a_plan_that_nobody_can_make():
    with pytest.raises(InputError, match="a page has"):
        plan_task(plans(page_size=512)[0], H200)
    with pytest.raises(InputError, match="float9"):
        plan_task(plans(page_size=16, kv_dtype="float9")[0], H200)


def row(**changes):
    data = {
        "layers": [
            {
                "heads": [4, 2],
                "head_dim": 64,
                "score": {"mod": "flexattn.catalogue:softcap", "args": [30.0]},
                "mask": {"mod": "flexattn.catalogue:sliding_window", "args": [63]},
                "calls": [{"mixes": [[2, 300, 300]], "block_size": 64}],
            }
        ]
    }
    return replace(parse_workload(data, "x", "x").rows[0], **changes)


@pytest.mark.parametrize("sinks", [None, torch.zeros(4, dtype=torch.bfloat16)], ids=["", "sinks"])
def test_a_task_is_what_dispatch_would_make_of_the_call(monkeypatch, sinks):
    found = problems_asked(monkeypatch, device=INTERPRETER)
    task = task_of(row(sinks=sinks is not None), INTERPRETER, CPU)
    clear()
    q, k, v = (torch.zeros(2, heads, 300, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    mask = create_block_mask(sliding_window(63), None, None, 300, 300, "cpu", 64)
    plan.plan(make_call(q, k, v, softcap(30.0), mask, None, True, False, None, None, sinks))
    (problem,) = found
    assert problem == task.problem and key_of(problem) == key_of(task.problem)


def test_a_task_holds_what_workers_need():
    task = task_of(row(), H200, CPU)
    assert task.title == "x B2 300x300" and task.scale == 1 / math.sqrt(64)
    assert task.problem.mask_class.startswith("d1/") and task.lists.kv_num.shape == (1, 1, 5)
    assert task.score.mod.kind == "score" and task.mask.mod.kind == "mask"
    ragged = ModPath("flexattn.presets.mods:ragged", ("$B", "$kv_len"))
    task = task_of(row(mask=ragged), H200, CPU)
    assert task.lists.kv_num.shape == (2, 1, 5)  # it depends on the batch, and not on the head
    assert task.mask.tensors[0].tolist() == [75, 300]


def test_what_was_traced_before_does_not_change_a_key():
    """A number that differs from call to call becomes an argument: not between two rows."""
    other = ModPath("flexattn.catalogue:sliding_window", (17,))
    alone = key_of(task_of(row(), H200, CPU).problem)
    found = list(tasks([row(mask=other), row()], H200))
    assert key_of(found[1].problem) == alone and found[1].mask.scalars == ()


def test_one_key_is_tuned_once():
    near = row(shape=Shape(2, 4, 2, 290, 290, 64, 64), title="near")
    kept, others = distinct(tasks([row(), near, row(dtype="float16")], H200))
    assert [task.title for task in kept] == ["x B2 300x300"] * 2
    assert [(task.title, first.title) for task, first in others] == [("near", "x B2 300x300")]


@pytest.mark.parametrize(
    ("mod", "error", "words"),
    [
        (ModPath("no_such:f"), InputError, "cannot import 'no_such'"),
        (ModPath("flexattn.catalogue:sofcap"), InputError, "did you mean softcap?"),
        (ModPath("flexattn.catalogue:softcap"), InputError, "takes 1 arguments"),
        (ModPath("flexattn.catalogue:softcap", (1, 2)), InputError, r"softcap\(1, 2\)"),
        (ModPath("flexattn.catalogue:softcap", (3.0,)), InputError, "it is a score_mod"),
        (ModPath("flexattn.catalogue:CASES"), InputError, "can be called"),
    ],
)
def test_mods_that_cannot_be_used(mod, error, words):
    with pytest.raises(error, match=words):
        task_of(row(mask=mod), H200, CPU)


def test_kinds_follow_the_lengths_unless_they_are_said():
    short = row(shape=Shape(1, 4, 2, 1, 300, 64, 64), mask=None)
    assert task_of(short, H200, CPU).problem.structure.kind == "decode"
    assert task_of(replace(short, kind="prefill"), H200, CPU).problem.structure.kind == "prefill"
    assert task_of(short, H200, CPU).lists is None
