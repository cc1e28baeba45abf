"""Kernels with dropout compile, keep to their registers, and share calls of Philox."""

from dataclasses import replace

import pytest

from flexattn.catalogue import causal
from flexattn.cli.offline import compiled as compiled_for
from flexattn.device import named
from flexattn.kernels.choose.options import parse
from flexattn.runtime.resources import resources
from flexattn.settings import override
from tests.problems import problem

pytestmark = pytest.mark.compile

H200, GLUON, TRITON = named("nvidia-h200"), {"BACKEND": "GLUON"}, {"BACKEND": "TRITON"}
CAUSAL = {"mask_mod": causal, "runs": True}
# A call of seven rounds has ten wide products, where a round's of the row or the key alone, and
# those of the head, are shared with others. How many calls a thread makes for its tiles.
CASES = {
    "hopper": ("prefill", 128, CAUSAL, GLUON, 2 * 8),
    "triton": ("prefill", 64, {}, TRITON, 8),
    "backward": ("backward", 128, CAUSAL, {}, 4 + 4),
}


def compiled(kind, D, more, options, device=H200):
    wanted = problem(kind, D, **more)
    wanted = replace(wanted, structure=replace(wanted.structure, dropout=True))
    with override(mode="off"):
        return compiled_for(wanted, device, parse(options))


@pytest.mark.parametrize("name", CASES)
def test_loops_keep_to_their_registers_and_eight_weights_share_a_call(name):
    """LLVM made a call for each weight where it could not tell that two indices are one."""
    *case, calls = CASES[name]
    choice, kernel = compiled(*case)
    taken = resources(kernel, H200)
    assert len(choice.attempts) == 1, choice.attempts
    assert not taken.starved and not taken.serialised, taken
    products = kernel.asm["ptx"].count("mul.wide.u32 x, ")
    assert 8 * calls <= products <= 14 * calls


def test_on_other_gpus():
    """Two products of 32 bits stand for a wide one."""
    _, kernel = compiled("prefill", 64, {}, {}, named("amd-mi300x"))
    assert "v_mul_hi_u32" in kernel.asm["amdgcn"]
