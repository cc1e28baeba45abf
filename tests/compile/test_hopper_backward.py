"""The Hopper backward compiles with no device, keeps its registers and overlaps its products."""

import importlib.util

import pytest
import triton
from triton import compile as build
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from flexattn.device import named
from flexattn.errors import RenderError
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from flexattn.kernels.hopper_backward.source import ARGUMENTS, render
from flexattn.runtime.resources import resources

pytestmark = [pytest.mark.compile, pytest.mark.oldest]

H200 = named("nvidia-h200")
# Its ptxas keeps in registers what the loops hold; that of 3.9 spills where D is 256.
KEPT = triton.__version__.startswith("3.6.")
TRAILING = HopperBackwardConfig(64, 128, 2, trailing=True, dk_operand="shared")
ROTATED = {"rotated": True, "opaque": True, "dk_operand": "shared", "by_length": True}
SPREAD = {"spread": True, "stagger": True, "polynomial": 2}
STAGGERED = {"stagger": True, "opaque": True, "polynomial": 2, "by_length": True}
CASES = {
    "128": (TRAILING, 128, False),
    "128 causal": (TRAILING, 128, True),
    "128 tma": (HopperBackwardConfig(64, 128, 2, dq="tma"), 128, False),
    "64": (HopperBackwardConfig(64, 128, 2, trailing=True), 64, True),
    "128 rotated": (HopperBackwardConfig(64, 128, 2, **ROTATED, **SPREAD), 128, False),
    "128 rotated tma": (HopperBackwardConfig(64, 128, 2, dq="tma", **ROTATED), 128, True),
    "128 staggered": (HopperBackwardConfig(64, 128, 2, stagger=True, by_length=True), 128, True),
    "64 staggered": (HopperBackwardConfig(128, 128, 2, **STAGGERED), 64, True),
    "256 rotated": (HopperBackwardConfig(64, 64, 2, **ROTATED), 256, True),
    "256": (HopperBackwardConfig(64, 64, 2), 256, True),
}


def descriptor(dtype, shape, swizzle, bits):
    layout = f"swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank={len(shape)}"
    return f"tensordesc<{dtype}[{','.join(map(str, shape))}],NVMMASharedLayout({layout})>"


def signature(config, head_dim):
    rows = descriptor("bf16", [1, 1, config.BLOCK_M, head_dim], 128, 16)
    keys = descriptor("bf16", [1, 1, config.BLOCK_N, head_dim], 128, 16)
    part = config.BLOCK_M * head_dim // 256 // config.dq_parts(head_dim)
    found = dict.fromkeys(ARGUMENTS, "i32") | dict.fromkeys(("K", "V", "DK", "DV"), keys)
    return found | {
        "Q": rows,
        "DO": rows,
        "STATS": descriptor("fp32", [1, 2 * config.BLOCK_M], 0, 32),
        "DQ_ACC": "*fp32" if config.dq == "red" else descriptor("fp32", [part, 256], 0, 32),
        "sm_scale": "fp32",
        "qk_scale": "fp32",
    }


@pytest.mark.parametrize("name", CASES)
def test_it_keeps_its_registers_and_overlaps(name, tmp_path):
    config, head_dim, causal = CASES[name]
    path = tmp_path / "kernel.py"
    path.write_text(render(config, head_dim, causal=causal))
    spec = importlib.util.spec_from_file_location("kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = GluonASTSource(module.kernel, signature(config, head_dim), {}, {})
    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        compiled = build(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    taken = resources(compiled, H200)
    assert not (taken.starved and KEPT)
    assert not [each for each in taken.serialised if each != "C7519"]
    assert taken.shared <= H200.shared_memory
    assert taken.register_split == (240, 24)


def test_a_rotated_causal_loop_refuses_shared_key_heads():
    config = HopperBackwardConfig(64, 128, 2, **ROTATED)
    with pytest.raises(RenderError, match="one query head"):
        render(config, 128, causal=True, grouped=True)
    assert "wrapped" not in render(config, 128, grouped=True)
