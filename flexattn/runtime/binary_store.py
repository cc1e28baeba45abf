"""Binaries: compiled kernels as files of one explicitly named directory, found by source.

    <root>/kernels/<hash of the source>-<arch>.json   what a launch must know; the code's sha256
    <root>/binaries/<sha256>.cubin                    machine code

The hash of a source covers its whole text, its signature and its compile options: a template that
changed names another file. Machine code runs on the GPU with all rights of the process, so no
cache layer is searched, the code's sha256 is checked before a driver sees it, and a file that is
not what it should be is a miss, which is said.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from flexattn.device import Device
from flexattn.errors import CacheError
from flexattn.kernels.base.source import Source
from flexattn.records.codec import decode
from flexattn.runtime.binary import Binary, TensorMap
from flexattn.settings import say_once
from flexattn.util.files import publish, read_regular, sealed, unsealed

# 1 had no pass that keeps ptxas from losing negations (kernels/ptx/negated_extremes.py).
_SCHEMA = 2
MAX_CODE, MAX_DESCRIPTION = 64 * 2**20, 2**16
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ELF = b"\x7fELF"


@dataclass(frozen=True, slots=True)
class Described:
    """A kernel's description as its file has it; triton, ptxas' caller, is told for people."""

    schema: int
    source: str
    arch: str
    sha256: str
    size: int
    name: str
    shared: int
    num_warps: int
    parameters: int
    maps: tuple[TensorMap, ...]
    verified: bool
    triton: str


class Binaries:
    """The kernels below one root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, source: Source, arch: str) -> Path:
        """The file that describes a source's kernel for an arch."""
        return self.root / "kernels" / f"{source.hash}-{arch}.json"

    def find(self, source: Source, device: Device) -> Binary | None:
        """The kernel of a source for a device; None where there is none that is sound."""
        path = self.path(source, device.arch)
        try:
            raw = read_regular(path, MAX_DESCRIPTION, trusted=True)
            if raw is None:
                say_once(f"{self.root} has no binary of {path.stem}: it is compiled")
                return None
            return self._binary(decode(Described, unsealed(raw), "kernel"), source, device)
        except CacheError as error:
            say_once(f"{path}: not used, the kernel is compiled: {error.line}")
            return None

    def write(self, source: Source, binary: Binary, triton: str) -> Path:
        """Add a kernel, whole or not at all; returns the file that describes it."""
        digest = hashlib.sha256(binary.code).hexdigest()
        path = self.path(source, binary.arch)
        code = self._code(digest)
        for each in (code, path):
            each.parent.mkdir(parents=True, exist_ok=True)
        publish(code, binary.code)
        described = Described(
            _SCHEMA, source.hash, binary.arch, digest, len(binary.code), binary.name,
            binary.shared, binary.num_warps, binary.parameters, binary.maps, binary.verified,
            triton,
        )  # fmt: skip
        publish(path, sealed(asdict(described)))
        return path

    def _code(self, digest: str) -> Path:
        return self.root / "binaries" / f"{digest}.cubin"

    def _binary(self, described: Described, source: Source, device: Device) -> Binary:
        d = described
        _need(d.schema == _SCHEMA, f"schema {d.schema}", f"this version reads schema {_SCHEMA}")
        _need(d.source == source.hash, "another source", "the name of the file is the source's")
        _need(d.arch == device.arch, f"for {d.arch}", f"it is for this device, {device.arch}")
        _need(1 <= d.num_warps <= 32, f"{d.num_warps} warps", "a block has 1 to 32")
        _need(d.shared <= device.shared_memory, f"{d.shared} bytes shared", "they fit the device")
        _need(d.name.isidentifier(), "the kernel's name", "it is a name")
        _need(0 < d.parameters <= 4096, f"{d.parameters} parameters", "a kernel has 1 to 4096")
        types = [argument.type for argument in source.arguments]
        described_tensors = sum(kind[0] == "t" for kind in types)
        _need(len(d.maps) == described_tensors, "descriptors", "one for each of the source's")
        for each in d.maps:
            box = len(each.block) == 4 and all(0 < size <= 256 for size in each.block)
            _need(box and each.swizzle <= 3, f"{each}", "a box has 4 sizes from 1 to 256")
        # Before it becomes part of a path.
        _need(_SHA256.fullmatch(d.sha256) is not None, "sha256", "it has 64 hexadecimal digits")
        code = read_regular(self._code(d.sha256), MAX_CODE, trusted=True)
        _need(code is not None, f"no {d.sha256}.cubin", "it lies in binaries/")
        assert code is not None
        whole = len(code) == d.size and hashlib.sha256(code).hexdigest() == d.sha256
        _need(whole, f"{d.sha256}.cubin", "its bytes have the sha256 that it is named by")
        _need(code.startswith(_ELF), f"{d.sha256}.cubin", "it is a cubin")
        return Binary(
            code, d.name, d.arch, d.shared, d.num_warps, d.parameters, d.maps, d.verified
        )


def _need(holds: bool, got: str, rule: str) -> None:
    if not holds:
        raise CacheError(got, rule)
