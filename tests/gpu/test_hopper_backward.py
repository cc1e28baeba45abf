"""Hopper's backward on a GPU, held to float64's gradients, in each of its forms."""

import pytest
import torch

import flexattn
from flexattn.catalogue import causal, sliding_window, softcap
from flexattn.device import detect
from flexattn.frontend import gradients
from flexattn.frontend.launch_cache import launch_cache
from flexattn.kernels.choose.options import Options
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig, at_sizes
from flexattn.kernels.ptx.assembler import bounds_views
from flexattn.kernels.triton_backward.config import BackwardConfig
from tests.gradients import assert_gradients, assert_memory
from tests.support import block_mask, inputs

GLUON = {"BACKEND": "GLUON"}
DOCUMENT = torch.arange(1024).div(230, rounding_mode="floor").int()


@pytest.fixture(autouse=True)
def hopper():
    if not detect(torch.device("cuda")).has_wgmma:
        pytest.skip("no wgmma")


def on_gpu(*sizes, dtype=torch.bfloat16, **more):
    return inputs(*sizes, device="cuda", dtype=dtype, **more)


def explained(q, k, v, mask_mod=None, make=None, kernel_options=None, block=128):
    mask = block_mask(mask_mod, q, k, block)
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    return flexattn.explain(
        *given, make and make(), mask, enable_gqa=True, kernel_options=kernel_options
    ).backward.config


def check(q, k, v, mask_mod=None, make=None, block=128, config=HopperBackwardConfig):
    served = explained(q, k, v, mask_mod, make, block=block)
    assert isinstance(served, config), served
    assert_gradients(q, k, v, mask_mod=mask_mod, make=make, block=block)
    return served


@pytest.fixture
def forced(monkeypatch):
    """Backwards have this config, in the form that their sizes allow."""

    def force(config):
        def options(given, problem, target):
            exact = at_sizes(config, problem)
            family_of(exact).grid(problem, exact, target)
            return Options(exact=exact)

        # What was prepared for the same facts had another config.
        launch_cache.clear()
        monkeypatch.setattr(gradients, "_options", options)

    yield force
    launch_cache.clear()


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask_mod", [None, causal], ids=["full", "causal"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=str)
def test_shapes(heads, mask_mod, D):
    for L, S in ((512, 512), (333, 401), (200, 640)):
        served = check(*on_gpu(2, *heads, L, S, D), mask_mod)
        assert served.mha == (heads[0] == heads[1])
        assert served.even_n == (S % served.BLOCK_N == 0)


FORMS = {
    "dk": {"pipelined": "dk", "remat": True},
    "shifted": {"remat": True, "shift_rows": True},
    "dq_tma": {"dq_tma": True},
    "dq_tma dk": {"dq_tma": True, "remat": True, "pipelined": "dk"},
    "deterministic": {"dq_tma": True, "deterministic": True, "remat": True},
    "deterministic dk": {
        "dq_tma": True,
        "deterministic": True,
        "remat": True,
        "pipelined": "dk",
    },
    "early": {"early_lse": "all"},
    "half early": {"early_lse": "half"},
    "two buffers": {"ds_stages": 2, "early_lse": "half"},
    "dq_tma two buffers": {"dq_tma": True, "ds_stages": 2, "early_lse": "all", "remat": True},
    "dq_tma halves": {"dq_tma": True, "dq_halves": True, "ds_stages": 2, "remat": True},
    "ds first": {"ds_first": True, "early_lse": "all", "remat": True},
    "halves ds first": {
        "dq_tma": True,
        "dq_halves": True,
        "ds_stages": 2,
        "ds_first": True,
        "early_lse": "half",
    },
    "dq_tma dk halves": {
        "dq_tma": True,
        "dq_halves": True,
        "ds_stages": 2,
        "pipelined": "dk",
    },
    "waves": {"dq_tma": True, "ds_stages": 2, "waves": 4},
    "trimmed": {"dq_tma": True, "ds_stages": 2, "early_lse": "half", "trimmed": True},
    "trimmed dk": {"pipelined": "dk", "remat": True, "trimmed": True},
    "persistent": {"dq_tma": True, "ds_stages": 2, "persistent": True, "remat": True},
    "persistent ds first": {
        "dq_tma": True,
        "ds_stages": 2,
        "persistent": True,
        "ds_first": True,
        "early_lse": "all",
        "remat": True,
    },
    "held": {
        "dq_tma": True,
        "ds_stages": 2,
        "persistent": True,
        "ds_first": True,
        "dp_rs": True,
        "early_lse": "half",
    },
    "by product": {"by_product": True},
    "by product early": {"by_product": True, "early_lse": "half"},
}
TILES = {64: ((128, 128, 2), (64, 128, 3)), 128: ((64, 128, 2),), 256: ((64, 64, 2),)}
# Shared memory has no room for a tile of dq of 256 columns; others' tiles are none of one product.
EVERY_FORM = [
    (D, name) for D in TILES for name, form in FORMS.items()
    if (D < 256 or "dq_tma" not in form) and (D == 256 or "by_product" not in form)
]  # fmt: skip


