"""Numbers of eight bits in mods, compiled for a GPU that has them."""

import pytest
import torch

from flexattn.frontend.quantize import Quantized
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.triton.config import PrefillConfig
from flexattn.mods import bind
from flexattn.runtime.build import compile_source
from flexattn.runtime.resources import resources
from tests.families import render
from tests.problems import H200, problem

TABLE = torch.zeros(300, dtype=torch.float8_e4m3fn)


def reads(score, b, h, q_idx, kv_idx):
    return score + TABLE[kv_idx].float()


def makes(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx).to(torch.float8_e5m2).float()


@pytest.mark.parametrize(
    ("score_mod", "config"),
    [(reads, PrefillConfig(64, 64, 4, 1)), (makes, HopperPrefillConfig(2, 64, 1, 240))],
    ids=["reads", "makes"],
)
def test_no_integer_is_cast_to_eight_bits(score_mod, config):
    """The 0 that stands for what lies outside of a captured tensor was an integer, and so is a
    position: "cannot cast int32 to fp8e4nv"."""
    wanted = problem("prefill", 64, score_mod=bind(score_mod, "score"))
    assert compile_source(render(wanted.structure, config, H200, "test"), H200).asm["cubin"]


@pytest.mark.parametrize(("D", "block"), [(64, 128), (128, 64), (256, 64)])
def test_factors_of_blocks_take_no_registers(D, block):
    """A factor for each key in registers left tiles of 32 keys at 256 columns."""
    eight, table = torch.zeros(1, 2, 1, D).to(torch.float8_e4m3fn), torch.ones(1, 2, 200)
    made = Quantized(eight, eight, eight, table, table, table, block)
    wanted = problem(D=D, dtype="float8_e4m3fn", score_mod=made.score_mod())
    config = default(wanted, H200, "gluon")
    found = resources(compile_source(render(wanted.structure, config, H200, "test"), H200), H200)
    assert config.BLOCK_N >= 64 and found.loop_spills <= 16 and not found.serialised
