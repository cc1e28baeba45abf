"""What ptxas makes of negations that a minimum or maximum reads, by release, in machine code."""

import re
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flexattn.kernels.choose.defaults import default
from flexattn.kernels.ptx.negated_extremes import merged
from flexattn.runtime import build
from flexattn.runtime.build import compile_source
from tests.families import render
from tests.negations import KERNELS, loses, told
from tests.problems import H200, problem

pytestmark = [pytest.mark.oldest, pytest.mark.releases]

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
