"""`python -m bench.decode`: one query token, GPU time of graph replays from a cold L2, in TB/s.

`--host --rows '^host'` times the host's part of repeated calls, and of a cache that grows.
"""

from __future__ import annotations

import sys

from bench.command import main
from bench.host import growing, host_rows
from bench.peers import PEERS, TEMPLATES, sdpa
from bench.random_draw import random_rows
from bench.rows import decode_rows
from bench.runner import Method

METHOD = Method(rounds=20, min_ms=5.0, flush_l2=True, graph=True)

if __name__ == "__main__":
    known = {name: growing(peer) for name, peer in PEERS.items()}
    named = {**TEMPLATES, "torch-sdpa": growing(sdpa(None))}
    rows = [*decode_rows(), *host_rows(), *random_rows("decode")]
    sys.exit(main("decode", rows, METHOD, known=known, named=named))
