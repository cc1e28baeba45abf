"""Benchmarks: ours beside torch, interleaved in one run, behind the accuracy gate."""

import os

# A row that names a config is of that config: what does not build fails, and nothing stands in.
os.environ.setdefault("FLEXATTN_STRICT", "1")
