"""warm() in the interpreter: it finds every kernel of a workload."""

import pytest
import torch

import flexattn
from flexattn.catalogue.scores import alibi, softcap
from flexattn.errors import InputError
from flexattn.runtime.build import builder
from tests.support import inputs, run

pytestmark = pytest.mark.interpreter
LAYER = {
    "heads": [6, 2],
    "head_dim": 16,
    "score": {"mod": "flexattn.catalogue.scores:softcap", "args": [17.0]},
    "calls": [
        {"name": "prefill", "mask": "flexattn.catalogue:causal", "q_len": [70]},
        {"name": "decode", "mixes": [[2, 1, 70]]},
    ],
}


MODS = {
    "softcap": (LAYER["score"], softcap(17.0)),
    "alibi": ({"mod": "flexattn.catalogue.scores:alibi", "args": [6, "cpu"]}, alibi(6, "cpu")),
}


@pytest.mark.parametrize("name", MODS)
def test_a_call_after_warm_finds_its_kernel(name, monkeypatch):
    said, score_mod = MODS[name]
    flexattn.warm({"layers": [{**LAYER, "score": said}], "dtype": "float32"}, "cpu")

    def refused(*args):
        raise AssertionError("a call after warm() builds nothing")

    monkeypatch.setattr(type(builder()), "_build", refused)
    for L, S in ((70, 70), (1, 70)):
        q, k, v = inputs(2, 6, 2, L, S)
        mask = None
        if L > 1:
            mask = flexattn.create_block_mask(flexattn.catalogue.causal, None, None, L, S, "cpu")
        with torch.no_grad():
            flexattn.flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True)
    q, k, v = inputs(2, 6, 2, 1, 71)
    with pytest.raises(AssertionError, match="builds nothing"):
        run(q, k, v, score_mod=softcap(18.0))


def test_a_workload_that_cannot_be_read():
    with pytest.raises(InputError, match="heads"):
        flexattn.warm({"layers": [{**LAYER, "heads": [3, 2]}]}, "cpu")
