"""The resources that a compiled kernel needs, and a hash of its code: read with no device."""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getsource
from pathlib import Path
from typing import Any

from flexattn.device import Device
from flexattn.errors import BuildError
from flexattn.kernels.ptx.assembler import assembled_by

# One instruction that multiplies tiles: mma.sync, wgmma and tcgen05 in SASS; MFMA and WMMA.
_MATRIX_NVIDIA = re.compile(r"\b(?:[HQID]MMA|[HQI]GMMA|UTC[HQIO]?MMA)\b")
_MATRIX_AMD = re.compile(r"^\s*v_s?w?mfmac?_|^\s*v_s?wmma", re.MULTILINE)
_SPILL = re.compile(r"\b(?:STL|LDL)\b|\bscratch_(?:load|store)_")
# ptxas says where it waits for each wgmma before the next: C7510 to C7518.
_SERIALISED = re.compile(r"\((C751[0-8])\)")
_SPLIT = re.compile(r"\bsetmaxnreg\.(?:inc|dec)\S*\s+(\d+)")
_LABEL = re.compile(r"^(\.L\w+):")
# Bytes of registers that ptxas spills by choice, to run one more block on an SM.
_BY_CHOICE = 16
# One instruction in so many of the loops' may move a spilled word. On an H200 Hopper kernels whose
# loops spill 10 to 142 words ran at 0.91 to 1.00 of the speed of the same tiles with none; the
# Triton template, to which they would give way, runs at two thirds.
MOST_SPILLS = 16
# Of SASS, its address in a comment first; of AMD's assembly, its name behind white space.
_INSTRUCTION = re.compile(r"\s+(?:/\*[0-9a-f]{4}|[a-z]\w*\b(?!:))")
_BRANCH = re.compile(r"\b(?:BRA|s_c?branch\w*)\b.*?(\.L\w+)")


@dataclass(frozen=True, slots=True)
class Resources:
    """Registers of one thread, spills, bytes of shared memory and of stack, and instructions.

    spills: loads and stores of spilled registers, counted in the code. loop_spills: those of them
    inside a loop, which cost time at every turn; one before or after the loops costs nothing.
    matrix_instructions: how many multiply tiles. register_split: where warps are specialised, what
    their threads set their registers to, the most first; registers is then what all start with.
    serialised: ptxas' warnings there that a wgmma waits for the one before it. loop_instructions:
    all instructions inside of loops.
    """

    registers: int
    spills: int
    loop_spills: int
    shared: int
    matrix_instructions: int
    stack: int
    register_split: tuple[int, ...] = ()
    serialised: tuple[str, ...] = ()
    loop_instructions: int = 0

    @property
    def starved(self) -> bool:
        """True if a loop works on spilled registers; a word or four are the compiler's choice."""
        return starved(self.loop_spills, self.stack)


def spills_too_much(loop_spills: int, loop_instructions: int, stack: int) -> bool:
    """True if a kernel is worth leaving for another: its loops spill much for their length."""
    many = loop_spills * MOST_SPILLS > loop_instructions
    return many and starved(loop_spills, stack)


def starved(loop_spills: int, stack: int) -> bool:
    """The rule: loops spill, and more than ptxas spills by choice (bytes of a thread's stack)."""
    return loop_spills > 0 and stack > _BY_CHOICE


def loop_spills(cubin: bytes) -> tuple[int, int, int]:
    """The spills of loops: (loads and stores of spilled registers, instructions, bytes of stack).

    A stack too small to matter is read from the file in 0.2 ms, and 0 spills are returned; the
    others are disassembled, in about a second. Raises BuildError where Triton's tool fails.
    """
    stack = stack_size(cubin)
    spills, code = _in_loops(_disassembled(cubin)) if starved(1, stack) else (0, 0)
    return spills, code, stack


def resources(compiled: Any, device: Device) -> Resources:
    """The resources of a kernel that Triton compiled for a device; needs no device.

    Raises BuildError where the tools that Triton brings cannot read the binary.
    """
    shared = int(compiled.metadata.shared)
    if device.backend == "hip":
        return _amd(compiled.asm["amdgcn"], shared)
    with assembled_by(getattr(compiled.metadata, "ptxas", "")):
        return _nvidia(compiled.asm["cubin"], compiled.asm["ptx"], shared, device)


def _nvidia(cubin: bytes, ptx: str, shared: int, device: Device) -> Resources:
    with _written(cubin) as path:
        usage = _tool("cuobjdump", "-res-usage", path)
    code = _disassembled(cubin)
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", usage))
    if "REG" not in found:
        raise BuildError("cuobjdump printed no registers", "it reads what ptxas wrote", usage)
    split = {int(each) for each in _SPLIT.findall(ptx)}
    loop_spills, loop_instructions = _in_loops(code)
    return Resources(
        registers=int(found["REG"]),
        spills=len(_SPILL.findall(code)),
        loop_spills=loop_spills,
        shared=shared,
        matrix_instructions=len(_MATRIX_NVIDIA.findall(code)),
        stack=int(found["STACK"]),
        register_split=tuple(sorted(split, reverse=True)),
        serialised=_serialised(ptx, device) if split else (),
        loop_instructions=loop_instructions,
    )


