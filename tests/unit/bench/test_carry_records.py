"""Records follow the renderer where their kernels are what they were, and nowhere else."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from bench import carry_child
from bench.carry_records import (
    CARRIED,
    FORMER_ARGUMENTS,
    THERE,
    carry,
    programs,
)
from bench.measured import measured
from bench.static_defaults import standing
from flexattn.kernels.base.config import Config
from flexattn.kernels.choose.registry import short
from flexattn.records.codec import decode, decode_record, encode, encode_record
from flexattn.records.store import Store

SHIPPED = Path(__file__).parents[3] / "configs" / "nvidia-h200"


@pytest.fixture
def root(tmp_path):
    """A store with two shipped records of one environment."""
    by_folder = {}
    for path in Store(SHIPPED).paths():
        by_folder.setdefault(path.parts[-3], []).append(path)
    for path in max(by_folder.values(), key=len)[:2]:
        assert Store(tmp_path).write(decode_record(path.read_bytes()))
    return tmp_path


def told(root, **about):
    """As bench.carry_child tells it, of every record."""
    found = {}
    for path in Store(root).paths():
        record = decode_record(path.read_bytes())
        usual = {
            "template": record.environment.template,
            "kernels": compiled(),
            "default": encode(recorded_default(record)),
        }
        found[path.relative_to(root).as_posix()] = usual | about
    return found


def recorded_default(record):
    """The static default of a record's time."""
    return record.trials[record.decision.default].config


def compiled(text="def kernel(OUT):\n    a = 1\n    OUT[a] = a\n", after=""):
    """Kernels of a record."""
    source = {"text": text, "arguments": [["OUT", "*fp32", 16]], "how": [4, 2, "triton", 0]}
    source["stages"] = [[], ""]
    return {"sources": [source], "after": [after]}


def test_a_record_of_the_same_kernel_moves_and_is_otherwise_as_it_was(root):
    before = [decode_record(path.read_bytes()) for path in Store(root).paths()]
    old, new = told(root), told(root, template="0123456789abcdef")
    assert carry(root, old, new, dry=True) == {CARRIED: 2}
    assert [decode_record(path.read_bytes()) for path in Store(root).paths()] == before
    assert carry(root, old, new, dry=False) == {CARRIED: 2}
    after = [found for _, found in Store(root).entries()]
    assert {each.environment.template for each in after} == {"0123456789abcdef"}
    assert len(Store(root).folders()) == 1, "the folder that was left empty is gone"
    for one, other in zip(before, after, strict=True):
        lines = zip(
            encode_record(one).splitlines(), encode_record(other).splitlines(), strict=True
        )
        changed = [a.split(":")[0].strip(' "') for a, b in lines if a != b]
        assert changed == ["environment", "sha256"]
        assert one.environment.differing(other.environment) == ("template",)
    assert carry(root, told(root), told(root), dry=False) == {THERE: 2}


def test_a_kernel_whose_names_were_changed_is_the_same(root):
    renamed = compiled(
        "def kernel(OUT):\n    # The first place.\n    place = 1\n    OUT[place] = place"
    )
    old = told(root)
    new = told(root, template="0123456789abcdef", kernels=renamed)
    assert carry(root, old, new, dry=True) == {CARRIED: 2}


@pytest.mark.parametrize(("more", "what"), [(" + 0", CARRIED), (" + 1", "another kernel")])
def test_a_kernel_of_another_text_that_becomes_the_same_ptx_is_the_same(root, more, what):
    text = "import triton\n@triton.jit\ndef kernel(OUT):\n    triton.language.store(OUT{}, 1.0)\n"
    old = told(root, kernels=compiled(text.format("")))
    new = told(root, template="0123456789abcdef", kernels=compiled(text.format(more)))
    assert carry(root, old, new, dry=True) == {what: 2}


def test_an_argument_is_the_same_under_the_name_that_its_launcher_has_now(monkeypatch):
    monkeypatch.setitem(FORMER_ARGUMENTS, "RESULT", "OUT")
    now = compiled()
    before = json.loads(json.dumps(now).replace("OUT", "RESULT"))
    assert programs(before) == programs(now)
    monkeypatch.delitem(FORMER_ARGUMENTS, "RESULT")
    assert programs(before) != programs(now)


@pytest.mark.parametrize("template", [{}, {"template": "0123456789abcdef"}], ids=["here", "moves"])
def test_a_record_beside_another_default_does_not_hold(root, template, capsys):
    """It never raced what runs without it, which may be the faster one by any factor."""
    before = list(Store(root).paths())
    for change in ({"BLOCK_N": 7}, {"type": "AnotherConfig"}, {"gained": 1}):
        new = told(root, **template)
        for each in new.values():
            each["default"] = each["default"] | change
        assert carry(root, told(root), new, dry=False) == {"another default": 2}
        assert capsys.readouterr().out.count("another default") == 2
    assert list(Store(root).paths()) == before


def test_a_default_that_is_assembled_by_what_is_installed_is_the_same(root):
    new = told(root, template="0123456789abcdef")
    for each in new.values():
        each["default"] = each["default"] | {"ptxas": "another"}
    assert carry(root, told(root), new, dry=True) == {CARRIED: 2}


@pytest.mark.parametrize("kind", ["prefill", "serving"])
def test_the_static_default_that_each_tree_tells(tmp_path, kind):
    """Of the record's problem, in this tree, as bench.static_defaults has it."""
    records = (decode_record(path.read_bytes()) for path in Store(SHIPPED).paths())
    record = next(each for each in records if each.key.kind == kind)
    root = tmp_path / "nvidia-h200"
    assert Store(root).write(record)
    (found,) = carry_child.main(root).values()
    config = decode(Config, found["default"], "default")
    assert short(config) == standing(next(measured(tmp_path))).default
    assert found["default"].keys() == {"type", *(each.name for each in fields(config))}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ({}, {"kernels": compiled("def kernel(OUT):\n    OUT[1] = 2\n")}, "another kernel"),
        ({}, {"kernels": compiled(after="def merged(ptx):\n    return ptx")}, "another kernel"),
        ({"template": "f" * 16}, {}, "a hint in the old tree already"),
        ({"kernels": None}, {}, "not rendered by the old tree: its config is gone"),
        ({}, {"kernels": None}, "not rendered by this tree: its config is gone"),
    ],
)
def test_others_stay_where_they_are_and_are_named(root, old, new, words, capsys):
    before = list(Store(root).paths())
    found = []
    for about in (old, {"template": "0123456789abcdef", **new}):
        each = told(root, **about)
        if "kernels" in about and about["kernels"] is None:
            each = {name: {"why": "its config is gone"} for name in each}
        found.append(each)
    assert carry(root, *found, dry=False) == {words: 2}
    assert list(Store(root).paths()) == before
    assert capsys.readouterr().out.count(words) == 2
