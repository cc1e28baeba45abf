"""Orders of the tiles, and loads before or after the scores: configs that no option can force."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

from flexattn.catalogue import sliding_window
from flexattn.frontend.call import make_call
from flexattn.frontend.plan import plan
from flexattn.kernels.choose.options import Options
from flexattn.kernels.triton.config import ORDERS
from flexattn.reference import Reference
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.launch import prepare_launch
from tests.support import KINDS, assert_judged, block_mask, inputs


def check(q, k, v, kind, score_mod=None, mask=None, **fields):
    """Run the default config with some fields changed, and hold it to the oracle."""
    aux = AuxRequest(lse=True, max_scores=True)
    with torch.no_grad():
        usual = plan(make_call(q, k, v, score_mod, mask, None, True, False, KINDS[kind], aux))
        launch, call = usual.launch, usual.call
        config = replace(launch.choice.config, **fields)
        changed = prepare_launch(
            launch.problem, launch.choice.device, q.device, dispatcher(), Options(exact=config),
            q, k, v, usual.lists,
        )  # fmt: skip
        assert changed.choice.config == config != launch.choice.config
        rest = changed.rest_of(usual.lists, call.score, usual.call.mask)
        got = changed.run(q, k, v, call.scale, rest)
        assert_judged(Reference(*got), q, k, v, score_mod=score_mod, block_mask=mask)


@pytest.mark.parametrize("order", [order for order in ORDERS if order != "last"])
@pytest.mark.parametrize("block", [None, (40, 24)], ids=str)
def test_every_order_covers_every_tile(order, block):
    """Two batches, two groups of heads, three tiles of each, blocks that tiles do not divide."""
    q, k, v = inputs(2, 6, 2, 41, 27)
    mask = None if block is None else block_mask(sliding_window(9), q, k, block, False, False)
    check(q, k, v, "prefill", mask=mask, order=order, BLOCK_M=16, BLOCK_N=16)
