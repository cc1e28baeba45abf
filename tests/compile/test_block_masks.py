"""The kernel of a block mask compiles for every kind of GPU, with tables and without."""

import pytest
import torch

from flexattn.device import named
from flexattn.kernels.block_mask.source import (
    ChosenForm,
    render_block_mask,
    render_by_key,
    render_chosen,
    render_mapped,
)
from flexattn.mods import bind
from flexattn.problem import Captures
from flexattn.runtime.build import compile_source
from flexattn.runtime.resources import resources
from tests.cases import case

pytestmark = pytest.mark.oldest


def floats(b, h, q_idx, kv_idx):
    near = torch.minimum(torch.sqrt(q_idx * 2.5), LIMITS[h]) + torch.exp2(q_idx / 100.0)
    return (near >= kv_idx) | ((q_idx / 3).to(torch.int32) == kv_idx)


LIMITS = torch.zeros(4)


@pytest.mark.parametrize(
    ("name", "device"),
    [("natten_2d", "nvidia-h200"), ("random_blocks", "nvidia-a100"), ("flamingo", "amd-mi300x"),
     ("document_offsets", "nvidia-h200"), ("head_windows", "nvidia-h200"),
     ("floats", "nvidia-h200"), ("floats", "amd-mi300x")],
)  # fmt: skip
def test_masks(name, device):
    mask_mod = floats if name == "floats" else case(name).make(2, 3, 1, 64, 64).mask_mod
    bound = bind(mask_mod, "mask")
    captures = Captures(bound.mod, tuple(t.stride()[-1:] == (1,) for t in bound.tensors))
    compiled = compile_source(render_block_mask(captures, 128, 128, named(device)), named(device))
    assert compiled.metadata.shared < 8192


@pytest.mark.parametrize("device", ["nvidia-h200", "amd-mi300x"])
@pytest.mark.parametrize(
    ("width", "dtype", "counted", "masked", "causal", "whole"),
    [(16, "int32", False, False, False, False), (64, "int64", True, True, True, False),
     (1024, "int32", True, True, False, False), (2048, "int32", False, False, False, True)],
)  # fmt: skip
def test_chosen_blocks(device, width, dtype, counted, masked, causal, whole):
    form = ChosenForm(128, 64, width, dtype, counted, masked, causal, whole)
    target = named(device)
    for source in (render_chosen(form, target), render_by_key(width, target)):
        assert compile_source(source, target).metadata.shared < 49152


@pytest.mark.parametrize("device", ["nvidia-h200", "amd-mi300x"])
@pytest.mark.parametrize(("rows", "unit"), [(1, 64), (4, 16), (2, 128)])
def test_maps_of_choices(device, rows, unit):
    target = named(device)
    compiled = compile_source(render_mapped(rows, unit, 128, "int64", True, True, target), target)
    assert compiled.metadata.shared < 49152
    assert device.startswith("amd") or resources(compiled, target).spills == 0
