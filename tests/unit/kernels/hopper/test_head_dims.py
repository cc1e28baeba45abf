"""Head dimensions that are multiples of 8: what is copied, what is multiplied, what is served."""

from dataclasses import replace

import pytest

from flexattn.catalogue import causal, softcap
from flexattn.kernels.base.config import describe
from flexattn.kernels.choose.defaults import default, reasons, space
from flexattn.kernels.hopper import space as gluon
from flexattn.kernels.hopper.config import HopperPrefillConfig, tiles_of
from tests.families import gluon_refused, render
from tests.problems import H200, problem

DIMS = tuple(range(16, 257, 8))
PAIRS = [*((D, D) for D in DIMS), (192, 120), (72, 128), (40, 256), (200, 64), (256, 72)]
NEW = [pair for pair in PAIRS if not (pair[0] in gluon.QK_DIMS and pair[1] in gluon.V_DIMS)]


@pytest.mark.parametrize("v_box", [16, 32, 64])
def test_products_cover_a_head_and_no_more_than_wgmma_needs(v_box):
    config = HopperPrefillConfig(2, 64, 2, 240, v_box=v_box)
    step = 8 if v_box == 64 else v_box  # a box is whole where it is narrower than a swizzle
    for D, Dv in PAIRS:
        tiles = tiles_of(problem(D=D, Dv=Dv).structure, config)
        taken = [
            64 * i + first + column
            for i, parts in enumerate(tiles.qk_parts)
            for first, width in parts
            for column in range(width)
        ]
        assert taken == list(range(-(-D // 16) * 16))
        assert all(width & (width - 1) == 0 for parts in tiles.qk_parts for _, width in parts)
        assert tiles.qk_padded - 64 < D <= tiles.qk_padded
        assert Dv <= tiles.v_columns < Dv + step and tiles.v_columns % step == 0
        assert tiles.v_columns <= tiles.v_box * tiles.v_boxes <= tiles.v_width
        assert tiles.out_chunks * 64 - 64 < Dv <= tiles.out_chunks * 64


@pytest.mark.parametrize("mods", [{}, {"mask_mod": causal, "runs": True}], ids=["full", "causal"])
@pytest.mark.parametrize(("D", "Dv"), NEW[::3])
def test_every_multiple_of_8_has_a_config_to_start_from(D, Dv, mods):
    wanted = problem(D=D, Dv=Dv, **mods)
    config = default(wanted, H200)
    assert config.language == "gluon" and config.v_box
    tiles = tiles_of(wanted.structure, config)
    # Whole boxes, and as few columns as a multiple of 16 can be; of boxes of 64 a multiple of 8.
    step = 8 if config.v_box == 64 else 16
    assert tiles.v_columns == -(-Dv // step) * step <= tiles.v_box * tiles.v_boxes
    assert config.v_box == 64 or tiles.v_columns == tiles.v_box * tiles.v_boxes
    text = render(wanted.structure, config, H200, "test").text
    assert ("narrow_products 2" in text) is (tiles.v_columns < tiles.v_width)


@pytest.mark.parametrize(
    ("D", "about", "said"),
    [
        (94, {}, "head dimension 94 is not one of"),
        (72, {"dtype": "float8_e4m3fn"}, "are in 16 bits"),
        (80, {"kv_dtype": "float8_e4m3fn"}, "in the dtype of q"),
    ],
)
def test_other_heads_are_refused_in_words(D, about, said):
    assert said in gluon_refused(problem(D=D, **about), H200)


@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (256, 256), (192, 128), (128, 64)])
def test_head_dimensions_with_tiles_of_their_own_keep_them(D, Dv):
    wanted = problem(D=D, Dv=Dv, score_mod=softcap(50.0))
    assert {getattr(each, "v_box", 0) for each in space(wanted, H200)} == {0}


def test_a_power_of_two_that_is_a_third_wider_goes_in_boxes():
    """96 columns in boxes are 16 % faster than in 128, which a kernel has too."""
    wanted = problem(D=96)
    assert default(wanted, H200).v_box == 64
    found = [each for each in space(wanted, H200) if isinstance(each, HopperPrefillConfig)]
    assert {each.v_box for each in found} == {64}
    boxed = replace(found[0], v_box=32)
    whole = replace(found[0], v_box=0)
    assert not reasons(boxed, wanted.structure, H200)
    assert not reasons(whole, wanted.structure, H200)
    assert reasons(replace(boxed, v_box=48), wanted.structure, H200)
    assert "v_box=32" in describe(boxed)


@pytest.mark.parametrize("D", [72, 96, 120])
def test_three_consumers_have_64_keys_each_between_64_and_128_columns(D):
    """Two with 128 keys leave a third of the tensor cores' time to nobody: 2 to 42 % slower."""
    for mods in ({}, {"mask_mod": causal, "runs": True}, {"score_mod": softcap(50.0)}):
        config = default(problem(D=D, **mods), H200)
        assert (config.consumers, config.BLOCK_N, config.num_stages) == (3, 64, 3), config
    # Blocks of 128 rows are no whole number of three consumers' rows.
    listed = default(problem(D=D, mask_mod=causal), H200)
    assert (listed.consumers, listed.BLOCK_N, listed.consumer_regs) == (2, 128, 232)
