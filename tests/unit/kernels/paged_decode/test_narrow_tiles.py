"""Tiles of a head's columns in the kernel that every GPU has, beside caches of 8 bits."""

import re

import pytest
import torch

from flexattn.kernels.paged_decode.config import ServingConfig, tile_columns
from flexattn.kernels.paged_decode.source import render_serving
from tests.problems import H200, plan_of

CONFIG = ServingConfig(64, 64, 4, 3, 2, 1, "launch", "even")


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
@pytest.mark.parametrize("D", [40, 72, 80, 96, 160, 192])
def test_widened_tiles_have_64_columns(D, kv_dtype):
    """80 columns were tiles of 64 and 16: widened from 8 bits, an H200 read out of bounds."""
    eight = kv_dtype.itemsize == 1
    form = plan_of(8, total_q=930, D=D, kv=kv_dtype, scaled=eight).structure
    text = render_serving(form, CONFIG, H200, "test").text
    for name in ("qk", "v"):
        tiles = re.findall(rf"offs_{name}\d = (\d+) \+ tl\.arange\(0, (\d+)\)", text)
        begins, widths = zip(*((int(a), int(b)) for a, b in tiles), strict=True)
        assert sum(widths) == tile_columns(form, D) >= D and begins[0] == 0
        assert not eight or len(tiles) == 1 or widths[1] >= 64
        assert eight or len(tiles) == len(set(begins)) <= 2
