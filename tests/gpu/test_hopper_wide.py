"""Head dimensions above 256 by Hopper's own template on a GPU."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

import flexattn
from flexattn.catalogue import alibi, causal, document, relative_bias, sliding_window, softcap
from flexattn.device import detect
from flexattn.frontend.admission import make_call
from flexattn.frontend.plan import plan
from flexattn.kernels.choose.defaults import reasons
from flexattn.kernels.choose.options import Options
from flexattn.reference import Reference
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.launch import prepare_launch
from tests import support
from tests.gradients import assert_gradients
from tests.support import assert_judged, block_mask, heads_inside, inputs, run

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(not HOPPER, reason="the Gluon template is Hopper's"),
]
GLUON = {"BACKEND": "GLUON"}
PAIRS = (
    (512, 512),
    (320, 320),
    (384, 384),
    (448, 448),
    (512, 256),
    (320, 128),
    (384, 512),
    (576, 512),
)


def tensors(*sizes, dtype=torch.bfloat16, **more):
    return inputs(*sizes, dtype=dtype, device="cuda", **more)


def assert_accurate(q, k, v, max_scores=False, **call):
    """As support's; max_scores, where asked for, turn lazy_rescale off."""
    return support.assert_accurate(q, k, v, max_scores=max_scores, kernel_options=GLUON, **call)


@pytest.mark.parametrize(("D", "Dv"), PAIRS)
def test_every_pair(D, Dv):
    """Grouped heads, lengths that cut tiles, both dtypes, with and without a mask."""
    for dtype, mask_mod in ((torch.bfloat16, None), (torch.float16, causal)):
        q, k, v = tensors(2, 6, 2, 301, 419, D, Dv, dtype=dtype)
        mask = block_mask(mask_mod, q, k)
        found = flexattn.explain(
            q, k, v, enable_gqa=True, block_mask=mask, kernel_options=GLUON
        ).config
        assert found.language == "gluon" and found.k_parts > 1
        assert_accurate(q, k, v, block_mask=mask)


@pytest.mark.parametrize("lengths", [(1, 1), (17, 2051), (2051, 17), (129, 128), (64, 1)], ids=str)
def test_lengths_far_apart(lengths):
    q, k, v = tensors(1, 6, 3, *lengths, 512)
    for mask_mod in (None, causal, sliding_window(100)):
        assert_accurate(q, k, v, block_mask=block_mask(mask_mod, q, k))


@pytest.mark.parametrize("mods", ["softcap", "alibi", "relative", "documents", "window", "lists"])
def test_mods(mods):
    q, k, v = tensors(2, 4, 2, 611, 747, 512)
    table = torch.randn(4, 2048, device="cuda", dtype=torch.bfloat16)
    numbers = (torch.arange(747, device="cuda") // 150).int()
    score_mod, mask_mod = {
        "softcap": (softcap(50.0), causal),
        "alibi": (alibi(4, "cuda"), None),
        "relative": (relative_bias(table, 1024), causal),
        "documents": (None, and_masks(document(numbers), causal)),
        "window": (softcap(30.0), sliding_window(100)),
        "lists": (None, lambda b, h, q_idx, kv_idx: (q_idx // 128 + kv_idx // 128) % 2 == 0),
    }[mods]
    q, k, v = (heads_inside(x) for x in (q, k, v))
    assert_accurate(q, k, v, score_mod=score_mod, block_mask=block_mask(mask_mod, q, k))


def test_every_result():
    """Maxima, log-sum-exps and sinks beside the output."""
    q, k, v = tensors(2, 4, 2, 301, 419, 512, dtype=torch.float16)
    assert_accurate(q, k, v, max_scores=True)
    sinks = support.sinks(4, device="cuda")
    assert_accurate(q, k, v, sinks=sinks, block_mask=block_mask(causal, q, k))


TURNED = (
    {},
    {"consumers": 1},
    {"BLOCK_N": 32, "num_stages": 2, "k_parts": 1},
    {"k_parts": 2},
    {"k_parts": 8},
    {"k_parts": 1},
    {"tile_scheduler": "grid"},
    {"tile_scheduler": "static", "order": "heads"},
    {"tile_scheduler": "dynamic", "order": "sections"},
    {"ping_pong": True},
    {"lazy_rescale": False},
    {"merge_consumers": False},
    {"pack_gqa": True},
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mask_mod", [None, causal], ids=["full", "causal"])
def test_every_form(mask_mod):
    q, k, v = tensors(2, 4, 2, 301, 419, 512)
    mask = block_mask(mask_mod, q, k)
    made = plan(make_call(q, k, v, None, mask, None, True, True, GLUON, None))
    structure, device = made.launch.problem.structure, detect(q.device)
    start, tried = made.launch.choice.config, 0
    for numbers in TURNED:
        config = replace(start, **numbers)
        if reasons(config, structure, device):
            continue
        launch = prepare_launch(
            made.launch.problem, device, q.device, dispatcher(), Options(exact=config),
            q, k, v, made.lists,
        )  # fmt: skip
        found = Reference(*made._replace(launch=launch).run())
        assert_judged(found, q, k, v, block_mask=mask)
        tried += 1
    assert tried >= 9


@pytest.mark.parametrize("mask_mod", [None, causal], ids=["full", "causal"])
def test_bits_stay(mask_mod):
    """A tile that is read before it has arrived, or written while it is read, shows here."""
    q, k, v = tensors(2, 8, 2, 1117, 1301, 512)
    mask = block_mask(mask_mod, q, k)
    first = run(q, k, v, block_mask=mask, kernel_options=GLUON, max_scores=False)
    for _ in range(20):
        again = run(q, k, v, block_mask=mask, kernel_options=GLUON, max_scores=False)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_gradients(dropout_p):
    """The forward leaves its log-sum-exps to a backward that another template serves."""
    q, k, v = tensors(1, 4, 2, 301, 301, 512)
    assert_gradients(q, k, v, mask_mod=causal, block=128, dropout_p=dropout_p)