@pytest.mark.parametrize(("D", "name"), EVERY_FORM)
def test_forms(name, D, forced):
    for tile in TILES[D]:
        forced(HopperBackwardConfig(*tile, **FORMS[name]))
        check(*on_gpu(2, 2, 2, 520, 640, D), causal)
        check(*on_gpu(1, 4, 2, 333, 401, D), None)
        check(*on_gpu(1, 4, 2, 520, 640, D), MASKS["holes"])


WITHOUT_DROPOUT = {"dq_halves", "by_product", "persistent"}


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name", ["persistent", "persistent ds first"])
def test_a_block_takes_one_tile_of_keys_after_another(name, D, forced):
    """More tiles than SMs, of which `holes` leaves some without queries."""
    forced(HopperBackwardConfig(64, 128, 2, **FORMS[name]))
    check(*on_gpu(5, 8, 8, 520, 640, D), causal)
    check(*on_gpu(3, 16, 8, 333, 1401, D), None)
    check(*on_gpu(2, 16, 8, 520, 1281, D), MASKS["holes"])


DROPPING = [each for each in EVERY_FORM if not WITHOUT_DROPOUT & FORMS[each[1]].keys()]


@pytest.mark.parametrize(("D", "name"), [*((D, "plain") for D in TILES), *DROPPING])
def test_forms_drop_weights(name, D, forced):
    for rows, keys, stages in TILES[D]:
        form = FORMS.get(name, {"remat": True})
        # Beside dq_tma the third stage's hardware barrier is taken.
        stages = min(stages, 2) if "dq_tma" in form else stages
        forced(HopperBackwardConfig(rows, keys, stages, **form))
        assert_gradients(*on_gpu(2, 2, 2, 520, 640, D), dropout_p=0.3, mask_mod=causal, block=128)
        assert_gradients(*on_gpu(1, 4, 2, 333, 401, D), dropout_p=0.1)
        holes = MASKS["holes"]
        assert_gradients(*on_gpu(1, 4, 2, 520, 640, D), dropout_p=0.5, mask_mod=holes, block=128)


@pytest.mark.parametrize("D", [64, 128])
def test_dropout_and_sums_in_order_have_the_same_bits_in_every_run(D):
    q, k, v = (x.requires_grad_() for x in on_gpu(2, 8, 4, 2100, 2300, D))
    mask, options = block_mask(causal, q, k, 128), {"DETERMINISTIC": True}
    out = flexattn.flex_attention(
        q, k, v, None, mask, enable_gqa=True, kernel_options=options, dropout_p=0.2
    )
    first = torch.autograd.grad(out, (q, k, v), out.detach(), retain_graph=True)
    for _ in range(10):
        again = torch.autograd.grad(out, (q, k, v), out.detach(), retain_graph=True)
        assert all(map(torch.equal, again, first))


@pytest.mark.parametrize("name", ["early", "shifted"])
def test_scores_that_are_no_number_give_none(name, forced):
    """A maximum that takes the other operand made a number of them."""
    forced(HopperBackwardConfig(64, 128, 2, **FORMS[name]))
    q, k, v = (x.requires_grad_() for x in on_gpu(1, 2, 2, 200, 256, 128))
    with torch.no_grad():
        q[:, :, 70] = float("nan")
    dq, dk, dv = torch.autograd.grad(flexattn.flex_attention(q, k, v).sum(), (q, k, v))
    assert dq[:, :, 70].isnan().all() and dk.isnan().all() and dv.isnan().all()
    assert not dq[:, :, :70].isnan().any() and not dq[:, :, 71:].isnan().any()


@pytest.mark.parametrize(("D", "Dv"), [(40, 40), (96, 96), (112, 64), (160, 160), (192, 128)])
def test_tiles_wider_than_heads(D, Dv):
    """The copy engine reads zeros past a head's columns, and writes none of them."""
    check(*on_gpu(2, 4, 2, 333, 401, D, Dv=Dv), causal)
    check(*on_gpu(1, 2, 2, 200, 256, D, Dv=Dv), None)


NARROW = [
    *(((48, 40), TILES[64][0], name) for name in ("dq_tma halves", "persistent", "early")),
    *(((80, 80), TILES[128][0], name) for name in ("dq_tma halves", "deterministic", "early")),
    *(((160, 96), TILES[256][0], name) for name in ("by product", "dk")),
    *(((192, 128), TILES[128][0], name) for name in ("ds first", "early", "two buffers")),
    ((136, 64), TILES[128][0], "ds first"),
]


