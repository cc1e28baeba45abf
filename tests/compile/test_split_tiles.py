"""Loops for sm_90 whose tiles are several products: D 80 is 64 + 16 columns, D 96 is 64 + 32."""

import re
import subprocess
from pathlib import Path

import pytest
import triton

from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.triton.config import PrefillConfig
from flexattn.problem import Layout
from flexattn.runtime.build import compile_source
from tests.problems import H200, problem

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
# An instruction without its predicate; uniform registers; those of a product's descriptors.
INSTRUCTION = re.compile(r"^\s*(?:/\*\w+\*/)?\s*(?:@!?U?P\d\s+)?(\S+)\s+([^;]+);")
UNIFORM = re.compile(r"\bUR(\d+)\b")


def reads_and_writes(op, operands):
    """Numbers of the uniform registers that an instruction reads, and of those that it writes."""
    width = 4 if "128" in op else 2 if "64" in op or "WIDE" in op else 1
    target = re.fullmatch(r"UR(\d+)", operands[0])
    writes = range(int(target[1]), int(target[1]) + width) if target else ()
    reads = set()
    for operand in operands[bool(target) :]:
        for found in map(int, UNIFORM.findall(operand)):
            # Of four registers of descriptors the first two are A's, which may lie in registers.
            first = 2 if re.fullmatch(r"R\d+", operands[1]) else 0
            reads |= {found + i for i in range(first, 4)} if "gdesc" in operand else {found}
    return reads, writes


def read_before_written(cubin, tmp_path):
    """Lines of machine code that read a uniform register which no line above them writes."""
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin)
    text = subprocess.run([NVDISASM, "-c", path], capture_output=True, text=True, check=True)
    written, found = set(), []
    for line in filter(None, map(INSTRUCTION.match, text.stdout.splitlines())):
        reads, writes = reads_and_writes(line[1], [each.strip() for each in line[2].split(",")])
        found += [line[0].strip()] if reads - written else []
        written.update(writes)
    assert written
    return found


@pytest.mark.oldest
@pytest.mark.releases
@pytest.mark.parametrize(
    ("D", "kv_dtype"), [(80, "float8_e4m3fn"), (96, "float8_e4m3fn"), (94, "")]
)
def test_no_descriptor_is_read_before_it_is_written(D, kv_dtype, tmp_path):
    """By ptxas 12.8 the first tile of keys was multiplied by whatever a register pointed to."""
    layout = Layout(True, True, True, D % 16 == 0)
    asked = problem(D=D, dtype="float16", kv_dtype=kv_dtype, layout=layout, lse=False)
    config = PrefillConfig(128, 64, 8, 2)
    source = family_of(config).render(asked.structure, config, H200, "split")
    assert not read_before_written(compile_source(source, H200).asm["cubin"], tmp_path)
