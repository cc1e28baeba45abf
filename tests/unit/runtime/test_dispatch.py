"""What dispatch takes from the cache, and when it says so."""

import enum
import logging
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import pytest
import torch

from flexattn import create_block_mask
from flexattn.catalogue import causal
from flexattn.device import named
from flexattn.errors import RenderError
from flexattn.frontend import plan
from flexattn.frontend.call import make_call
from flexattn.kernels.choose.options import NONE, Options, parse
from flexattn.kernels.triton.config import DecodeConfig
from flexattn.problem import Layout, Structure
from flexattn.records import layers as layers_module
from flexattn.records.environment import environment
from flexattn.records.layers import find
from flexattn.records.record import key_of, sizes_of
from flexattn.records.store import Store
from flexattn.records.untuned import note, untuned_path
from flexattn.runtime import dispatch
from flexattn.runtime.build import Kernel, builder
from flexattn.runtime.candidates import candidates_of
from flexattn.runtime.dispatch import Dispatcher
from flexattn.runtime.launch import Lists
from flexattn.settings import override
from tests.places import own_place
from tests.problems import A100, H200, choices, problem, problems_asked
from tests.records import decode_record

DECODE = problem("decode")
TUNED = DecodeConfig(16, 32, 4, 2, 7)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    with own_place(tmp_path, monkeypatch):
        yield tmp_path


def tune(wanted=DECODE, config=TUNED, root=None, **environment_changes):
    record = decode_record(
        provenance="measured",
        environment=replace(environment("decode", H200), **environment_changes),
    )
    winner = record.decision.winner
    trials = list(record.trials)
    trials[winner] = replace(trials[winner], config=config)
    record = replace(
        record, key=key_of(wanted), sizes=tuple(sizes_of(wanted)), trials=tuple(trials)
    )
    place = untuned_path().parent / "records" if root is None else root
    assert Store(place).write(record, replace=True)


class Builder:
    """Compiles nothing; the kernel with this hash needs too much shared memory."""

    def __init__(self, too_big=""):
        self.too_big = too_big

    def kernel(self, source, device, index):
        shared = 2**20 * (source.hash == self.too_big)
        return Kernel(source, SimpleNamespace(metadata=SimpleNamespace(shared=shared)), index)


def chosen(wanted=DECODE, options=NONE, too_big=""):
    return Dispatcher(Builder(too_big)).choose(wanted, H200, 0, options)


@pytest.mark.parametrize(
    ("device", "more", "why"),
    [
        ("nvidia-h200", {"layout": Layout(False, False, False, False)}, "inner stride 1"),
        ("nvidia-a100", {}, "sm_80 has no TMA"),
        ("nvidia-h200", {"D": 576, "Dv": 512}, "576 is not one tile"),
    ],
)
def test_the_copy_engine_is_a_hint(device, more, why, caplog):
    """It was an error where torch drops it: one model asks for all of its layers."""
    caplog.set_level(logging.DEBUG, "flexattn")
    asked = Options("prefill", "triton", BLOCK_M=16, BLOCK_N=16, use_tma=True)
    (found,) = candidates_of(problem("prefill", **more), named(device), asked)
    assert not found.config.use_tma and found.config.BLOCK_M == 16
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG and why in record.getMessage()


class Rows(int, enum.Enum):
    FEW = 32


def test_a_number_prints_as_a_number():
    """A kernel's file had `BLOCK_M = Rows.FEW`, and later calls with BLOCK_M=32 took it too."""
    builder().rendered.clear()
    mask = create_block_mask(causal, None, None, 64, 64, "cpu", Rows.FEW)
    sparsity = Lists.of(mask).sparsity(mask.BLOCK_SIZE, 1)
    asked = parse({"BACKEND": "TRITON", "BLOCK_M": Rows.FEW, "BLOCK_N": Rows.FEW})
    masked = problem("prefill", mask_mod=causal)
    structure = replace(masked.structure, sparsity=sparsity)
    (found,) = choices(replace(masked, structure=structure), H200, asked)
    assert found.config.BLOCK_M == 32 and "Rows" not in found.source.text


def test_the_copy_engine_copies_where_it_can(caplog):
    caplog.set_level(logging.DEBUG, "flexattn")
    asked = Options("prefill", "triton", BLOCK_M=64, BLOCK_N=64, use_tma=True)
    (found,) = candidates_of(problem("prefill"), H200, asked)
    assert found.config.use_tma and not caplog.records


def test_a_record_decides_the_config():
    assert chosen().how == "default"
    tune()
    found = chosen()
    assert (found.how, found.config) == ("hit", TUNED)
    assert found.origin.startswith("tuned: ") and "user record" in found.origin
    assert "BLOCK_N=32" in found.source.text.splitlines()[1]


def test_hints_and_neighbours_say_so():
    tune(torch="2.0.0")
    assert chosen().how == "hint" and "torch" in chosen().origin
    other = replace(DECODE, kv_len=2 * DECODE.kv_len)
    assert chosen(other).how == "nearest" and "nearest" in chosen(other).origin