@pytest.mark.parametrize(("dims", "tile", "name"), NARROW, ids=str)
def test_forms_of_narrow_heads(dims, tile, name, forced):
    """Sums lie in a head's columns; above 128 of them tiles of 128 keys are a search's."""
    forced(HopperBackwardConfig(*tile, **FORMS[name]))
    for sizes, mask_mod in (
        ((2, 2, 2, 520, 640), causal),
        ((1, 4, 2, 333, 401), None),
        ((1, 4, 2, 520, 640), MASKS["holes"]),
    ):
        check(*on_gpu(*sizes, dims[0], Dv=dims[1]), mask_mod)


NO_VIEWS = pytest.mark.skipif(bounds_views(), reason="Triton refuses views of pieces")


@NO_VIEWS
@pytest.mark.parametrize("mask", [None, "causal", "window", "an offset", "far keys"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("dims", [(192, 192), (184, 120)], ids=str)
def test_tiles_of_96_keys(dims, stages, mask, forced):
    """Tiles lie in two blocks of a mask, and the last one ends with the keys."""
    forced(HopperBackwardConfig(64, 96, 2, ds_stages=stages, by_product=True))
    if mask is None:
        check(*on_gpu(2, 2, 2, 520, 672, dims[0], Dv=dims[1]))
    else:
        mask_mod = causal if mask == "causal" else MASKS[mask]
        check(*on_gpu(2, 4, 2, 520, 640, dims[0], Dv=dims[1]), mask_mod)


@NO_VIEWS
@pytest.mark.parametrize("mask_mod", [None, causal])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("dims", [(192, 192), (184, 120)], ids=str)
def test_lengths_of_tiles_of_96_keys(dims, stages, mask_mod, forced):
    forced(HopperBackwardConfig(64, 96, 2, ds_stages=stages, by_product=True))
    for lengths in ((1, 777), (64, 63), (129, 1030), (1030, 333)):
        check(*on_gpu(1, 4 if mask_mod is None else 2, 2, *lengths, dims[0], Dv=dims[1]), mask_mod)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_float16(D):
    check(*on_gpu(2, 4, 2, 333, 401, D, dtype=torch.float16), causal)
    check(*on_gpu(2, 2, 2, 300, 256, D, dtype=torch.float16), None)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(("L", "S"), [(1, 128), (1, 777), (777, 1), (64, 63), (129, 1030)])
def test_lengths(L, S, D):
    check(*on_gpu(1, 2, 1, L, S, D))
    check(*on_gpu(1, 2, 2, L, S, D), causal)


MASKS = {
    "window": sliding_window(100),
    "an offset": lambda b, h, q, k: q + 77 >= k,
    "far keys": lambda b, h, q, k: q >= k + 150,
    "by head": lambda b, h, q, k: (q >= k) & (q - k < 100 * (h + 1)),
    "holes": lambda b, h, q, k: ((q // 128 + k // 128) % 2 == 0) & (q > 70),
    "columns": lambda b, h, q, k: (k % 3 == 0) | (q == k),
}


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
def test_masks(name, D, heads):
    check(*on_gpu(2, *heads, 520, 640, D), MASKS[name])


@pytest.mark.parametrize("D", [64, 128, 256])
def test_documents(D):
    numbers = DOCUMENT.cuda()
    q, k, v = on_gpu(2, 4, 2, 700, 700, D)
    check(q, k, v, lambda b, h, q, k: (numbers[q] == numbers[k]) & (q >= k))


@pytest.mark.parametrize("by", ["all", "batch", "head"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_documents_whose_runs_are_trimmed(D, by, forced):
    """Of blocks in which one ends the mask keeps nothing in some tiles, here or in all heads."""
    numbers = torch.stack([DOCUMENT, ((torch.arange(1024) + 71) // 340).int()]).cuda()
    places = {"all": lambda b, h: 0, "batch": lambda b, h: b, "head": lambda b, h: h % 2}

    def mask_mod(b, h, q, k):
        which = places[by](b, h)
        return (numbers[which, q] == numbers[which, k]) & (q >= k)

    forms = [{"dq_tma": D < 256, "waves": 4}, {"pipelined": "dk"}]
    if D < 256:
        forms.append({"dq_tma": True, "ds_stages": 2, "persistent": True})
    for form in forms:
        keys = 64 if D == 256 else 128
        forced(HopperBackwardConfig(64, keys, 2, trimmed=True, remat=True, **form))
        check(*on_gpu(2, 4, 4, 700, 700, D), mask_mod)
        check(*on_gpu(2, 4, 2, 700, 650, D), mask_mod)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("mask_mod", [None, causal], ids=["full", "causal"])
def test_score_mods(mask_mod, heads, D):
    slopes = torch.exp2(-torch.arange(1.0, heads[0] + 1)).cuda()
    cap = softcap(5.0)
    check(*on_gpu(2, *heads, 400, 390, D), mask_mod, lambda: cap)
    check(
        *on_gpu(1, *heads, 400, 512, D), mask_mod,
        lambda: lambda s, b, h, q, k: s + slopes[h] * (k - q),
    )  # fmt: skip


@pytest.mark.parametrize("D", [64, 128, 256])
def test_keys_of_one_batch(D):
    check(*on_gpu(3, 4, 2, 300, 400, D, Bkv=1), causal)


def test_blocks_of_a_mask():
    q, k, v = on_gpu(1, 2, 2, 700, 700, 128)
    for block in (128, 256, (64, 128), (128, 384)):
        check(q, k, v, causal, block=block)
    check(q, k, v, causal, block=64, config=BackwardConfig)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_mask_made_shorter(deterministic):
    """Its lists go on past the last query: blocks added there, to memory that is not theirs."""
    q, k, v = (x.requires_grad_() for x in on_gpu(1, 2, 2, 384, 640, 128))
    dout, found = torch.randn_like(q), []
    for rows in (384, 1024):
        mask = flexattn.create_block_mask(MASKS["holes"], None, None, rows, 640, "cuda", 128)
        mask.seq_lengths = (384, 640)
        options = {**GLUON, "DETERMINISTIC": deterministic}
        out = flexattn.flex_attention(q, k, v, None, mask, kernel_options=options)
        found.append(torch.autograd.grad(out, (q, k, v), dout))
    # Sixteen bits, of sums in another order; a block added elsewhere is off by far more.
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


def test_large_negative_scores_leave_no_nan():
    """Weights of keys past the last one were infinite where every score lies below -128."""
    q, k, v = on_gpu(1, 2, 2, 300, 200, 128)
    check(q.abs() + 3, -k.abs() - 3, v)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_scores_that_are_no_number_behind_the_last_row(D):
    """Of the last tile's rows some are none: 0 / 0 there made all of dk and dv NaN."""
    temperature = torch.linspace(1.0, 2.0, 333).cuda()
    given = on_gpu(2, 4, 2, 333, 401, D)
    check(*given, causal, lambda: lambda s, b, h, q, k: s / temperature[q])


def test_strided_inputs():
    q, k, v = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in on_gpu(2, 4, 2, 333, 333, 128)
    )
    check(q, k, v, causal)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
def test_keys_that_batches_share_through_a_stride_of_0(heads):
    """Under torch.compile keys of batch 1 are expanded: a descriptor read behind their memory."""
    q, k, v = on_gpu(3, *heads, 333, 401, 64, Bkv=1)
    check(q, *(x.expand(3, -1, -1, -1) for x in (k, v)), causal)


@pytest.mark.parametrize("name", ["full", "causal", "window", "holes"])
@pytest.mark.parametrize("D", [64, 96, 128])
def test_dq_in_order_has_the_same_bits_in_every_run(D, name):
    """Of many blocks, that wait for one another; rows without a key have zeros."""
    q, k, v = (x.requires_grad_() for x in on_gpu(2, 8, 4, 2100, 2300, D))
    mask_mod, dout = {**MASKS, "full": None, "causal": causal}[name], torch.randn_like(q)
    torch.use_deterministic_algorithms(True)
    try:
        assert explained(q, k, v, mask_mod).deterministic
        assert_gradients(q, k, v, mask_mod=mask_mod)
        mask = block_mask(mask_mod, q, k, 128)
        out = flexattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        for _ in range(20):
            again = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
            assert all(map(torch.equal, again, first))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not explained(q, k, v, mask_mod).deterministic


def test_dk_and_dv_have_the_same_bits():
    """Each is summed by one block, in one order; dq alone is added up in no order."""
    q, k, v = (x.requires_grad_() for x in on_gpu(1, 4, 2, 1111, 1111, 128))
    mask = block_mask(causal, q, k, 128)
    out = flexattn.flex_attention(q, k, v, None, mask, enable_gqa=True, kernel_options=GLUON)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for _ in range(5):
        found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        assert torch.equal(found[1], first[1]) and torch.equal(found[2], first[2])
        torch.testing.assert_close(found[0], first[0], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("D", [80, 128, 160])
def test_memory_is_one_fp32_dq_beside_the_gradients(D):
    assert_memory(*on_gpu(1, 8, 8, 4096, 4096, D), kernel_options=GLUON)
