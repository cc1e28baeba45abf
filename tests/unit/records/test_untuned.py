"""What a call without a tuned record writes down for the tuner, and what is read of it again."""

import json
import os

import pytest
import torch

from flexattn import create_block_mask
from flexattn.device import INTERPRETER
from flexattn.errors import CacheError
from flexattn.frontend import plan
from flexattn.frontend.call import make_call
from flexattn.kernels.choose.options import NONE
from flexattn.mods import bind
from flexattn.problem.mask_lists import DENSITY_STEPS, IMBALANCE_STEPS, UNKNOWN
from flexattn.records import untuned
from flexattn.records.record import key_of
from flexattn.records.untuned import bound_of, note, read_untuned, untuned_path
from flexattn.settings import override
from tests.places import own_place
from tests.problems import H200, choices, problem, problems_asked

DECODE = problem("decode")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    with own_place(tmp_path, monkeypatch):
        yield tmp_path


def softcap(score, b, h, q_idx, kv_idx):
    return 20.0 * torch.tanh(score / 20.0)


def biased():
    bias, slopes = torch.randn(8, 700), torch.ones(8, dtype=torch.bfloat16)

    def mod(score, b, h, q_idx, kv_idx):
        return score * 0.5 + bias[h, kv_idx] * slopes[h]

    return mod


def padded():
    lengths = torch.tensor([700, 20, 300])
    return lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]


def call(monkeypatch, how="default", score_mod=None, mask_mod=None, kv_len=700, sinks=None):
    """A decode call as far as its plan, on a machine that says it has an H200."""
    seen = problems_asked(monkeypatch, how)
    q = torch.zeros(3, 8, 1, 64, dtype=torch.bfloat16)
    k = torch.zeros(3, 2, kv_len, 64, dtype=torch.bfloat16)
    mask = None
    if mask_mod is not None:
        mask = create_block_mask(mask_mod, 3, None, 1, kv_len, "cpu")
    plan.plan(make_call(q, k, k, score_mod, mask, None, True, False, None, None, sinks))
    return seen[0]


def test_a_miss_is_logged_and_listed_once_and_no_warning(monkeypatch, said, caplog):
    """It was a warning: a line on stderr of whatever served, for every problem it met."""
    for length in (700, 701, 1024):  # one bucket
        call(monkeypatch, kv_len=length)
    assert len(said()) == 1 and "\n" not in said()[0]
    assert "flexattn tune --from-untuned" in said()[0] and "static default" in said()[0]
    assert len(untuned_path().read_text().splitlines()) == 1
    call(monkeypatch, kv_len=5000, how="nearest")
    assert len(said()) == 2 and "nearest" in said()[1]
    assert [each.how for each in read_untuned(untuned_path())] == ["default", "nearest"]
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_a_miss_is_shown_to_nobody_who_did_not_ask(monkeypatch, caplog, capfd):
    """As a process has logging that sets nothing up: it was a line on stderr for each problem."""
    call(monkeypatch)
    assert not caplog.records and capfd.readouterr() == ("", "")
    assert len(read_untuned(untuned_path())) == 1


@pytest.mark.parametrize("how", ["hit", "forced", "hint"])
def test_what_is_no_miss_is_not_said(monkeypatch, said, how):
    call(monkeypatch, how=how)
    assert not said() and not untuned_path().exists()


def test_mode_tune_lists_hints_without_a_word(monkeypatch, said):
    with override(mode="tune"):
        call(monkeypatch, how="hint")
    assert not said() and read_untuned(untuned_path())[0].how == "hint"


def test_the_interpreter_is_silent(said):
    note(DECODE, INTERPRETER, "default", None, None)
    assert not said() and not untuned_path().exists()
    assert next(choices(DECODE, INTERPRETER, NONE)).how == "default"


def test_a_list_that_cannot_be_written_stops_nothing(monkeypatch, said, place, caplog):
    untuned_path().mkdir()
    call(monkeypatch)
    assert len(said()) == 2 and "cannot be written" in said()[1]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_a_list_has_an_end(monkeypatch, said):
    monkeypatch.setattr(untuned, "_MAX_FILE", 100)
    call(monkeypatch)
    assert untuned_path().read_bytes() == b"" and "is full" in said()[-1]


@pytest.mark.parametrize("mods", [{}, {"score": softcap}, {"score": biased(), "mask": padded()}])
def test_a_listed_problem_is_rebuilt(monkeypatch, mods):
    score_mod, mask_mod = mods.get("score"), mods.get("mask")
    met = call(monkeypatch, score_mod=score_mod, mask_mod=mask_mod)
    (listed,) = read_untuned(untuned_path())
    assert listed.problem == met and key_of(listed.problem) == key_of(met)
    assert listed.device == "nvidia-h200" and listed.problem.mask_class == met.mask_class
    for captured, fn, kind in (
        (listed.score, score_mod, "score"),
        (listed.mask, mask_mod, "mask"),
    ):
        if fn is None:
            assert captured is None
            continue
        bound, rebuilt = bind(fn, kind), bound_of(captured)
        assert rebuilt.mod == bound.mod and rebuilt.mod.expr is bound.mod.expr
        assert [(t.shape, t.dtype) for t in rebuilt.tensors] == [
            (t.shape, t.dtype) for t in bound.tensors
        ]
        assert rebuilt.scalars == bound.scalars


