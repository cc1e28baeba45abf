"""KernelStore: machine code and sources of kernels in one directory that was named explicitly.

    <root>/kernels/<hash of the source>-<arch>.json   what a launch must know; the code's sha256
    <root>/binaries/<sha256>.cubin                    machine code
    <root>/sources/<key>.json                         what a structure and a config are rendered to
    <root>/sources/<hash>.py                          its text

The hash of a source covers its whole text, its signature and its compile options: a template that
changed names another file. Machine code runs on the GPU with all rights of the process, so no
cache layer is searched, the code's sha256 is checked before a driver sees it, and a file that is
not what it should be is a miss, which is logged.

A process's first render reads all templates, for 0.1 to 0.3 s. A key hashes the structure, the
config, the device and all code that renders them: whoever has changed anything renders anew.
A source from here is for finding its binary and for people to read. Where the binary is refused,
`build` raises RenderAnew, and what is compiled is what this process has rendered.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from flexattn.device import Device
from flexattn.errors import CacheError
from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.base.config import Config, Language
from flexattn.kernels.base.source import Source, digest_of
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.ptx.stages import Stages
from flexattn.problem import Structure
from flexattn.problem.problem import stable
from flexattn.records.codec import decode
from flexattn.records.environment import source_hash
from flexattn.settings import say_once
from flexattn.util.files import publish, read_regular, sealed, unsealed


@dataclass(frozen=True, slots=True)
class TensorMap:
    """The copy engine's view of a tensor: one copy's block, outermost first, and its swizzle."""

    block: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True, kw_only=True)
class _Launched:
    """The data that a launch of a cubin needs.

    name: of the kernel in the cubin. shared: bytes of dynamic shared memory. parameters: how many
    the kernel takes. maps: one for each tensor descriptor among the arguments, in order. verified:
    the machine that compiled it compared its first launch with plain torch.
    """

    name: str
    arch: str
    shared: int
    num_warps: int
    parameters: int
    maps: tuple[TensorMap, ...]
    verified: bool = False

    @property
    def launched(self) -> dict[str, Any]:
        """These fields alone, by name."""
        return {each.name: getattr(self, each.name) for each in fields(_Launched)}


@dataclass(frozen=True, eq=False)
class Binary(_Launched):
    """A cubin and its launch."""

    code: bytes


def binary_of(compiled: Any, arch: str) -> Binary | None:
    """The binary that Triton compiled; None where only Triton's own launcher can launch it.

    That is code for AMD's GPUs, and code that wants scratch memory or a special launch.
    """
    if "ptx" not in compiled.asm:
        return None
    metadata = compiled.metadata
    special = (
        metadata.global_scratch_size
        or metadata.profile_scratch_size
        or metadata.launch_cooperative_grid
        or metadata.launch_pdl
    )
    if special:
        return None
    return Binary(
        code=compiled.asm["cubin"],
        name=metadata.name,
        arch=arch,
        shared=metadata.shared,
        num_warps=metadata.num_warps,
        parameters=_parameters(compiled.asm["ptx"]),
        maps=tuple(
            TensorMap(tuple(each["block_size"]), each["swizzle"])
            for each in metadata.tensordesc_meta or ()
        ),
    )


def _parameters(ptx: str) -> int:
    """The number of parameters of the kernel of a PTX text."""
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", ptx, re.DOTALL)
    return 0 if entry is None else len(re.findall(r"\.param", entry.group(1)))


# 1 had no pass that keeps ptxas from losing negations (kernels/ptx/negated_extremes.py).
_SCHEMA = 2
HEADER = "# from a directory of exported kernels\n"
MAX_CODE, MAX_DESCRIPTION, MAX_INDEX, MAX_SOURCE = 64 * 2**20, 2**16, 2**18, 2**22
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ELF = b"\x7fELF"
_D = TypeVar("_D")


@dataclass(frozen=True)
class Described(_Launched):
    """A kernel's description as its file has it; triton, ptxas' caller, is told for people."""

    schema: int
    source: str
    sha256: str
    size: int
    triton: str


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A Source without its text."""

    hash: str
    arguments: tuple[Argument, ...]
    num_warps: int
    num_stages: int
    language: Language
    registers: int
    stages: Stages


@dataclass(frozen=True, slots=True)
class _Index:
    schema: int
    key: str
    sources: tuple[_Rendered, ...]


