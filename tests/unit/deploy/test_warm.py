"""warm() asks for all kernels that calls of its mods need, at whatever lengths they come."""

import gc
import random
from dataclasses import replace

import pytest
import torch

from flexattn.deploy.warm import at_other_sizes, rows_like, warm
from flexattn.errors import FlexAttnError
from flexattn.kernels.choose.options import NONE
from flexattn.runtime.build import builder
from flexattn.runtime.decay_skip import sources
from flexattn.runtime.dispatch import Dispatcher
from flexattn.settings import override
from flexattn.tuning import tasks
from flexattn.tuning.tasks import mods_of, task_from
from flexattn.tuning.workload import Workload, parse_workload
from tests.failing_builds import Builder
from tests.problems import H200
from tests.work import renders

ROWLESS = Workload("none", "", (), "", ())
WINDOW = {"mod": "flexattn.catalogue:sliding_window", "args": [100]}
# Its blocks have gaps in long prompts, and lie side by side in short ones.
DILATED = {"mod": "flexattn.catalogue:dilated_window", "args": [1200, 600]}
ALIBI = {"mod": "flexattn.catalogue.scores:alibi", "args": [32, "cpu"]}
SOFTCAP = {"mod": "flexattn.catalogue.scores:softcap", "args": [50.0]}
MODELS = {
    "causal": {"mask": "flexattn.catalogue:causal"},
    "window, sinks": {"mask": WINDOW, "sinks": True},
    "gaps": {"mask": DILATED, "heads": [24, 8], "head_dim": 96},
    "decay": {"mask": "flexattn.catalogue:causal", "score": ALIBI},
    "groups of four": {"mask": "flexattn.catalogue:causal", "heads": [24, 6]},
    "wide": {"mask": "flexattn.catalogue:causal", "score": SOFTCAP, "head_dim": 256},
    # Of each head 16 rows are one short tile of decode's, and 17 are one of 64 rows.
    "no groups": {"mask": "flexattn.catalogue:causal", "heads": [32, 32]},
}


def rows(name):
    calls = [{"name": "prefill", "q_len": 2048}, {"name": "decode", "mixes": [[4, 1, 2048]]}]
    layer = {"heads": [32, 8], "head_dim": 128, "calls": calls} | MODELS[name]
    return parse_workload({"layers": [layer]}, "a model", "a test").rows


def kernels_of(row, warmed=False):
    """Hashes of what a call of a row asks for on an H200; warmed: and of what `warm` adds."""
    problem = task_from(row, *mods_of(row), H200, torch.device("cpu")).problem
    built = Builder()
    choice = Dispatcher(built).choose(problem, H200, 0, NONE)
    for options in at_other_sizes(problem, H200) if warmed else ():
        Dispatcher(built).choose(problem, H200, 0, options)
    before_it = sources(problem.structure, choice.config, H200)
    return {source.hash for source in (*built.built, *before_it)}


@pytest.mark.parametrize("name", MODELS)
def test_random_lengths_ask_for_no_other_kernel(name, monkeypatch):
    """Prompts of up to 16 tokens decode: each of two tile heights stalled traffic for a second.

    No template is filled either: a batch whose keys are split otherwise filled decode's anew.
    """
    draw = random.Random(name)
    builder().rendered.clear()
    with override(mode="off"):
        prefill, decode = rows(name)
        warmed = {found for row in rows(name) for each in rows_like(row)
                  for found in kernels_of(each, warmed=True)}  # fmt: skip
        filled = renders(monkeypatch)
        lengths = [1, 2, 5, 16, 17, 100, 128, 129]
        lengths += [round(2 ** draw.uniform(0, 11.5)) for _ in range(4)]
        for length in lengths:
            B, keys = draw.choice([1, 3, 16]), length
            if draw.random() < 0.3:  # a chunk of a prompt
                keys = length + draw.randrange(2048)
            for row, q_len in ((prefill, length), (decode, 1)):
                shape = replace(row.shape, B=B, q_len=q_len, kv_len=keys)
                assert kernels_of(replace(row, shape=shape)) <= warmed, shape
        for rows_of_chunk in (17, 100, 500):
            shape = replace(prefill.shape, B=1, q_len=rows_of_chunk, kv_len=9000)
            assert kernels_of(replace(prefill, shape=shape)) <= warmed, shape
        assert not filled


def test_a_new_length_fills_no_template(monkeypatch):
    """Each new length filled Hopper's anew, for another header: 30 ms of a call."""
    row = rows("causal")[0]
    problem = task_from(row, *mods_of(row), H200, torch.device("cpu")).problem
    dispatcher = Dispatcher(Builder())
    builder().rendered.clear()
    with override(mode="off"):
        for options in (NONE, *at_other_sizes(problem, H200)):
            dispatcher.choose(problem, H200, 0, options)
        filled = renders(monkeypatch)
        for length in (2047, 77, 5000):
            dispatcher.choose(replace(problem, q_len=length, kv_len=length), H200, 0, NONE)
        assert not filled


def test_another_number_of_splits_fills_no_template(monkeypatch):
    """It is an argument: one request over many keys filled decode's templates during traffic."""
    _, row = rows("groups of four")
    problem = task_from(row, *mods_of(row), H200, torch.device("cpu")).problem
    dispatcher = Dispatcher(Builder())
    builder().rendered.clear()
    with override(mode="off"):
        first = dispatcher.choose(problem, H200, 0, NONE)
        filled = renders(monkeypatch)
        other = dispatcher.choose(replace(problem, B=1, kv_len=8192), H200, 0, NONE)
    assert other.config.num_splits != first.config.num_splits
    assert other.source == first.source and not filled


def test_a_masks_blocks_are_listed_on_the_device(monkeypatch):
    """Its first prompt loaded two dozen of torch's kernels: the lists were made on the CPU."""
    row, where = rows("causal")[0], torch.device("meta")
    monkeypatch.setattr(
        tasks, "block_kinds", lambda *asked: torch.empty(1, 1, 16, 16, device=where)
    )
    _, mask_mod = mods_of(row)
    mask = tasks._block_mask(mask_mod, tasks.bind(mask_mod, "mask"), row, where)
    assert mask.kv_indices.device == mask.full_kv_indices.device == where


def test_no_full_collection_is_due_after_it():
    """One that was due stalled a call for 0.1 to 0.3 s."""
    seen = []

    def noted(phase, told):
        seen.append((phase, told["generation"]))

    gc.callbacks.append(noted)
    try:
        warm(ROWLESS, "cpu")
    finally:
        gc.callbacks.remove(noted)
    assert seen[-1] == ("stop", 2)


def test_training_and_decode_have_the_lengths_that_they_say():
    calls = [{"name": "training", "q_len": 512, "backward": True}]
    layer = {"heads": [4, 4], "head_dim": 64, "calls": calls}
    trained = parse_workload({"layers": [layer]}, "a model", "a test").rows
    for row in (*trained, rows("causal")[1]):
        assert list(rows_like(row)) == [row]


@pytest.mark.parametrize(
    ("workload", "device", "said"),
    [([], "cpu", "workload is a list"), (ROWLESS, "nowhere", "device 'nowhere'")],
)
def test_what_is_no_workload_or_no_device_is_refused(workload, device, said):
    with pytest.raises(FlexAttnError, match=said):
        warm(workload, device)