def _disassembled(cubin: bytes) -> str:
    with _written(cubin) as path:
        return _tool("nvdisasm", "-c", path)


@contextmanager
def _written(cubin: bytes) -> Iterator[str]:
    """The path of a file that holds a cubin for a while."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        yield file.name


def _serialised(ptx: str, device: Device) -> tuple[str, ...]:
    """The warnings of a second run of ptxas: Triton throws away what the first one said."""
    from triton.backends.nvidia import compiler

    # As Triton's releases call it: the later ones allocate registers at another level.
    level = ["--regAllocOptLevel=2"] if "regAllocOptLevel" in getsource(compiler) else []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.ptx"
        text.write_text(ptx)
        said = _tool(
            compiler.get_ptxas(device.capability).path, "-v", "-lineinfo", *level,
            f"--gpu-name={device.arch}a", str(text), "-o", f"{folder}/kernel.cubin",
        )  # fmt: skip
    return tuple(sorted(set(_SERIALISED.findall(said))))


def _amd(assembly: str, shared: int) -> Resources:
    loop_spills, loop_instructions, stack = loop_spills_amd(assembly)
    return Resources(
        registers=_stated(assembly, "vgpr_count"),
        spills=len(_SPILL.findall(assembly)),
        loop_spills=loop_spills,
        shared=shared,
        matrix_instructions=len(_MATRIX_AMD.findall(assembly)),
        stack=stack,
        loop_instructions=loop_instructions,
    )


def loop_spills_amd(assembly: str) -> tuple[int, int, int]:
    """The spills of loops in AMD's assembly, as loop_spills has them."""
    return *_in_loops(assembly), _stated(assembly, "private_segment_fixed_size")


def _stated(assembly: str, name: str) -> int:
    """A number that AMD's assembly states of its kernel; 0 where it does not."""
    found = re.search(rf"\.{name}:\s+(\d+)", assembly)
    return int(found.group(1)) if found else 0


def _in_loops(assembly: str) -> tuple[int, int]:
    """Spills, and instructions, between a label and a branch back to it."""
    lines = assembly.splitlines()
    labels: dict[str, int] = {}
    inside: set[int] = set()
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label.group(1)] = number
        elif (branch := _BRANCH.search(line)) and branch.group(1) in labels:
            inside.update(range(labels[branch.group(1)], number))
    code = [lines[number] for number in inside if _INSTRUCTION.match(lines[number])]
    return sum(bool(_SPILL.search(line)) for line in code), len(code)


def _tool(name: str, *arguments: str) -> str:
    """The output of one of the binary tools inside the Triton that is installed, or at a path."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        raise BuildError(f"{path} failed: {reason.strip()}", "Triton brings this tool") from error
    return done.stdout + done.stderr


# Of an ELF file for a GPU: instructions, constants, shared memory, and what the loader must know.
# The rest is names and line numbers of the source, which differ between equal kernels.
_MEANT = (".text", ".rodata", ".data", ".nv.constant", ".nv.global", ".nv.info", ".nv.shared")
_WITHOUT_BYTES = 8  # SHT_NOBITS: a size alone
# In .nv.info: an attribute with as many bytes as it says, and the one of (symbol, stack's bytes).
_SIZED, _FRAME_SIZE = 4, 0x11


def code_hash(compiled: Any, device: Device) -> str:
    """A sha256 over the machine code of a kernel that Triton compiled: 64 hexadecimal digits."""
    binary: bytes = compiled.asm["hsaco" if device.backend == "hip" else "cubin"]
    digest = hashlib.sha256()
    for name, size, content in sections(binary):
        if name.startswith(_MEANT):
            digest.update(f"{name} {size}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def stack_size(cubin: bytes) -> int:
    """Bytes of local memory of one thread, spilled registers among it: the most of all functions.

    Read from what the loader must know, which names it by an attribute. Raises ValueError for
    anything but a cubin.
    """
    most = 0
    for name, _, content in sections(cubin):
        at = 0
        while name == ".nv.info" and at + 4 <= len(content):
            form, attribute, size = struct.unpack_from("<BBH", content, at)
            at += 4
            if form == _SIZED:
                if attribute == _FRAME_SIZE:
                    most = max(most, struct.unpack_from("<II", content, at)[1])
                at += size
    return most


def sections(elf: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Name, size and bytes of every section of a 64-bit little-endian ELF file.

    Raises ValueError for anything else.
    """
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"not a 64-bit little-endian ELF file: it starts with {elf[:6]!r}")
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry, count, names_at = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry) for i in range(count)]
    names = headers[names_at][4]
    for name, kind, _, _, offset, size in headers:
        end = elf.index(b"\0", names + name)
        content = b"" if kind == _WITHOUT_BYTES else elf[offset : offset + size]
        yield elf[names + name : end].decode(), size, content
