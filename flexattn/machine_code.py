"""A hash of a kernel's machine code: equal for two kernels that a device cannot tell apart."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any

from flexattn.device import Device

__all__ = ["code_hash", "sections"]

# Of an ELF file for a GPU: instructions, constants, shared memory, and what the loader must know.
# The rest is names and line numbers of the source, which differ between equal kernels.
_MEANT = (".text", ".rodata", ".data", ".nv.constant", ".nv.global", ".nv.info", ".nv.shared")
_WITHOUT_BYTES = 8  # SHT_NOBITS: a size alone


def code_hash(compiled: Any, device: Device) -> str:
    """A sha256 over the machine code of a kernel that Triton compiled: 64 hexadecimal digits."""
    binary: bytes = compiled.asm["hsaco" if device.backend == "hip" else "cubin"]
    digest = hashlib.sha256()
    for name, size, content in sections(binary):
        if name.startswith(_MEANT):
            digest.update(f"{name} {size}\n".encode())
            digest.update(content)
    return digest.hexdigest()


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
