"""The template for tensor memory on a GPU that has it: the catalogue, lengths, head dimensions."""

import pytest
import torch

import flexattn
from flexattn.catalogue import causal, sliding_window
from tests.cases import CASES
from tests.serving import assert_right, batch, plan_for, poisoned_pages
from tests.support import DTYPES, assert_accurate, block_mask, inputs

BLACKWELL = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (10, 11)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(not BLACKWELL, reason="the template needs tensor memory"),
]
GLUON = {"BACKEND": "GLUON"}


def tensors(*sizes, dtype=torch.bfloat16):
    return inputs(*sizes, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("entry", CASES, ids=str)
def test_every_case(entry, dtype):
    B, Hq, Hkv, L, S, D = 2, 8, 2, 611, 747, 128
    built = entry.make(B, Hq, Hkv, L, S, device="cuda", dtype=DTYPES[dtype])
    q, k, v = tensors(B, Hq, Hkv, L, S, D, dtype=DTYPES[dtype])
    mask = block_mask(built.mask_mod, q, k)
    call = {"score_mod": built.score_mod, "block_mask": mask, "kernel_options": GLUON}
    assert flexattn.explain(q, k, v, enable_gqa=True, **call).config.language == "gluon"
    assert_accurate(q, k, v, **call)


@pytest.mark.parametrize("lengths", [(1, 1), (17, 4099), (4099, 17), (129, 128), (1000, 1000)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_lengths_and_head_dimensions(dims, lengths):
    q, k, v = tensors(2, 6, 3, *lengths, *dims)
    for mask_mod in (None, causal, sliding_window(100)):
        mask = block_mask(mask_mod, q, k)
        assert_accurate(q, k, v, block_mask=mask, kernel_options=GLUON)


@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_prefills_of_a_plan(dims, page):
    """Chunks, whole prompts and decodes in one batch, whose pages hold NaN behind their keys."""
    q_lens, kv_lens = [1, 300, 129, 17, 0, 3], [900, 300, 1031, 17, 12, 3]
    each = batch(q_lens, kv_lens, 8, 2, *dims, dtype=torch.bfloat16, device="cuda")
    cache, table = poisoned_pages(each, page)
    ends = each.numbers([0, *torch.tensor(q_lens).cumsum(0).tolist()])
    given = {"seq_lens": each.numbers(kv_lens), "block_table": table, "cu_seqlens_q": ends}
    for mask_mod in (None, causal, sliding_window(100)):
        plan = plan_for(each, page=page, ragged=True, mask_mod=mask_mod, kernel_options=GLUON)
        assert plan.prefill_config is not None
        assert_right(plan.run(each.q, cache, **given), each, mask_mod=mask_mod)
