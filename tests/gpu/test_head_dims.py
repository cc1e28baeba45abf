"""Head dimensions that are multiples of 8, and wide ones, by Hopper's own template on a GPU."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

import flexattn
from flexattn.catalogue import alibi, causal, document, relative_bias, sliding_window, softcap
from flexattn.device import detect
from flexattn.frontend.call import make_call
from flexattn.frontend.plan import plan
from flexattn.kernels.choose.defaults import reasons
from flexattn.kernels.choose.options import Options
from flexattn.reference import Reference
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.launch import prepare_launch
from tests import support
from tests.support import ON_SM_90, assert_judged, block_mask, heads_inside, run, tensors

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    ON_SM_90,
]
GLUON = {"BACKEND": "GLUON"}
DIMS = (16, 40, 48, 56, 72, 80, 88, 104, 112, 120, 136, 160, 176, 192, 200, 224, 240, 248)
PAIRS = ((192, 120), (72, 128), (40, 256), (200, 64), (256, 72), (80, 16))
WIDE = (320, 384, 448, 512)
WIDE_PAIRS = ((512, 256), (320, 128), (384, 512), (576, 512))


def assert_accurate(q, k, v, **call):
    """As support's, without max_scores: asked for, they turn lazy_rescale off."""
    return support.assert_accurate(q, k, v, max_scores=False, kernel_options=GLUON, **call)


@pytest.mark.parametrize(("D", "Dv"), [*((D, D) for D in DIMS + WIDE), *PAIRS, *WIDE_PAIRS])
def test_every_multiple(D, Dv):
    """Grouped heads, lengths that cut tiles, both dtypes, with and without a mask."""
    for dtype, mask_mod in ((torch.bfloat16, None), (torch.float16, causal)):
        q, k, v = tensors(2, 6, 2, 301, 419, D, Dv, dtype=dtype)
        mask = block_mask(mask_mod, q, k)
        found = flexattn.explain(
            q, k, v, enable_gqa=True, block_mask=mask, kernel_options=GLUON
        ).config
        assert found.language == "gluon" and (found.v_box or found.k_parts > 1)
        assert_accurate(q, k, v, block_mask=mask)


@pytest.mark.parametrize("D", [40, 72, 80, 112, 160, 224, 320])
@pytest.mark.parametrize("heads", ["outside", "inside"])
def test_columns_beside_a_head_are_not_read_and_not_written(D, heads):
    """Boxes are wider than a head: what lies behind it in memory is NaN, or another head's."""
    given = []
    for x in tensors(2, 4, 2, 197, 331, D):
        if heads == "inside":
            given.append(heads_inside(x))
            continue
        wide = x.new_full((*x.shape[:-1], D + 8), torch.nan)
        wide[..., :D] = x
        given.append(wide[..., :D])
    assert_accurate(*given)
    assert_accurate(*given, block_mask=block_mask(causal, *given[:2]))


@pytest.mark.parametrize("lengths", [(1, 1), (17, 2051), (2051, 17), (129, 128), (64, 1)], ids=str)
@pytest.mark.parametrize("D", [48, 80, 192, 512])
def test_lengths_far_apart(D, lengths):
    q, k, v = tensors(1, 6, 3, *lengths, D)
    for mask_mod in (None, causal, sliding_window(100)):
        assert_accurate(q, k, v, block_mask=block_mask(mask_mod, q, k))


@pytest.mark.parametrize("D", [40, 80, 160, 512])
@pytest.mark.parametrize("mods", ["softcap", "alibi", "relative", "documents", "window", "lists"])
def test_mods(D, mods):
    q, k, v = tensors(2, 4, 2, 611, 747, D)
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
    assert_accurate(q, k, v, score_mod=score_mod, block_mask=block_mask(mask_mod, q, k))


@pytest.mark.parametrize("D", [56, 112, 208, 512])
def test_every_result(D):
    """Maxima, log-sum-exps and sinks beside the output."""
    q, k, v = tensors(2, 4, 2, 301, 419, D, dtype=torch.float16)
    support.assert_accurate(q, k, v, kernel_options=GLUON)
    sinks = support.sinks(4, device="cuda")
    assert_accurate(q, k, v, sinks=sinks, block_mask=block_mask(causal, q, k))


TURNED = (
    {},
    {"consumers": 1, "consumer_regs": 240},
    {"BLOCK_N": 64, "num_stages": 3},
    {"q_in_regs": 128, "BLOCK_N": 64},
    {"tile_scheduler": "grid"},
    {"tile_scheduler": "static", "cross_tile_pipeline": True},
    {"ping_pong": True, "cross_tile_pipeline": False},
    {"lazy_rescale": False},
    {"pack_gqa": True},
)


def forms(q, k, v, turned, mask_mod=None):
    """Hold a call to the oracle with each config that can run, and count them.

    turned: of a config, others.
    """
    mask = block_mask(mask_mod, q, k)
    made = plan(make_call(q, k, v, None, mask, None, True, True, GLUON, None))
    of, device, tried = made.launch.problem, detect(q.device), 0
    for config in turned(made.launch.choice.config, of.structure):
        if reasons(config, of.structure, device):
            continue
        launch = prepare_launch(
            of, device, q.device, dispatcher(), Options(exact=config), q, k, v, made.lists
        )
        found = Reference(*made._replace(launch=launch).run())
        assert_judged(found, q, k, v, block_mask=mask)
        tried += 1
    return tried


@pytest.mark.timeout(300)
@pytest.mark.parametrize("D", [72, 96, 112, 160, 224])
def test_every_box(D):
    """Boxes of 64 end inside of a swizzle's width: wgmma multiplies the first columns of the last.

    96 has tiles of its own as well.
    """

    def turned(start, structure):
        return (replace(start, v_box=box, **more) for box in (16, 32, 64) for more in TURNED)

    assert forms(*tensors(1, 4, 2, 301, 419, D), turned) >= 8


@pytest.mark.parametrize("D", [40, 80, 160, 512])
def test_bits_stay(D):
    """A tile that is read before it has arrived, or written while it is read, shows here."""
    q, k, v = tensors(2, 8, 2, 1117, 1301, D)
    mask = block_mask(causal, q, k)
    first = run(q, k, v, block_mask=mask, kernel_options=GLUON, max_scores=False)
    for _ in range(20):
        again = run(q, k, v, block_mask=mask, kernel_options=GLUON, max_scores=False)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)
