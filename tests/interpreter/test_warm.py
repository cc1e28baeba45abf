"""warm() in the interpreter: it finds every kernel of a workload."""

import random

import pytest
import torch

import flexattn
from flexattn.catalogue.scores import alibi, softcap
from flexattn.errors import InputError
from flexattn.runtime.build import builder
from tests.support import inputs, run

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


def test_traffic_of_random_lengths_builds_renders_and_traces_nothing(work):
    """What a length decides besides: decode or prefill, a tile's height, whether blocks join."""
    dilated = {"mod": "flexattn.catalogue:dilated_window", "args": [1200, 600]}
    calls = [
        {"name": "prefill", "mask": dilated, "q_len": 700},
        {"name": "decode", "mixes": [[1, 1, 70]]},
    ]
    flexattn.warm({"layers": [{**LAYER, "calls": calls}], "dtype": "float32"}, "cpu")
    draw = random.Random(0)

    def attend(L, S):
        q, k, v = inputs(draw.choice([1, 3]), 6, 2, L, S)
        mask = None
        if L > 1:
            mod = flexattn.catalogue.dilated_window(1200, 600)
            mask = flexattn.create_block_mask(mod, None, None, L, S, "cpu")
        flexattn.flex_attention(q, k, v, softcap(17.0), mask, enable_gqa=True)

    def traffic():
        for _ in range(20):
            length = round(2 ** draw.uniform(0, 10))
            attend(length, length)
            attend(1, length)
            attend(min(length, draw.randrange(1, 130)), length)

    # The host classifies blocks for warm() here; on a GPU that is the kernel of this call.
    attend(40, 40)
    assert work.of(traffic) == (0, 0, 0)


def test_a_workload_that_cannot_be_read():
    with pytest.raises(InputError, match="heads"):
        flexattn.warm({"layers": [{**LAYER, "heads": [3, 2]}]}, "cpu")


def test_what_is_differentiated_has_its_forward_with_lse_and_its_gradients(monkeypatch):
    """All but the small kernels of delta is there when a training begins."""
    call = {"mask": "flexattn.catalogue:causal", "mixes": [[1, 17, 21]], "backward": True}
    score = {"mod": "flexattn.catalogue.scores:softcap", "args": [13.25]}
    layer = {"heads": [2, 1], "head_dim": 16, "block_size": 16, "score": score, "calls": [call]}
    flexattn.warm({"layers": [layer], "dtype": "float32"}, "cpu")
    built, build = [], type(builder())._build

    def noted(self, source, *rest):
        built.append(source.text.partition(" ")[2])
        return build(self, source, *rest)

    monkeypatch.setattr(type(builder()), "_build", noted)
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 1, 17, 21))
    mask = flexattn.create_block_mask(flexattn.catalogue.causal, None, None, 17, 21, "cpu", 16)
    flexattn.flex_attention(q, k, v, softcap(13.25), mask, enable_gqa=True).sum().backward()
    assert all(text.startswith("delta") for text in built), built
