"""A hash of a kernel's machine code: equal for two kernels that a device cannot tell apart."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any

from flexattn.device import Device

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
