"""The key: one function rounds, when tuning and when dispatching, and nothing else does."""

import ast
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from flexattn import create_block_mask
from flexattn.catalogue.masks import sliding_window
from flexattn.catalogue.scores import softcap
from flexattn.frontend import plan
from flexattn.frontend.call import make_call
from flexattn.problem import Layout, Shape
from flexattn.records.record import SIZES, Key, Sizes, key_of, rounded, sizes_of
from flexattn.records.store import _NAME
from flexattn.tuning.tasks import task_of
from flexattn.tuning.workload import ModPath, Row
from tests.problems import H200, problem, problems_asked

PACKAGE = Path(__file__).parents[3] / "flexattn"
SIZE = st.integers(0, 2**26)


@given(SIZE, SIZE)
def test_rounding_is_monotone_idempotent_and_never_down(a, b):
    assert rounded(min(a, b)) <= rounded(max(a, b))
    assert rounded(rounded(a)) == rounded(a)
    assert a <= rounded(a) < max(2, 2 * a)


@given(SIZE, SIZE, SIZE)
def test_a_key_holds_rounded_sizes(B, q_len, kv_len):
    wanted = replace(problem("decode"), B=B, q_len=q_len, kv_len=kv_len)
    key = key_of(wanted)
    assert key.sizes == sizes_of(wanted).rounded() == key.sizes.rounded()
    again = replace(wanted, **key.sizes._asdict())
    assert key_of(again) == key and key_of(again).digest() == key.digest()


@given(SIZE, SIZE, SIZE)
def test_sizes_are_read_back_from_a_files_name(B, q_len, kv_len):
    match = _NAME.fullmatch(f"{Sizes(B, q_len, kv_len)}.json")
    assert Sizes(*map(int, match.groups())) == (B, q_len, kv_len)


CHANGES = {
    "dtype": "float16", "head_dim_qk": 64, "head_dim_v": 64, "lse": False, "max_scores": True,
    "positive_scale": False, "layout": Layout(True, True, True, False), "sinks": "float32",
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_decides_the_config_is_in_the_key_and_statistics_are_not(name):
    base = problem("prefill")
    other = replace(base, structure=replace(base.structure, **{name: CHANGES[name]}))
    assert (key_of(base) == key_of(other)) == (name in ("lse", "max_scores"))
    assert (key_of(base).family() == key_of(other).family()) == (name in ("lse", "max_scores"))


def test_a_family_is_all_but_the_sizes():
    key = key_of(problem("decode"))
    changed = [replace(key, **{name: 64}) for name in SIZES]
    assert {each.family() for each in changed} == {key.family()}
    assert len({each.digest() for each in [key, *changed]}) == 4
    others = [f.name for f in fields(Key) if f.name not in SIZES]
    moved = [replace(key, **{name: "other"}) for name in others]
    assert len({each.family() for each in [key, *moved]}) == len(others) + 1


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 700), (1000, 1000)])
def test_tuning_and_dispatch_make_one_key(monkeypatch, q_len, kv_len):
    """A workload's row, and the same call as dispatch sees it."""
    seen = problems_asked(monkeypatch)
    mask = ModPath("flexattn.catalogue.masks:sliding_window", (300,))
    score = ModPath("flexattn.catalogue.scores:softcap", (30.0,))
    shape = Shape(3, 8, 2, q_len, kv_len, 64, 64)
    row = Row("row", None, "bfloat16", shape, score, mask, (128, 128), None, ())
    task = task_of(row, H200, torch.device("cpu"))
    q = torch.zeros(3, 8, q_len, 64, dtype=torch.bfloat16)
    k = torch.zeros(3, 2, kv_len, 64, dtype=torch.bfloat16)
    block_mask = create_block_mask(sliding_window(300), None, None, q_len, kv_len, "cpu")
    call = make_call(q, k, k, softcap(30.0), block_mask, None, True, False, None, None)
    plan.plan(call)
    assert key_of(seen[0]) == key_of(task.problem)
    assert key_of(task.problem).mask_class not in ("", "unknown")


def trees():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def test_nothing_else_rounds_a_size_or_makes_a_key():
    """Powers of two of tile widths stay in space and render, and one bounds a mask's huge blocks;
    keys of calls and plans are made in one function."""
    for where, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            if name == "Key":
                assert where == "records/record.py"
            if name in ("bit_length", "next_power_of_2"):
                allowed = where in ("problem/problem.py", "block_mask/classify.py")
                assert where.startswith(("kernels/", "mods/")) or allowed


@given(st.integers(0, 2**26))
def test_a_bucket_of_kv_len_has_one_record_and_one_choice(keys):
    """15 keys more, or an eighth, and of the same power of two, by which records are filed."""
    wanted = replace(problem("decode"), kv_len=keys)
    found = wanted.bucketed()
    assert key_of(found) == key_of(wanted)
    assert keys <= found.kv_len <= max(keys + 15, keys * 1.125)
    assert found.bucketed() == found
    prompt = replace(problem("prefill"), kv_len=keys)
    assert prompt.bucketed() == prompt
