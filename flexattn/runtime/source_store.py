"""Sources of exported kernels, found without rendering, by all that decides them.

    <root>/sources/<key>.json   what a structure and a config are rendered to
    <root>/sources/<hash>.py    its text

A process's first render reads all templates, for 0.1 to 0.3 s. The key hashes the structure, the
config, the device and all code that renders them: whoever has changed anything renders anew.
A source from here is for finding its binary and for people to read. Where the binary is refused,
`build` raises RenderAnew, and what is compiled is what this process has rendered.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

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
from flexattn.records.renderers import source_hash
from flexattn.settings import say_once
from flexattn.util.files import publish, read_regular, sealed, unsealed

_SCHEMA = 2
HEADER = "# from a directory of exported kernels\n"
MAX_INDEX, MAX_SOURCE = 2**18, 2**22


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


class Sources:
    """The sources below one root."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find(
        self, structure: Structure, config: Config, device: Device
    ) -> tuple[Source, ...] | None:
        """The kernel's source, and of decode the combine kernel's; None where to render them.

        What is there and not sound is said.
        """
        key = _key(structure, config, device)
        path = self._path(f"{key}.json")
        try:
            raw = read_regular(path, MAX_INDEX, trusted=True)
            if raw is None:
                return None
            index: _Index = decode(_Index, unsealed(raw), "sources")
            if (index.schema, index.key) != (_SCHEMA, key):
                raise CacheError("another schema or key", "the name of the file is the key")
            return tuple(self._source(each) for each in index.sources)
        except CacheError as error:
            say_once(f"{path}: not used, the kernel is rendered: {error.line}")
            return None

    def write(
        self, structure: Structure, config: Config, device: Device, sources: tuple[Source, ...]
    ) -> None:
        """Add what was rendered, whole or not at all."""
        self._path("").mkdir(parents=True, exist_ok=True)
        for each in sources:
            publish(self._path(f"{each.hash}.py"), each.text)
        names = [field.name for field in fields(_Rendered)]
        told = tuple(_Rendered(*(getattr(each, name) for name in names)) for each in sources)
        key = _key(structure, config, device)
        publish(self._path(f"{key}.json"), sealed(asdict(_Index(_SCHEMA, key, told))))

    def _path(self, name: str) -> Path:
        return self._root / "sources" / name

    def _source(self, known: _Rendered) -> Source:
        if not known.hash.isalnum():  # before it becomes part of a path
            raise CacheError("hash", "it has hexadecimal digits alone")
        raw = read_regular(self._path(f"{known.hash}.py"), MAX_SOURCE, trusted=True)
        if raw is None:
            raise CacheError(f"no {known.hash}.py", "it lies beside")
        given = {field.name: getattr(known, field.name) for field in fields(known)}
        # The hash does not cover the header.
        text = raw.decode(errors="replace")
        found = Source(HEADER + text[text.find("import triton") :], stored=True, **given)
        if digest_of(found) != known.hash:
            raise CacheError(
                f"{known.hash}.py", "its text and arguments have the hash of its name"
            )
        return found


def _key(structure: Structure, config: Config, device: Device) -> str:
    parts = [
        f"{field.name}={stable(getattr(structure, field.name))}" for field in fields(structure)
    ]
    config = family_of(config).as_rendered(config)
    parts += [type(config).__name__, repr(config), repr(device)]
    # Which value an argument gets, a launch finds by its name.
    parts.append(source_hash(structure.kind, device))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
