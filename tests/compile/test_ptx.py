"""Kernels between PTX and machine code: the pass, the choice of ptxas, lost negations."""

import re
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flexattn.catalogue import alibi, causal
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.hopper.source import PASS
from flexattn.kernels.ptx.assembler import assemblers
from flexattn.kernels.ptx.negated_extremes import merged
from flexattn.runtime import build
from flexattn.runtime.build import compile_source
from flexattn.runtime.resources import loop_spills, spills_too_much
from tests.families import render
from tests.negations import KERNELS, loses, told
from tests.problems import H200, problem

pytestmark = [pytest.mark.oldest, pytest.mark.releases]

SMALL = HopperPrefillConfig(3, 64, 2, 160)
CAUSAL = {"score_mod": alibi(32, "cpu"), "mask_mod": causal, "runs": True}


def test_a_kernel_that_was_compiled_without_the_hook_is_compiled_anew(monkeypatch, tmp_path):
    """Somebody's who opened the rendered file: it lay in Triton's cache under the same name."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    source = render(problem("prefill", 64).structure, SMALL, H200, "test")
    with monkeypatch.context() as alone:
        alone.setattr(build, "compiled_by", lambda stages: nullcontext())
        alone.setattr(build, "block_warps", lambda stages, text: None)
        assert compile_source(source, H200).metadata.num_warps == 8
    for _ in range(2):
        assert compile_source(source, H200).metadata.num_warps == 16


@pytest.mark.parametrize("mods", [{}, CAUSAL], ids=["noop", "ALiBi"])
def test_without_the_pass_each_consumer_is_compiled(mods):
    """Whoever opens and launches the file of the merged form waits for ever; this one runs."""
    wanted = problem("prefill", 128, **mods)
    start = replace(default(wanted, H200, "gluon"), merge_consumers=True)
    merged, plain = (
        render(wanted.structure, replace(start, merge_consumers=merge), H200, "test")
        for merge in (True, False)
    )
    assert merged.stages.passes == (PASS,) and not plain.stages.passes
    assert (
        f"# pass: {PASS} (flexattn/kernels/hopper/merge_consumers.py)" in merged.text
        and "# pass:" not in plain.text
    )
    products, warps = zip(
        *(
            (found.asm["ptx"].count("wgmma.mma_async"), found.metadata.num_warps)
            for found in (compile_source(source, H200) for source in (merged, plain))
        ),
        strict=True,
    )
    assert products[1] == start.consumers * products[0] and warps[0] == warps[1] == 12


@pytest.mark.parametrize("D", [pytest.param(64, marks=pytest.mark.full_matrix), 128])
def test_a_mask_of_every_fourth_key_is_served(D):
    """It was refused: "a thread knows seven bits of its number", which its code does not need."""

    def dilated(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx >= 0) & (q_idx - kv_idx < 256) & ((q_idx - kv_idx) % 4 == 0)

    wanted = problem("prefill", D, mask_mod=dilated, runs=True)
    source = render(wanted.structure, default(wanted, H200, "gluon"), H200, "test")
    cubin = compile_source(source, H200).asm["cubin"]
    assert source.stages.passes and not spills_too_much(*loop_spills(cubin))


def test_a_config_names_its_ptxas():
    """The release of PTX is that of the assembler; the same source is another kernel."""
    wanted = problem("prefill", 64)
    made = {
        ptxas: render(wanted.structure, replace(SMALL, ptxas=ptxas), H200, "test")
        for ptxas in assemblers()
    }
    assert len({source.hash for source in made.values()}) == len(made)
    written = {
        re.search(r"\.version (\S+)", compile_source(source, H200).asm["ptx"])[1]
        for source in made.values()
    }
    assert len(written) == len(made)


BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def machine_code(ptx, ptxas, folder):
    """For sm_90, with the PTX's release as old as every ptxas reads."""
    source, made = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(re.sub(r"^\.version .*", ".version 8.7", ptx, flags=re.MULTILINE))
    subprocess.run([ptxas, "--gpu-name=sm_90a", source, "-o", made], check=True)
    return disassembled(made)


def disassembled(cubin):
    command = [BIN / "cuobjdump", "-sass", cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", ["ptxas", "ptxas-blackwell"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_which_ptxas_loses_a_negation(kernel, name, tmp_path):
    """And none does behind the pass. Of Triton 3.8 on, an absolute value is a negation, too."""
    signature = {name: "*i32" for name in kernel.arg_names}
    target = GPUTarget("cuda", 90, 32)
    ptx = triton.compile(ASTSource(kernel, signature, {}), target=target).asm["ptx"]
    ptxas = BIN / name
    kept = [
        re.search(r"IABS|[ ,]-U?R\d|LOP3.* 0x33,", machine_code(text, ptxas, tmp_path)) is not None
        for text in (ptx, merged(ptx))
    ]
    assert kept[0] != loses(ptx, ptxas), told(ptx, ptxas)
    assert kept[1]


def tiled(b, h, q, k):
    near = (q // 16 // 4 - k // 16 // 4).abs() <= 1
    return near & ((q // 16 % 4 - k // 16 % 4).abs() <= 1)


def test_a_kernel_that_was_compiled_without_the_pass_is_compiled_anew(monkeypatch, tmp_path):
    """One of an older version, which lay in Triton's cache: 3.6 keeps kernels by their source.

    The tiled neighbourhood was wrong by half under Triton 3.8, at every head dimension.
    """
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    wanted = problem("prefill", 64, mask_mod=tiled, runs=True)
    source = render(wanted.structure, default(wanted, H200, "triton"), H200, "test")
    with monkeypatch.context() as alone:
        alone.setattr(build, "compiled_by", lambda stages: nullcontext())
        alone.setattr(build, "_unguarded", lambda compiled, device: False)
        before = compile_source(source, H200).asm["ptx"]
    spelled = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
    assert (before != merged(before)) == spelled
    compiled = compile_source(source, H200)
    assert compiled.asm["ptx"] == merged(before)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    assert not re.search(r"VIMNMX3\S* R\d+, (R\d+), \1,", disassembled(cubin))
