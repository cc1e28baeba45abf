"""Eight bits where templates are interpreted: Hopper's is not, so plain torch computes."""

import torch

import flexattn
from tests.support import inputs


def test_nothing_interprets_the_template():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in inputs(1, 2, 2, 7, 9, 16))
    found = flexattn.explain(q, k, v)
    assert found.route == "reference" and "Hopper" in found.why
    assert flexattn.flex_attention(q, k, v).dtype == torch.bfloat16
