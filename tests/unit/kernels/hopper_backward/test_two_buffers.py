"""The barrier in front of a store goes, and no other does."""

import pytest

from flexattn.kernels.hopper_backward.two_buffers import ANNOUNCED, block_warps, merged

STORE = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2, %r3, %r4, %r5};\n"
BARRIERS = ["bar.sync 0;", "\tbar.sync \t0, 256;", "\tbarrier.cta.sync.aligned 0, 256;"]
BARRIERS += ["bar.sync \t2, 128;"]  # of the second partition


@pytest.mark.parametrize("barrier", BARRIERS)
def test_the_barrier_in_front_of_an_announced_store_goes(barrier):
    kept = f"mov.b32 %r0, 0; // {ANNOUNCED}\nadd.f32 %f1, %f2, %f3;\n"
    behind = f"{STORE}fence.proxy.async;\n{barrier}\n"
    assert merged(f"{kept}{barrier}\n{behind}") == kept + behind


def test_each_announcement_takes_one_barrier():
    part = f"// {ANNOUNCED}\nbar.sync 0;\n{STORE}bar.sync 0;\n"
    without = part.replace("bar.sync 0;\n", "", 1)
    assert merged(f"bar.sync 0;\n{part}{part}") == f"bar.sync 0;\n{without}{without}"


@pytest.mark.parametrize("text", [
    f"bar.sync 0;\n{STORE}",
    f"// {ANNOUNCED}\n{STORE}bar.sync 0;\n",
    f"// {ANNOUNCED}\nbar.sync 5, 160;\n{STORE}",
    f"// {ANNOUNCED}\nbar.arrive 0, 288;\n{STORE}",
    f"// {ANNOUNCED}\nbar.sync 0;\n",
    f"// {ANNOUNCED}\nst.shared.v4.b32 [%r1], {{%r2}};\nbar.sync 0;\n{STORE}",
    f"// {ANNOUNCED}\nfence.proxy.async.shared::cta;\nbar.sync 0;\n{STORE}",
])  # fmt: skip
def test_anything_else_stays(text):
    assert merged(text) == text
    assert block_warps(text) is None
