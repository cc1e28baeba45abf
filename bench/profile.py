"""`python -m bench.profile ROW…`: each row's attention once, for a profiler.

    ncu --set full --profile-from-start off -o report python -m bench.profile mods-8k-softcap

A first call compiles and warms up; only the second stands between the marks of the profiler.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from bench.inputs import make
from bench.peers import Refusal, call_of, ours
from bench.rows import mods_rows, prefill_rows

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows; the status is 2 for a row that there is not, or without a GPU."""
    rows = {row.name: row for row in (*prefill_rows(), *mods_rows())}
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__)
    parser.add_argument("rows", nargs="+", choices=rows, metavar="ROW", help=", ".join(rows))
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU is visible to torch: a profiler needs one", file=sys.stderr)
        return 2
    marks: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for name in args.rows:
        call = call_of(ours, make(rows[name], "cuda"))
        assert not isinstance(call, Refusal)
        call()
        torch.cuda.synchronize()
        marks.cudaProfilerStart()
        call()
        torch.cuda.synchronize()
        marks.cudaProfilerStop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
