"""What a plan is told of scales, and the shapes and steps of the tensors that its runs take."""

import re

import pytest
import torch

from flexattn.errors import InputError, InputTypeError
from flexattn.serving.cache import asked_scales, scales_shape, spread_scale, steps_by_axis

SIZES = (5, 16, 3)


@pytest.mark.parametrize(
    ("scaled", "found"),
    [
        (False, (False, "")), (True, (True, "")), ("tensor", (True, "")), ("head", (True, "")),
        ("page", (False, "page")), ("token_head", (False, "token_head")),
    ],
)  # fmt: skip
def test_what_is_asked_for(scaled, found):
    assert asked_scales(scaled, 16) == found


def test_what_is_none_of_the_choices():
    with pytest.raises(
        InputError, match="one of tensor, head, page, page_head, token, token_head"
    ):
        asked_scales("keys", 16)
    with pytest.raises(InputError, match="contiguous cache"):
        asked_scales("page_head", 0)
    with pytest.raises(InputTypeError, match="a float"):
        asked_scales(0.5, 16)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("scales", ["page", "page_head", "token", "token_head"])
def test_shapes_steps_and_what_they_multiply_agree(scales, layout):
    shape = scales_shape(scales, layout, SIZES)
    scale = torch.randn(2 * shape[0], *shape[1:])[::2]
    steps = steps_by_axis({"k_scale": scale, "v_scale": scale}, scales, layout, SIZES)
    cache = [5, 16, 3, 1] if layout == "NHD" else [5, 3, 16, 1]
    wide = spread_scale(scale, scales, layout).expand(cache)
    for page, key, head in ((0, 0, 0), (4, 15, 2), (2, 7, 1)):
        at = page * steps["p"] + key * steps.get("n", 0) + head * steps.get("h", 0)
        place = (page, key, head) if layout == "NHD" else (page, head, key)
        assert wide[place][0] == scale.as_strided((1,), (1,), at)


@pytest.mark.parametrize(
    ("k", "v", "said"),
    [
        (torch.ones(5, 16, 2), None, "k_scale is torch.float32 [5, 16, 2]"),
        (torch.ones(5, 16, 3), torch.ones(5, 16, 3).double(), "v_scale is torch.float64"),
        (torch.ones(5, 16, 3), torch.ones(5, 3, 16).transpose(1, 2), "in the same way"),
        (torch.ones(1).expand(5, 16, 3), torch.ones(5, 16, 3), "in the same way"),
    ],
)
def test_tensors_that_do_not_fit(k, v, said):
    named = {"k_scale": k} | ({} if v is None else {"v_scale": v})
    with pytest.raises(InputError, match=re.escape(said)):
        steps_by_axis(named, "token_head", "NHD", SIZES)


def test_one_scale_or_one_of_each_head():
    for count, step in ((1, 0), (3, 1)):
        named = dict.fromkeys(("k_scale", "v_scale"), torch.ones(count))
        assert steps_by_axis(named, "tensor", "NHD", SIZES) == {"h": step}
    for k, v, said in ((2, 2, "1 or 3 elements"), (1, 3, "differ in shape")):
        named = {"k_scale": torch.ones(k), "v_scale": torch.ones(v)}
        with pytest.raises(InputError, match=said):
            steps_by_axis(named, "tensor", "NHD", SIZES)