def test_off_takes_no_record(said):
    tune()
    dispatcher = Dispatcher(Builder())
    assert dispatcher.choose(DECODE, H200, 0, NONE).how == "hit"
    with override(mode="off"):
        assert dispatcher.choose(DECODE, H200, 0, NONE).how == "default"
        note(DECODE, H200, "default", None, None)
    assert not said() and not untuned_path().exists()


def test_what_this_process_writes_is_seen_at_once(tmp_path):
    dispatcher = Dispatcher(Builder())
    assert dispatcher.choose(DECODE, H200, 0, NONE).how == "default"
    tune()
    assert dispatcher.choose(DECODE, H200, 0, NONE).how == "hit"
    with override(cache_dir=tmp_path / "another"):
        assert dispatcher.choose(DECODE, H200, 0, NONE).how == "default"


def test_a_launch_made_before_a_record_was_written_is_made_anew(monkeypatch):
    made = problems_asked(monkeypatch)
    q, k = (torch.zeros(3, 8, n, 64, dtype=torch.bfloat16) for n in (1, 700))
    asked = make_call(q, k, k, None, None, None, False, False, None, None)
    for _ in range(2):
        plan.plan(asked)
    assert len(made) == 1
    tune()
    plan.plan(asked)
    with override(cache_dir=untuned_path().parent / "another"):
        plan.plan(asked)
    assert len(made) == 3


def test_an_explicit_directory_comes_first(tmp_path):
    tune()
    mine = replace(TUNED, num_splits=3)
    tune(config=mine, root=tmp_path / "mine")
    with override(cache=(tmp_path / "mine",)):
        assert chosen().config == mine
    assert chosen().config == TUNED


def test_the_callers_numbers_come_before_a_record():
    tune()
    found = chosen(options=Options(num_stages=3))
    assert (found.how, found.origin) == ("forced", "kernel_options")


def test_a_record_that_needs_too_much_shared_memory_falls_through():
    tune()
    first, second = list(choices(DECODE, H200, NONE))[:2]
    assert (first.how, second.how) == ("hit", "default")
    found = chosen(too_big=first.source.hash)
    assert (found.how, found.config) == ("default", second.config)
    assert "shared memory" in found.origin and "tuned: " in found.origin


def test_a_record_that_is_none_is_a_miss_with_a_warning(said):
    tune()
    path = find(DECODE, H200).stored.path
    path.write_text(path.read_text()[:1000])
    layers_module._memory.clear()
    assert chosen().how == "default"
    assert len(said()) == 1 and str(path) in said()[0]


def test_a_repeated_problem_looks_nothing_up(monkeypatch):
    tune()
    dispatcher = Dispatcher(Builder())
    first = dispatcher.choose(DECODE, H200, 0, NONE)
    monkeypatch.setattr("flexattn.runtime.candidates.find", None)
    assert dispatcher.choose(DECODE, H200, 0, NONE) is first


@pytest.mark.parametrize("tuned", [False, True], ids=["default", "tuned"])
def test_the_next_length_takes_the_kernels_of_the_last_one(monkeypatch, tuned):
    """A token of a cache that grows waited for its candidates to be judged once more."""
    if tuned:
        tune()
    grown = [replace(DECODE, kv_len=DECODE.kv_len - i) for i in range(6)]
    wanted = [chosen(each) for each in grown]
    dispatcher = Dispatcher(Builder())
    first = dispatcher.choose(grown[0], H200, 0, NONE)
    served = []
    serve = dispatch.first_served
    monkeypatch.setattr(
        dispatch, "first_served", lambda *given: served.append(given[1]) or serve(*given)
    )
    found = [dispatcher.choose(each, H200, 0, NONE) for each in grown]
    assert not served and found == wanted
    assert first.merger is not None and all(each.kernels == first.kernels for each in found)
    # Another kernel, GPU, or folder of binaries is another matter.
    dispatcher.choose(replace(DECODE, structure=problem("decode", 64).structure), H200, 0, NONE)
    dispatcher.choose(grown[1], H200, 1, NONE)
    assert len(served) == 2


def test_what_was_refused_is_judged_for_each_length():
    tune()
    first = next(choices(DECODE, H200, NONE))
    dispatcher = Dispatcher(Builder(first.source.hash))
    for i in range(3):
        found = dispatcher.choose(replace(DECODE, kv_len=DECODE.kv_len - i), H200, 0, NONE)
        assert found.how == "default" and "shared memory" in found.origin


# what is said and listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere(Structure):
    """Keys of which a field says where they lie."""

    keys_elsewhere: int = 0


def test_a_template_that_does_not_read_where_keys_lie_is_refused():
    """It would read a row of K and V for each key, of what has other rows."""
    plain = problem("prefill", 64)
    given = {each.name: getattr(plain.structure, each.name) for each in fields(plain.structure)}
    dense, other = (replace(plain, structure=Elsewhere(**given, keys_elsewhere=n)) for n in (0, 7))
    for device in (H200, A100):
        assert next(candidates_of(dense, device, NONE)).sources()
        with pytest.raises(RenderError, match="keys_elsewhere"):
            next(candidates_of(other, device, NONE)).sources()
