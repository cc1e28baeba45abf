"""HintedSource: a kernel whose compiler is told more than its text, warps and stages."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

from flexattn.kernels.base.source import Source

__all__ = ["HintedSource", "hinted"]


@dataclass(frozen=True, slots=True)
class HintedSource(Source):
    """hints: options of Triton's compiler for AMD, by Triton's names."""

    hints: tuple[tuple[str, int], ...] = ()


def hinted(source: Source, hints: tuple[tuple[str, int], ...]) -> Source:
    """The source with hints, under a hash of its own; as it is without any."""
    if not hints:
        return source
    values = {field.name: getattr(source, field.name) for field in fields(source)}
    values["hash"] = hashlib.sha256(f"{source.hash} {hints}".encode()).hexdigest()
    return HintedSource(**values, hints=hints)
