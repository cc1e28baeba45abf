"""presets: workloads of public models, a TOML file each, with the numbers of their configs."""

from __future__ import annotations

from pathlib import Path


def files() -> dict[str, Path]:
    """The presets' files by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"))}
