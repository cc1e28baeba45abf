"""`python -m bench.prefill`: long queries, GPU time of plain calls, in TFLOP/s of useful work."""

from __future__ import annotations

import sys

from bench.command import main
from bench.peers import TEMPLATES
from bench.random_draw import random_rows
from bench.rows import mods_rows, prefill_rows, shape_rows
from bench.runner import Method

METHOD = Method(rounds=20, min_ms=10.0, flush_l2=False, graph=False)

if __name__ == "__main__":
    rows = [*prefill_rows(), *mods_rows(), *shape_rows()]
    rows += random_rows("prefill", "cross", "chunk")
    sys.exit(main("prefill", rows, METHOD, named=TEMPLATES))