def test_sinks_are_listed_by_their_dtype(monkeypatch):
    met = [call(monkeypatch, sinks=torch.zeros(8, dtype=d)) for d in (torch.float32, torch.half)]
    assert [each.structure.sinks for each in met] == ["float32", "float16"]
    (listed,) = read_untuned(untuned_path())  # one key: their dtype changes no config
    assert listed.problem == met[0]


@pytest.mark.parametrize(("flag", "products"), [(False, "ieee"), (True, "tf32x3")])
def test_a_line_of_before_there_were_parts_is_read(flag, products):
    note(DECODE, H200, "default", None, None)
    line = json.loads(untuned_path().read_text())
    del line["fp32_products"]
    untuned_path().write_text(json.dumps(line | {"tf32": flag}) + "\n")
    (listed,) = read_untuned(untuned_path())
    assert listed.problem.structure.fp32_products == products


def test_numbers_that_became_arguments_are_kept(monkeypatch):
    def scaled(factor):
        return lambda score, b, h, q_idx, kv_idx: score * factor

    for factor in (0.25, 0.5, 0.75):
        call(monkeypatch, score_mod=scaled(factor))
    assert [each.score.scalars for each in read_untuned(untuned_path())] == [(), (0.5,)]


def test_contents_of_tensors_are_not_listed(monkeypatch):
    secret = torch.full((700,), 1234.5)
    call(monkeypatch, score_mod=lambda score, b, h, q_idx, kv_idx: score + secret[kv_idx])
    assert "1234" not in untuned_path().read_text()


def lines(change):
    def write(path):
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data) + "\n")

    return write


HOSTILE = {
    "no JSON": lambda path: path.write_text("{]\n"),
    "no object": lambda path: path.write_text("[1, 2]\n"),
    "deep": lambda path: path.write_text("[" * 100000 + "\n"),
    "bytes": lambda path: path.write_bytes(b"\xff\x00\xfe\n"),
    "another schema": lines(lambda data: data.update(schema=9)),
    "a field too many": lines(lambda data: data.update(run="me")),
    "a field too few": lines(lambda data: data.pop("kv_len")),
    "an absurd size": lines(lambda data: data.update(kv_len=10**30)),
    "no heads": lines(lambda data: data.update(Hkv=0)),
    "a length past the limit": lines(lambda data: data.update(kv_len=2**40)),
    "no batch": lines(lambda data: data.update(B=0)),
    "another group": lines(lambda data: data.update(group=5)),
    "no head dimension": lines(lambda data: data.update(head_dim_v=0)),
    "a mask class alone": lines(lambda data: data.update(mask_class="d1/2 i2 runs")),
    "another dtype": lines(lambda data: data.update(dtype="object")),
    "another fingerprint": lines(lambda data: data["score"]["mod"].update(fingerprint="0")),
    "other shapes": lines(lambda data: data["score"].update(tensors=[])),
    "huge shapes": lines(lambda data: data["score"]["tensors"][0].__setitem__(1, [2**40, 2**7])),
    "numbers nobody asked for": lines(lambda data: data["score"].update(scalars=[1])),
    "a mask for a score": lines(lambda data: data["score"]["mod"].update(kind="mask")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_lines_are_skipped_with_a_warning(monkeypatch, said, name):
    call(monkeypatch, score_mod=biased())
    assert len(read_untuned(untuned_path())) == 1
    HOSTILE[name](untuned_path())
    before = len(said())
    assert read_untuned(untuned_path()) == [] and len(said()) == before + 1
    assert "not used" in said()[-1] and len(said()[-1]) < 1000


BLOCKS = {"q_block": 128, "kv_block": 128, "has_full": True, "per_head": False}


@pytest.mark.parametrize(
    "change",
    [
        {"mask_class": "d1/0 i2 runs"},
        {"mask_class": "a class"},
        {"mask_class": "d1/2 i2 runs " * 1000},
        {"sparsity": {**BLOCKS, "kv_block": 0}},
        {"sparsity": {**BLOCKS, "q_block": 1, "kv_block": 1}, "q_len": 2**25, "kv_len": 2**25},
    ],
)
def test_masks_that_cannot_be_rebuilt_are_skipped(monkeypatch, said, change):
    call(monkeypatch, mask_mod=padded())
    (good,) = read_untuned(untuned_path())
    assert good.problem.mask_class
    lines(lambda data: data.update(change))(untuned_path())
    assert (
        read_untuned(untuned_path()) == [] and "not used" in said()[-1] and len(said()[-1]) < 1000
    )


def test_every_class_that_is_found_is_read():
    densities = ["1", *(f"1/{2**n}" for n in range(1, DENSITY_STEPS + 1))]
    imbalances = [2**n for n in range(IMBALANCE_STEPS + 1)]
    names = [
        f"d{density} i{imbalance} {shape}"
        for density in densities
        for imbalance in imbalances
        for shape in ("runs", "gaps")
    ]
    for name in ["", "empty", UNKNOWN, *names]:
        assert untuned._CLASS.fullmatch(name)


def test_good_lines_beside_bad_ones_are_read_and_a_pipe_is_refused(monkeypatch, tmp_path):
    call(monkeypatch)
    with untuned_path().open("a") as file:
        file.write("garbage\n")
        file.write(untuned_path().read_text().splitlines()[0] + "\n")
    assert len(read_untuned(untuned_path())) == 1
    assert read_untuned(tmp_path / "nothing") == []
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CacheError):
        read_untuned(tmp_path / "pipe")
