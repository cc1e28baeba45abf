"""`python -m bench.cold`: the time of the first call of a tuned problem, in fresh processes.

The config comes from a record; its kernel is compiled, taken from Triton's cache or loaded as a
binary. Each sample is a process of its own. What `bench.cold_child` times apart (imports, the CUDA
context, the block mask) goes to stderr. A row is red where its record does not serve, where ways
of starting compute different outputs, and where a process with binaries compiles or traces.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.cold_child import LENGTHS
from bench.command import main, named
from bench.peers import OURS
from bench.results import Gate
from bench.runner import Kind, Method, Uncounted, fresh, in_turns

# Whether Triton's cache is kept between processes, and whether the exported directory is named.
WARM, EMPTY, BINARIES = (
    f"{OURS} {how}" for how in ("warm Triton cache", "empty Triton cache", "binaries")
)
METHOD = Method(rounds=5)


@dataclass(frozen=True)
class ColdRow(Uncounted):
    """A kind of call, as `bench.cold_child` names it."""

    name: str
    group = "cold"


ROWS = tuple(map(ColdRow, LENGTHS))


@dataclass(frozen=True)
class Exported:
    """A row's record and exported directory, in a folder that goes with it; sums of outputs."""

    row: ColdRow
    folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)
    checksums: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """A way to start; a call is a fresh process, and gives what it did."""

    name: str
    x: Exported

    def __call__(self) -> dict[str, Any]:
        folder, binaries = Path(self.x.folder.name), self.name == BINARIES
        with tempfile.TemporaryDirectory() as empty:
            own = {
                "TRITON_CACHE_DIR": str(folder / "warm") if self.name == WARM else empty,
                "FLEXATTN_CACHE_DIR": empty,
                "FLEXATTN_CACHE": str(folder / "records"),
            }
            own |= {"FLEXATTN_BINARIES": str(folder / "exported")} if binaries else {}
            compiler = "none" if binaries else "compiler"
            found = fresh("bench.cold_child", "run", self.x.row.name, compiler, **own)
        print(self.name, found["seconds"], file=sys.stderr, flush=True)
        return found


def _make(row: ColdRow, method: Method) -> Exported:
    x = Exported(row)
    folder = Path(x.folder.name)
    own = {"TRITON_CACHE_DIR": str(folder / "warm"), "FLEXATTN_CACHE_DIR": str(folder / "none")}
    fresh("bench.cold_child", "export", row.name, str(folder / "exported"), **own)
    return x


def judge(start: Start, x: Exported) -> Gate:
    """The gate of one more process."""
    found = start()
    x.checksums[start.name] = found["checksum"]
    worked = start.name == BINARIES and (found["compiled"] or found["traces"])
    right = found["how"] == "hit" and len(set(x.checksums.values())) == 1 and not worked
    facts = {name: value for name, value in found.items() if name != "seconds"}
    return Gate(right, f"{start.name}: {facts}")


COLD = Kind(
    _make, judge, Start, race=in_turns(lambda start: 1e6 * start()["seconds"]["first call"])
)
run = partial(main, "cold", ROWS, METHOD, known=named(EMPTY, WARM, BINARIES), kind=COLD)


if __name__ == "__main__":
    sys.exit(run())
