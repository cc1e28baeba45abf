"""Blackwell's prefill in plain Python: its numbers, its limits, and who asks for it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks

from flexattn import create_block_mask
from flexattn.catalogue import alibi, causal, sliding_window, softcap
from flexattn.catalogue.cases import CASES as CATALOGUE, Setup
from flexattn.device import named
from flexattn.errors import ConfigError
from flexattn.kernels.blackwell.config import BlackwellPrefillConfig
from flexattn.kernels.choose.defaults import candidates, default, space
from flexattn.kernels.choose.options import NONE, Options, parse
from flexattn.mods import bind
from flexattn.problem.mask_lists import mask_class
from flexattn.reference import Precision, attention
from flexattn.runtime.launch import Lists, prepare_launch
from tests.emulated_blackwell import OnTensorCore
from tests.families import gluon_refused, violated
from tests.problems import choices, problem
from tests.support import inputs, sinks

B200 = named("nvidia-b200")
TWO, ONE = BlackwellPrefillConfig(128, 2), BlackwellPrefillConfig(64, 3, q_tiles=1)
NUMBERS = torch.arange(600) // 90


def documents(b, h, q_idx, kv_idx):
    return NUMBERS[q_idx] == NUMBERS[kv_idx]


def holes(b, h, q_idx, kv_idx):
    return ((q_idx // 128 + kv_idx // 128) % 2 == 0) & (q_idx >= 70)


def own_block(b, h, q_idx, kv_idx):
    return q_idx // 128 == kv_idx // 128


def anything(b, h, q_idx, kv_idx):
    return q_idx == q_idx


def emulated(config, q, k, v, score_mod=None, mask_mod=None, scale=1.0, sink=None, blocks=None):
    """(out, lse, max_scores) of a kernel that computes in float32, and of float64.

    blocks: a mask_mod whose blocks are listed, though mask_mod keeps more.
    """
    q_len, kv_len = q.shape[2], k.shape[2]
    mask = mask_mod and create_block_mask(mask_mod, None, None, q_len, kv_len, "cpu", 128)
    if blocks is not None:
        listed = create_block_mask(blocks, None, None, q_len, kv_len, "cpu", 128)
        mask = BlockMask.from_kv_blocks(
            listed.kv_num_blocks, listed.kv_indices, listed.full_kv_num_blocks,
            listed.full_kv_indices, BLOCK_SIZE=128, mask_mod=mask_mod, seq_lengths=(q_len, kv_len),
        )  # fmt: skip
    if mask is not None:
        mask_class(mask)  # finds the runs that its lists may have
    lists = mask and Lists.of(mask)
    wanted = replace(
        problem(
            D=q.shape[3], Dv=v.shape[3], score_mod=score_mod, mask_mod=mask_mod,
            runs=lists is not None and lists.runs is not None,
            sinks="" if sink is None else "float32",
        ),
        B=q.shape[0], Hq=q.shape[1], Hkv=k.shape[1], q_len=q_len, kv_len=kv_len,
    )  # fmt: skip
    wanted = replace(wanted, structure=replace(wanted.structure, max_scores=True))
    choice = next(choices(wanted, B200, Options(exact=config)))
    kernel = OnTensorCore(choice.source)
    kernels = SimpleNamespace(choose=lambda *_: replace(choice, kernels=(kernel,)))
    launch = prepare_launch(wanted, B200, q.device, kernels, NONE, q, k, v, lists)
    rest = launch.rest_of(lists, bind(score_mod, "score"), bind(mask_mod, "mask"))
    got = launch.run(q, k, v, scale, rest, sink)
    exact = attention(
        q, k, v, score_mod=score_mod, block_mask=mask, scale=scale, sinks=sink,
        precision=Precision.ORACLE,
    )  # fmt: skip
    return got, exact


def assert_right(got, exact, error):
    for mine, theirs in zip(got, exact, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=error, atol=error)


FORMS = {"two": TWO, "one": ONE, "polynomial": replace(TWO, polynomial=4)}
MODS = {
    "full": {},
    "causal": {"mask_mod": causal},
    "window": {"mask_mod": sliding_window(90)},
    "documents": {"mask_mod": and_masks(documents, causal)},
    "lists": {"mask_mod": holes},
    "alibi": {"score_mod": alibi(2, "cpu"), "mask_mod": causal},
    "softcap": {"score_mod": softcap(20.0)},
}
CASES = [
    *(("two", mods, (64, 64)) for mods in MODS if mods != "lists"),
    *(("one", mods, (64, 64)) for mods in ("full", "lists", "window")),
    *(("polynomial", mods, (64, 64)) for mods in ("causal", "softcap")),
    ("two", "causal", (128, 128)),
    ("192", "causal", (192, 128)),
    ("256", "full", (256, 256)),
]  # fmt: skip
OF_DIMS = {"192": BlackwellPrefillConfig(64, 2), "256": BlackwellPrefillConfig(64, 2, q_tiles=1)}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("form", "mods", "dims"), CASES)
def test_numbers(form, mods, dims):
    """Scores of some 12 in base 2, so that maxima rise by more than what is left unscaled."""
    given = inputs(1, 2, 1, 281, 401, *dims)
    scale = 8 / dims[0] ** 0.5
    got, exact = emulated((FORMS | OF_DIMS)[form], *given, **MODS[mods], scale=scale)
    assert_right(got, exact, 2e-4 if form == "polynomial" else 1e-5)


@pytest.mark.usefixtures("poisoned")
def test_blocks_that_are_not_listed():
    """Two tiles of rows share their keys: each leaves out blocks of the other alone."""
    given = inputs(1, 1, 1, 256, 520, 64)
    got, exact = emulated(TWO, *given, mask_mod=anything, blocks=own_block, scale=0.1)
    assert_right(got, exact, 1e-5)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("mask_mod", [None, holes])
def test_sinks(mask_mod):
    given = inputs(1, 2, 2, 150, 140, 64)
    got, exact = emulated(ONE, *given, mask_mod=mask_mod, scale=0.1, sink=sinks(2))
    assert_right(got[:2], exact[:2], 1e-5)


@pytest.mark.parametrize("polynomial", [0, 4])
def test_nan_and_infinity_of_the_users_own(polynomial):
    """A polynomial computes numbers of NaN's bits: a row with one is all NaN."""
    q, k, v = inputs(1, 1, 1, 130, 129, 64)

    def mod(score, b, h, q_idx, kv_idx):
        score = torch.where((q_idx == 5) & (kv_idx == 8), torch.nan, score)
        return torch.where((q_idx == 7) & (kv_idx == 4), torch.inf, score)

    got, exact = emulated(replace(ONE, polynomial=polynomial), q, k, v, score_mod=mod, scale=0.1)
    for mine, theirs in zip(got, exact, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
    assert got.out[0, 0, 5].isnan().all() and got.out[0, 0, 7].isnan().all()


@pytest.mark.long
@pytest.mark.parametrize("case", CATALOGUE, ids=lambda case: case.name)
def test_the_catalogue(case):
    given = inputs(2, 4, 2, 140, 200, 64)
    built = case.build(Setup(2, 4, 2, 140, 200, "cpu", torch.float32, 0))
    got, exact = emulated(ONE, *given, built.score_mod, built.mask_mod, scale=0.125)
    assert_right(got[:2], exact[:2], 3e-5)


REFUSED = [
    ({"D": 256}, {"BLOCK_N": 64, "q_tiles": 2}, "tensor memory"),
    ({"D": 256}, {"BLOCK_N": 128, "q_tiles": 1}, "shared memory"),
    ({"D": 96}, {}, "head dimension"),
    ({"D": 128, "Dv": 192}, {}, "head dimension"),
    ({"dtype": "float32"}, {}, "dtype"),
    ({"kind": "decode"}, {}, "prefill"),
    ({"mask_mod": causal, "block": (64, 128), "runs": True}, {}, "mask block"),
    ({"mask_mod": causal}, {}, "mask block"),
    ({"mask_mod": causal, "block": (256, 96)}, {}, "mask block"),
    ({}, {"BLOCK_N": 256}, "keys"),
    ({}, {"num_stages": 9}, "stages"),
    ({}, {"q_tiles": 3}, "tiles of rows"),
    ({}, {"polynomial": 3}, "polynomial"),
]


@pytest.mark.parametrize(
    ("about", "config", "rule"), REFUSED, ids=[f"{i} {each[2]}" for i, each in enumerate(REFUSED)]
)
def test_limits(about, config, rule):
    found = violated(replace(TWO, **config), problem(**about).structure, B200)
    assert rule in [each.name for each in found]


@pytest.mark.parametrize("name", ["nvidia-h200", "nvidia-rtx-5090", "amd-mi300x"])
def test_chips_without_tensor_memory(name):
    found = violated(TWO, problem().structure, named(name))
    assert "arch" in [each.name for each in found]


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("mods", [{}, {"mask_mod": causal, "runs": True}, {"mask_mod": causal}])
def test_it_is_forced_and_never_chosen(dims, mods):
    wanted = problem(D=dims[0], Dv=dims[1], **mods)
    assert isinstance(default(wanted, B200, "gluon"), BlackwellPrefillConfig)
    assert all(each.language == "triton" for each in candidates(wanted, B200))
    assert not gluon_refused(wanted, B200)


def test_numbers_of_kernel_options():
    asked = parse({"BACKEND": "GLUON", "BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 3})
    found = next(choices(problem(), B200, asked)).config
    assert (found.BLOCK_M, found.BLOCK_N, found.num_stages) == (128, 64, 3)
    with pytest.raises(ConfigError, match="64"):
        parse({"BACKEND": "GLUON", "BLOCK_M": 96})


def test_a_search_does_not_measure_what_nobody_has_run():
    assert not any(each.language == "gluon" for each in space(problem(), B200))