class KernelStore:
    """The kernels below one root, and the sources that are found there without rendering."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, source: Source, arch: str) -> Path:
        """The file that describes a source's kernel for an arch."""
        return self.root / "kernels" / f"{source.hash}-{arch}.json"

    def binary(self, source: Source, device: Device) -> Binary | None:
        """The kernel of a source for a device; None where there is none that is sound."""
        path = self.path(source, device.arch)
        try:
            described = read_sealed(path, Described, "kernel", _SCHEMA, MAX_DESCRIPTION, True)
            if described is None:
                say_once(f"{self.root} has no binary of {path.stem}: it is compiled")
                return None
            return self._checked(described, source, device)
        except CacheError as error:
            say_once(f"{path}: not used, the kernel is compiled: {error.line}")
            return None

    def write_binary(self, source: Source, binary: Binary, triton: str) -> Path:
        """Add a kernel, whole or not at all; returns the file that describes it."""
        digest = hashlib.sha256(binary.code).hexdigest()
        described = Described(
            _SCHEMA, source.hash, digest, len(binary.code), triton, **binary.launched
        )
        _write(self._code(digest), binary.code)
        path = self.path(source, binary.arch)
        _write(path, sealed(asdict(described)))
        return path

    def sources(
        self, structure: Structure, config: Config, device: Device
    ) -> tuple[Source, ...] | None:
        """The kernel's source, and of decode the combine kernel's; None where to render them.

        It logs what is there and not sound.
        """
        key = _key(structure, config, device)
        path = self._text(f"{key}.json")
        try:
            index = read_sealed(path, _Index, "sources", _SCHEMA, MAX_INDEX, True)
            if index is None:
                return None
            _need(index.key == key, "another key", "the name of the file is the key")
            return tuple(self._source(each) for each in index.sources)
        except CacheError as error:
            say_once(f"{path}: not used, the kernel is rendered: {error.line}")
            return None

    def write_sources(
        self, structure: Structure, config: Config, device: Device, sources: tuple[Source, ...]
    ) -> None:
        """Add what was rendered, whole or not at all."""
        for each in sources:
            _write(self._text(f"{each.hash}.py"), each.text)
        names = [field.name for field in fields(_Rendered)]
        told = tuple(_Rendered(*(getattr(each, name) for name in names)) for each in sources)
        key = _key(structure, config, device)
        _write(self._text(f"{key}.json"), sealed(asdict(_Index(_SCHEMA, key, told))))

    def _code(self, digest: str) -> Path:
        return self.root / "binaries" / f"{digest}.cubin"

    def _text(self, name: str) -> Path:
        return self.root / "sources" / name

    def _checked(self, described: Described, source: Source, device: Device) -> Binary:
        d = described
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
        return Binary(code, **d.launched)

    def _source(self, known: _Rendered) -> Source:
        # Before it becomes part of a path.
        _need(known.hash.isalnum(), "hash", "it has hexadecimal digits alone")
        raw = read_regular(self._text(f"{known.hash}.py"), MAX_SOURCE, trusted=True)
        _need(raw is not None, f"no {known.hash}.py", "it lies beside")
        assert raw is not None
        given = {field.name: getattr(known, field.name) for field in fields(known)}
        # The hash does not cover the header.
        text = raw.decode(errors="replace")
        found = Source(HEADER + text[text.find("import triton") :], stored=True, **given)
        rule = "its text and arguments have the hash of its name"
        _need(digest_of(found) == known.hash, f"{known.hash}.py", rule)
        return found


def read_sealed(
    path: Path, kind: type[_D], name: str, schema: int, most: int, trusted: bool = False
) -> _D | None:
    """The content of a sealed file, a dataclass with a schema; None if there is no such file.

    Raises CacheError for what is not sound, or of another schema, with its name for people. most:
    bytes. trusted: nobody else may write to it.
    """
    raw = read_regular(path, most, trusted=trusted)
    if raw is None:
        return None
    found: Any = decode(kind, unsealed(raw), name)
    rule = f"this version reads schema {schema}"
    _need(found.schema == schema, f"schema {found.schema}", rule)
    return found  # type: ignore[no-any-return]


def _write(path: Path, content: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    publish(path, content)


def _need(holds: bool, got: str, rule: str) -> None:
    if not holds:
        raise CacheError(got, rule)


def _key(structure: Structure, config: Config, device: Device) -> str:
    parts = [
        f"{field.name}={stable(getattr(structure, field.name))}" for field in fields(structure)
    ]
    config = family_of(config).as_rendered(config)
    parts += [type(config).__name__, repr(config), repr(device)]
    # Which value an argument gets, a launch finds by its name.
    parts.append(source_hash(structure.kind, device))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
