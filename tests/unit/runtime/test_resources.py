"""What is read from assembly: spills inside and outside of loops, matrix instructions."""

from types import SimpleNamespace

import pytest

from flexattn.device import named
from flexattn.runtime import resources as reader
from flexattn.runtime.resources import Resources, resources

SASS = """
        /*0000*/                   STL [R1], R4 ;
.L_x_1:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ ;
        /*0020*/                   LDL.LU R8, [R1] ;
.L_x_2:
        /*0030*/                   HMMA.16816.F32.BF16 R32, R32, R16, RZ ;
        /*0040*/              @!P0 BRA `(.L_x_2) ;
        /*0050*/                   STL [R1+0x4], R8 ;
        /*0060*/              @P1 BRA `(.L_x_1) ;
        /*0070*/                   BRA `(.L_x_3) ;
.L_x_3:
        /*0080*/                   LDL R4, [R1] ;
"""
AMD = """
	scratch_store_dword off, v1, off
.LBB0_2:
	v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
	scratch_load_dword v1, off, off
	s_cbranch_scc0 .LBB0_2
	s_endpgm
    .vgpr_count:     200
    .private_segment_fixed_size: 32
"""


@pytest.fixture
def sass(monkeypatch):
    def tool(name, *arguments):
        if "ptxas" in name:
            return "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async ..."
        usage = " REG:168 STACK:24 SHARED:0 LOCAL:0 "
        return usage if name == "cuobjdump" else SASS

    monkeypatch.setattr(reader, "_tool", tool)


def compiled(**asm):
    return SimpleNamespace(asm=asm, metadata=SimpleNamespace(shared=4096))


def test_nvidia(sass):
    found = resources(compiled(cubin=b"", ptx=""), named("nvidia-h200"))
    assert found == Resources(
        registers=168, spills=4, loop_spills=2, shared=4096, matrix_instructions=2, stack=24,
        loop_instructions=5,
    )  # fmt: skip
    assert found.starved


def test_a_warp_specialised_kernel_tells_its_registers_and_what_waits(sass):
    ptx = "setmaxnreg.dec.sync.aligned.u32 24; setmaxnreg.inc.sync.aligned.u32 240;"
    found = resources(compiled(cubin=b"", ptx=ptx), named("nvidia-h200"))
    assert found.register_split == (240, 24)
    assert found.serialised == ("C7512",)


def test_amd():
    found = resources(compiled(amdgcn=AMD), named("amd-mi300x"))
    assert found == Resources(
        registers=200, spills=2, loop_spills=1, shared=4096, matrix_instructions=1, stack=32,
        loop_instructions=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("loop_spills", "stack", "starved"),
    [(0, 0, False), (0, 96, False), (7, 16, False), (7, 20, True)],
)
def test_starved_of_registers(loop_spills, stack, starved):
    """Spills outside of loops cost nothing, and a few words are what the compiler chose."""
    assert Resources(168, 9, loop_spills, 0, 1, stack).starved is starved
