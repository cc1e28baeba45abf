"""V of 8 bits with its keys innermost: every number in its place, zeros behind the last."""

import numpy as np
import pytest
import torch

from flexattn.device import detect
from flexattn.kernels.hopper.source import render_transposed_values, render_wide_values
from flexattn.runtime.launch import prepare_values, transposed_shape

CPU = torch.device("cpu")


def in_order(v):
    """V transposed and permuted as wgmma takes it beside P in registers."""
    B, H, S, D = v.shape
    v = torch.nn.functional.pad(v, (0, 0, 0, -S % 32)).reshape(B, H, -1, 2, 2, 4, 2, D)
    return v.permute(0, 1, 7, 2, 3, 5, 4, 6).reshape(B, H, D, -1)


def laid_out(v):
    v = v.view(torch.uint8)
    source = render_transposed_values(v.shape[-1], detect(CPU))
    made = v.new_empty(transposed_shape(v))
    given = ("V", "V_KEYS")
    prepare_values(source, v, given, detect(CPU), -1).launch(-1, (v, made))
    return made


def values(*shape):
    draw = torch.Generator().manual_seed(3)
    return torch.randint(0, 127, shape, generator=draw, dtype=torch.uint8)


@pytest.mark.parametrize("D", [64, 96, 128])
@pytest.mark.parametrize("length", [1, 15, 16, 129, 257])
def test_each_key_is_where_its_weight_is(length, D):
    v = values(2, 3, length, D).view(torch.float8_e4m3fn)
    made = laid_out(v)
    assert made.shape == (2, 3, D, -(-length // 16) * 16)
    wanted = in_order(v.view(torch.uint8))
    assert torch.equal(made, wanted[..., : made.shape[-1]])
    assert not wanted[..., made.shape[-1] :].any()


@pytest.mark.parametrize("kind", ["heads_last", "one_batch", "expanded"])
def test_any_strides(kind):
    v = values(2, 50, 3, 64).transpose(1, 2)
    if kind == "one_batch":
        v = v[:1]
    if kind == "expanded":
        v = v[:1].expand(2, -1, -1, -1)
    v = v.view(torch.float8_e4m3fn)
    made = laid_out(v)
    wanted = in_order(v.view(torch.uint8).contiguous())[..., : made.shape[-1]]
    assert torch.equal(made, wanted)


def test_the_order_is_what_its_template_says():
    v = torch.arange(16, dtype=torch.uint8).reshape(1, 1, 16, 1).expand(1, 1, 16, 64).contiguous()
    made = laid_out(v)
    order = "0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15"
    assert np.array_equal(made[0, 0, 0].numpy(), np.array(order.split(), np.uint8))


@pytest.mark.parametrize("length", [1, 129])
@pytest.mark.parametrize("D", [64, 96])
def test_values_of_sixteen_bits_are_those_of_eight(D, length):
    v = values(2, length, 3, D).view(torch.float8_e4m3fn).transpose(1, 2)
    source = render_wide_values(D, detect(CPU))
    made = torch.full(v.shape, torch.nan, dtype=torch.bfloat16)
    prepare_values(source, v, ("V", "V_KEYS"), detect(CPU), -1).launch(-1, (v, made))
    assert torch.equal(made, v.to(torch.bfloat16))
