"""Kernels of trees and of evicted caches for an H200 without one: they fit, and spill little."""

import pytest
import torch

from flexattn.catalogue import alibi, sliding_window
from flexattn.device import named
from flexattn.kernels.paged_decode.merges import render_merge_tree
from flexattn.kernels.paged_decode.source import render_serving, render_serving_combine
from flexattn.runtime.build import compile_source
from flexattn.runtime.kernel_store import binary_of
from flexattn.runtime.resources import loop_spills, resources, spills_too_much
from flexattn.serving import KeptKeys
from flexattn.serving.tree import Places, from_first, placed_mask, placed_score
from tests.compile.shares import share
from tests.problems import plan_of, serving_candidates

pytestmark = pytest.mark.oldest
DEVICE = named("nvidia-h200")
BF16 = torch.bfloat16


def numbers(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def form(score=None, mask=None, *, keys=2**20, **options):
    return plan_of(keys=keys, score=score, mask=mask, lse=True, **options).structure


PLACES = Places(numbers(256), numbers(63), numbers(64), 1)
SHARED = {"B": 63, "total_q": 256}
KEPT = KeptKeys(batch=64, keys=4096, page=16, device="cpu")
BY_HEAD = KeptKeys(batch=64, keys=4096, heads=(32, 8), device="cpu")
WINDOW, ALIBI = sliding_window(1024), alibi(32, "cpu")
FORMS = {
    "own keys": form(mask=from_first(numbers(64), None)),
    "own keys, window": form(ALIBI, from_first(numbers(64), WINDOW), sinks=True),
    "shared keys": form(mask=from_first(numbers(63), None), **SHARED),
    "shared keys, mods": form(
        placed_score(PLACES, ALIBI), from_first(numbers(63), placed_mask(PLACES, WINDOW)), **SHARED
    ),
    "shared keys, eight bits": form(
        mask=from_first(numbers(63), None), kv=torch.float8_e4m3fn, scaled=True, **SHARED
    ),
    "evicted pages": form(KEPT.score(ALIBI), KEPT.mask(WINDOW)),
    "evicted keys of each head": form(BY_HEAD.score(ALIBI), BY_HEAD.mask(WINDOW)),
}


@pytest.mark.parametrize("name", share(FORMS, lambda name: name == "shared keys, mods"))
def test_the_default_config_of_what_is_new(name):
    wanted = FORMS[name]
    config = next(serving_candidates(wanted, DEVICE))
    source = render_serving(wanted, config, DEVICE, name)
    compiled = compile_source(source, DEVICE)
    assert not spills_too_much(*loop_spills(compiled.asm["cubin"]))
    assert resources(compiled, DEVICE).matrix_instructions > 0
    assert binary_of(compiled, "sm_90").parameters == len(source.arguments) + 2
    if config.merges_apart:
        compile_source(render_serving_combine(wanted, config, DEVICE), DEVICE)


MERGED = [(40, 4), (40, 1), (128, 1), (128, 4), (512, 4)]


@pytest.mark.parametrize(("D", "levels"), share(MERGED, lambda each: each == (40, 4)))
def test_the_kernel_that_ends_a_tree(D, levels):
    source = render_merge_tree("bfloat16", 32, D, levels, DEVICE)
    compiled = compile_source(source, DEVICE)
    assert resources(compiled, DEVICE).spills == 0
    assert binary_of(compiled, "sm_90").parameters == len(source.arguments) + 2


def test_a_kernel_is_of_no_length():
    """A million keys take what 8k take, but for a batch-invariant workspace."""
    assert form(keys=2**20) == form(keys=8192)
