"""`python -m bench.decode`: one query token, GPU time of graph replays from a cold L2, in TB/s.

`python -m bench.decode --serving` runs bench.serving instead: paged and ragged batches.
"""

from __future__ import annotations

import sys

from bench.command import main
from bench.host import host_report
from bench.rows import decode_rows
from bench.runner import Method
from bench.serving import main as serving

METHOD = Method(rounds=20, min_ms=5.0, flush_l2=True, graph=True)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--serving"]:
        sys.exit(serving(sys.argv[2:]))
    sys.exit(main("decode", decode_rows(), METHOD, host=host_report))
