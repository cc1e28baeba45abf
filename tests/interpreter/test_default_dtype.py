"""Programs that set torch's default dtype: what kernels write in float32 is allocated so."""

import pytest
import torch

from flexattn.catalogue import alibi, causal
from flexattn.serving import ServingConfig, flex_decode
from tests.serving import assert_right, batch, plan_for, poisoned_pages, run
from tests.support import DECODE, PREFILL, assert_accurate, block_mask, inputs


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default(request):
    """Kernels stored twice the bytes of a bfloat16 lse, past its end."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


def test_attention(default):
    q, k, v = (x.float() for x in inputs(1, 2, 1, 7, 90))
    mask = block_mask(causal, q, k)
    slopes = alibi(2, "cpu")
    for options in (PREFILL, DECODE | {"SPLIT_KV": 4}):
        for more in ({}, {"score_mod": slopes, "block_mask": mask}):
            got = assert_accurate(q, k, v, kernel_options=options, **more)
            assert {x.dtype for x in got} == {torch.float32}


def test_serving(default):
    each = batch([1] * 3, [60, 3, 17], 2, 1)
    config = ServingConfig(16, 16, 4, 2)
    assert_right(run(plan_for(each, config=config), each), each)
    pages, table = poisoned_pages(each, 4)
    got = flex_decode(
        each.q[:, None], pages, seq_lens=each.numbers([60, 3, 17]), block_table=table,
        return_lse=True,
    )  # fmt: skip
    assert_right([x.flatten(0, 1) for x in got], each)
