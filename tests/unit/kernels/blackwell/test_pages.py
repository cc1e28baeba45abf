"""Rows of requests and keys in pages: Blackwell's kernel in plain Python."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flexattn.catalogue import alibi, sliding_window, softcap
from flexattn.catalogue.cases import CASES, Setup
from flexattn.device import named
from flexattn.kernels.blackwell.config import BlackwellPrefillConfig
from flexattn.kernels.blackwell.family import PREFILL
from flexattn.kernels.choose.registry import by_language
from tests.emulated_blackwell import run
from tests.emulated_ragged import emulated, holes, prefix, tilted
from tests.families import violated
from tests.problems import plan_of

B200 = replace(named("nvidia-b200"), num_sms=3)
TWO, ONE = BlackwellPrefillConfig(128, 2), BlackwellPrefillConfig(64, 3, q_tiles=1)


def check(config, *given, **more):
    more = {"heads": (2, 1), "dims": (64, 64), **more}
    got, wanted = emulated(config, B200, *given, **more, run=run)
    for each, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(each, right, atol=3e-5, rtol=3e-5)


BATCHES = {
    16: (ONE, [130, 1], [170, 45]),
    32: (TWO, [40, 0, 70], [40, 90, 129]),
    64: (TWO, [280], [280]),
    256: (TWO, [3, 130], [300, 260]),
}


@pytest.mark.parametrize("page", BATCHES)
def test_pages(page):
    """Whole and partial tiles of rows, over pages of less than a tile of keys and of more."""
    check(*BATCHES[page][:1], page, *BATCHES[page][1:], seed=page)


ASKED = {
    "no mask": (TWO, {"mask_mod": None}),
    "prefix by request": (ONE, {"mask_mod": prefix}),
    "score by request": (ONE, {"score_mod": tilted, "mask_mod": sliding_window(50)}),
    "some of five heads": (
        replace(TWO, packed_heads=4),
        {"heads": (5, 1), "sinks": [i / 4 for i in range(5)], "score_mod": softcap(4.0)},
    ),
}
MORE = {
    "window": (TWO, {"mask_mod": sliding_window(90)}),
    "holes": (ONE, {"mask_mod": holes}),
    "alibi": (ONE, {"score_mod": alibi(2, "cpu")}),
    "sinks": (ONE, {"sinks": [0.5, 3.0], "mask_mod": sliding_window(64)}),
    "two groups": (replace(TWO, packed_heads=2), {"heads": (4, 2)}),
    "seven heads in a tile": (replace(TWO, packed_heads=8), {"heads": (14, 2)}),
    "128 columns": (TWO, {"dims": (128, 128)}),
    "192 and 128": (replace(TWO, BLOCK_N=64), {"dims": (192, 128)}),
    "256 columns": (replace(ONE, num_stages=2), {"dims": (256, 256)}),
}
EVERY = [*ASKED, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)]


@pytest.mark.parametrize("asked", EVERY)
def test_what_a_plan_asks(asked):
    """Masks and scores stand at positions in the request, and a mask's bounds end the loop."""
    config, more = (ASKED | MORE)[asked]
    check(config, 16, [70, 40, 3], [130, 170, 40], **more)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_catalogue(case):
    """Requests of as many queries as keys: what calls see."""
    built = case.build(Setup(2, 2, 1, 140, 140, "cpu", torch.float32, 0))
    more = {"score_mod": built.score_mod, "mask_mod": built.mask_mod}
    check(ONE, 64, [140, 140], [140, 140], **more)


def test_requests_of_equal_rows():
    check(TWO, 16, [70] * 2, [70, 129], uniform=True)


def test_no_keys_and_too_few():
    """A request without keys has zeros; of fewer keys than rows, rows begin at position 0."""
    more = {"heads": (2, 1), "dims": (64, 64), "run": run}
    (out, lse), wanted = emulated(ONE, B200, 32, [10, 70], [0, 40], **more)
    assert not out[:10].any() and np.isneginf(lse[:10]).all()
    np.testing.assert_allclose(out[10:], wanted[0][10:], atol=3e-5)


def asked_of(**more):
    return plan_of(2, total_q=900, keys=1024, heads=(8, 2), **more)


def test_heads_share_tiles_unless_a_mod_reads_them():
    for mod, heads in ((softcap(4.0), 4), (tilted, 1)):
        work = asked_of(score=mod)
        assert next(PREFILL.able(work, B200)).packed_heads == heads
    assert by_language("prefill", "gluon", B200) is PREFILL


REFUSED = {
    "mods of a head": {"score": alibi(8, "cpu"), "config": replace(TWO, packed_heads=2)},
    "pages of 8": {"page": 8},
    "a contiguous cache": {"page": 0},
    "batch-invariant rows": {"batch_invariant": True},
    "have scales": {"scaled": True},
    "packed_heads=3": {"config": replace(TWO, packed_heads=3)},
}


@pytest.mark.parametrize("lacking", REFUSED)
def test_what_the_template_has_not(lacking):
    asked = dict(REFUSED[lacking])
    config = asked.pop("config", TWO)
    form = asked_of(**asked).structure
    assert [rule.name for rule in violated(config, form, B200)] == ["serving"]
    assert lacking in " ".join(PREFILL.limits.reasons(config, form, B200))


def test_caches_of_eight_bits_are_refused():
    form = asked_of(kv=torch.float8_e4m3fn).structure
    assert [rule.name for rule in violated(TWO, form, B200)] == ["dtype"]
