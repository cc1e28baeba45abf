"""A directory for a GPU that is not here: all its kernels, its block masks, and its mods."""

import pytest

from flexattn.catalogue import alibi, causal, softcap
from flexattn.deploy.binaries import export
from flexattn.device import named
from flexattn.errors import UnsupportedError
from flexattn.kernels.block_mask.source import render_block_mask
from flexattn.kernels.choose.options import NONE
from flexattn.kernels.decay_skip.source import render_norms, render_window
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.triton.config import PrefillConfig
from flexattn.kernels.triton.source import render_combine
from flexattn.measure.task import Task
from flexattn.mods import bind
from flexattn.mods.bind import clear, stats
from flexattn.problem import Captures
from flexattn.records.record import Policy
from flexattn.runtime.build import compile_source
from flexattn.runtime.kernel_store import KernelStore, binary_of
from flexattn.settings import override
from tests.problems import choices, problem

pytestmark = pytest.mark.oldest
STRUCTURE = problem("decode", 64).structure
POLICY = Policy(graph=False, cold_l2=True, rounds=4, min_ms=1.0)


def task(device, **wanted):
    found = problem(D=64, lse=False, **wanted)
    score, mask = (bind(wanted.get(f"{kind}_mod"), kind) for kind in ("score", "mask"))
    return Task("test", found, device, POLICY, 0.125, score, mask)


@pytest.fixture
def quiet(tmp_path):
    """No record of this machine decides what is compiled."""
    with override(cache_dir=tmp_path / "cache"):
        yield tmp_path / "out"


@pytest.mark.parametrize("name", ["nvidia-h200", "nvidia-a100"])
def test_everything_that_dispatch_will_ask_for_is_there(name, quiet):
    device, cap = named(name), softcap(30.0)
    tasks = [
        task(device, score_mod=cap, mask_mod=causal),
        task(device, kind="decode", score_mod=cap),
    ]
    found = export(
        tasks, device, quiet, mods=[(cap, "score"), (causal, "mask")], outputs=[(True, False)]
    )
    # Prefill, decode, and what merges decode's splits.
    assert (found.kernels, found.block_masks, found.mods, found.traced) == (3, 1, 2, ())
    store = KernelStore(quiet)
    for each in tasks:
        structure = each.problem.structure
        asked = problem(
            structure.kind, 64, score_mod=cap, mask_mod=causal if structure.mask else None
        )
        choice = next(choices(asked, device, NONE))
        for source in filter(None, (choice.source, choice.combine)):
            binary = store.binary(source, device)
            assert binary is not None and binary.name == source.entry
            described = [a for a in source.arguments if a.type[0] == "t"]
            assert binary.parameters == len(source.arguments) + 8 * len(described) + 2
            assert len(binary.maps) == len(described)
    captures = Captures(bind(causal, "mask").mod, ())
    assert store.binary(render_block_mask(captures, 128, 128, device), device) is not None
    clear()
    with override(binaries=quiet):
        assert bind(softcap(30.0), "score").mod == tasks[0].score.mod
    assert stats().traces == 0


def test_both_kinds_of_calls_by_default_and_nothing_twice(quiet):
    device = named("nvidia-h200")
    found = export([task(device)] * 2, device, quiet)
    assert (found.kernels, found.block_masks, found.mods) == (2, 0, 0)
    assert len(list((quiet / "kernels").iterdir())) == 2


def test_what_finds_keys_too_far_to_count_is_there_too(quiet):
    device = named("nvidia-h200")
    wanted = task(device, score_mod=alibi(32, "cpu"))
    assert export([wanted], device, quiet, outputs=[(False, False)]).kernels == 3
    for render in (render_norms, render_window):
        assert (
            KernelStore(quiet).binary(render(wanted.problem.structure, device), device) is not None
        )


def test_what_a_short_prompt_is_served_by_takes_no_long_ones_place(quiet):
    """Of what was exported the first candidate serves: Triton's kernel alone would have."""
    device = named("nvidia-h200")
    short, long = (task(device, q_len=keys, kv_len=keys) for keys in (256, 8192))
    served = next(choices(short.problem, device, NONE)).config
    assert isinstance(served, PrefillConfig)
    assert export([short], device, quiet, outputs=[(False, False)]).kernels == 2
    with override(binaries=quiet):
        kernels = [next(choices(t.problem, device, NONE, stored=True)) for t in (short, long)]
    assert [type(each.config) for each in kernels] == [PrefillConfig, HopperPrefillConfig]


def test_a_mod_that_nobody_else_can_recognise_is_named(quiet):
    state = {1, 2}

    def odd(score, b, h, q_idx, kv_idx):
        return score + len(state)

    found = export([], named("nvidia-h200"), quiet, mods=[(odd, "score")])
    assert (found.mods, found.traced) == (0, ("odd",))


def test_amd_is_refused_with_what_to_do(quiet):
    device = named("amd-mi300x")
    assert binary_of(compile_source(render_combine(STRUCTURE, device), device), "gfx942") is None
    with pytest.raises(UnsupportedError, match="without binaries"):
        export([], device, quiet)
    assert not quiet.exists()
