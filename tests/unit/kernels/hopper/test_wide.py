"""Head dimensions above 256: what they are served with, and their pipeline in plain Python."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue import alibi, causal, sliding_window, softcap
from flexattn.device import named
from flexattn.kernels.choose.defaults import default, space
from flexattn.kernels.hopper.merge_consumers import REGISTERS
from flexattn.reference import Precision, attention
from tests.emulated_prefill import attend, listed
from tests.families import gluon_refused
from tests.problems import problem
from tests.support import inputs

H200 = replace(named("nvidia-h200"), num_sms=3)
NUMBERS = torch.arange(400) // 90


def documents(b, h, q_idx, kv_idx):
    return NUMBERS[q_idx] == NUMBERS[kv_idx]


def holes(b, h, q_idx, kv_idx):
    return ((q_idx // 128 + kv_idx // 128) % 2 == 0) & (q_idx >= 70)


def emulated(config, q, k, v, score_mod=None, mask_mod=None):
    """(out, lse) of a kernel in bfloat16 that computes exactly, and of float64."""
    # Small enough for full blocks, but for lists.
    block = 128 if mask_mod is holes else 64
    mask, lists = listed(mask_mod, q, k, block)
    wanted = problem(
        D=q.shape[3], Dv=v.shape[3], score_mod=score_mod, mask_mod=mask_mod, block=(block, block),
        runs=lists is not None and lists.runs is not None,
    )  # fmt: skip
    got = attend(wanted, H200, config, lists, q, k, v, 0.1, score_mod, mask_mod)
    exact = attention(
        q, k, v, score_mod=score_mod, block_mask=mask, scale=0.1, precision=Precision.ORACLE
    )
    return got[:2], exact[:2]


FORMS = {
    "default": {},
    "at once": {"lazy_rescale": False},
    "two stages": {"BLOCK_N": 32, "num_stages": 2, "k_parts": 1, "lazy_rescale": False},
    "halves": {"k_parts": 2, "tile_scheduler": "static"},
    "whole": {"k_parts": 1, "tile_scheduler": "dynamic", "order": "heads"},
    "packed": {"pack_gqa": True},
}
MASKS = {
    "full": {},
    "causal": {"mask_mod": causal},
    "window": {"mask_mod": sliding_window(90)},
    "documents": {"mask_mod": and_masks(documents, causal)},
    "lists": {"mask_mod": holes},
}
# What a lazy softmax computes of scores is assembly, which is not run here.
MODS = {
    "alibi": {"score_mod": alibi(4, "cpu"), "mask_mod": causal},
    "softcap": {"score_mod": softcap(20.0)},
}
CASES = [
    *(("default", mask, (512, 512)) for mask in MASKS),
    *(("at once", mods, (512, 512)) for mods in ("full", "causal", *MODS)),
    *((form, mask, (512, 512)) for form in ("two stages", "halves", "whole", "packed")
      for mask in ("full", "lists")),
    ("default", "causal", (320, 320)),
    ("whole", "full", (448, 384)),
    ("default", "window", (384, 128)),
    ("default", "causal", (576, 512)),
]  # fmt: skip


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("form", "mods", "dims"), CASES)
def test_numbers(form, mods, dims):
    given = inputs(1, 4, 2, 211, 301, *dims)
    (out, lse), (exact, exact_lse) = emulated(FORMS[form], *given, **(MASKS | MODS)[mods])
    # The output alone is rounded.
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mods", MASKS)
@pytest.mark.parametrize("dims", [(512, 512), (320, 448), (512, 256), (384, 128)])
def test_the_static_default(dims, mods):
    """A block has at most 256 columns of the output, and K's copies arrive one by one."""
    D, Dv = dims
    wanted = problem(D=D, Dv=Dv, **MASKS[mods])
    config = default(wanted, H200, "gluon")
    assert (default(wanted, H200) == config) is (dims == (512, 512))
    assert config.v_parts == 1 + (Dv > 256)
    assert (config.k_parts, config.num_stages) == ({512: 4, 320: 5, 384: 3}[D], 1)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"D": 640, "Dv": 512}, "no head dimensions of 640 and 512"),
        ({"D": 488, "Dv": 512}, "of 64 from 320 to 576"),
        ({"D": 512, "Dv": 64}, "head dimension 64 of V is below 128"),
        ({"D": 256, "Dv": 512}, "head dimension 512 is not one of"),
        ({"D": 512, "dtype": "float8_e4m3fn"}, "are in 16 bits"),
        ({"D": 512, "dtype": "float32"}, "multiplies float16"),
    ],
    ids=str,
)
def test_what_another_template_serves(about, said):
    assert said in gluon_refused(problem(**about), H200)


def test_what_a_search_tries():
    found = [each for each in space(problem(D=512), H200) if each.language == "gluon"]
    forms = {(each.consumers, each.BLOCK_N, each.num_stages, each.k_parts) for each in found}
    assert forms >= {(2, 64, 1, 4), (2, 32, 2, 1), (1, 64, 1, 4), (1, 32, 2, 1)}
    assert {each.v_parts for each in found} == {2}
    # A block starts with multiples of 8; consumers wait for ever for more.
    for each in found:
        groups = each.consumers + 1
        started = REGISTERS // (128 * groups) // 8 * 8 * groups
        assert each.consumers * each.consumer_regs + each.producer_regs <= started
    assert {each.lazy_rescale for each in found} == {False, True}


def test_blocks_of_fewer_rows_than_a_tile_has_are_tritons():
    """A single consumer would serve them, which was not raced, nor held to a gate with a mask."""
    for block, language in ((128, "gluon"), (64, "triton")):
        wanted = problem(D=512, Dv=512, mask_mod=holes, block=(block, block))
        assert default(wanted, H200).language == language
