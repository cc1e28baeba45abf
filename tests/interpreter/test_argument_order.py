"""Kernels whose arguments were put into another order compute what they did before."""

import random
import sys

import pytest
import torch

from flexattn.catalogue import alibi, causal
from flexattn.device import named
from flexattn.frontend.launch_cache import launch_cache
from flexattn.kernels.base import source
from flexattn.kernels.choose.registry import families
from flexattn.runtime import build, dispatch
from flexattn.serving import ServingConfig
from flexattn.serving.launching import kept_plans
from tests.interpreter import (
    test_block_mask as block_masks,
    test_decay_skip,
    test_serving_calls as calls,
    test_serving_cascades as cascades,
    test_transpose_v,
)
from tests.support import KINDS, assert_accurate, block_mask, inputs, sinks


def clear():
    """Forget every kernel and launch, those that other tests made too."""
    for each in (dispatch.dispatcher(), build.builder()):
        each.clear()
    kept_plans.clear()
    launch_cache.clear()


@pytest.fixture
def orders(monkeypatch):
    """Templates print, and kernels have, their arguments in an order of chance."""
    make, draw, seen = source.make_source, random.Random(7), []
    # A family that is imported later would keep the order of chance.
    for kind in ("prefill", "decode"):
        families(kind, named("nvidia-h200"))

    def shuffled(template, device, header, context, found, *rest, **more):
        seen.append(template)
        return make(template, device, header, context, tuple(draw.sample(found, len(found))),
                    *rest, **more)  # fmt: skip

    for name, module in list(sys.modules.items()):
        if name.startswith("flexattn.") and getattr(module, "make_source", None) is make:
            monkeypatch.setattr(module, "make_source", shuffled)
    clear()
    yield seen
    clear()


def attention(kind):
    q, k, v = inputs(2, 4, 2, 41, 53)
    mask = block_mask(causal, q, k, 16)
    more = {"sinks": sinks(4)}
    assert_accurate(q, k, v, kernel_options=KINDS[kind], score_mod=alibi(4, "cpu"),
                    block_mask=mask, **more)  # fmt: skip


def cascade(config):
    found = cascades.case(41, config=config, prefix_config=cascades.LAUNCH, scaled=True,
                          dtype=torch.bfloat16, D=32)  # fmt: skip
    cascades.assert_right(found.run(), found.each)


LAST = ServingConfig(16, 16, 4, 2, 2, 1, "last")
CASES = {
    "prefill": (lambda: attention("prefill"), {"triton/prefill.py.jinja"}),
    "decode": (lambda: attention("decode"), {"triton/decode.py.jinja", "triton/combine.py.jinja"}),
    "decay_skip": (
        test_decay_skip.test_the_decay_window_of_each_head_by_hand,
        {"decay_skip/norms.py.jinja", "decay_skip/window.py.jinja"},
    ),
    "fp8": (
        lambda: test_transpose_v.test_any_strides("heads_last"), {"hopper/transpose_v.py.jinja"}
    ),
    "block mask": (
        lambda: block_masks.test_every_mask("document"), {"block_mask/block_mask.py.jinja"}
    ),
    "merge": (
        lambda: calls.test_states_merge(40, torch.float32), {"paged_decode/merge_states.py.jinja"}
    ),
    "serving": (
        lambda: cascade(cascades.LAUNCH),
        {
            "paged_decode/program.py.jinja", "paged_decode/combine.py.jinja",
            "paged_decode/join.py.jinja",
        },
    ),
    "serving last": (lambda: cascade(LAST), {"paged_decode/program.py.jinja"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_results_are_the_same(name, orders):
    """Once two strides that had changed places in the list were filled into each other."""
    check, templates = CASES[name]
    check()
    assert templates <= set(orders)
