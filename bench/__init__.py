"""Benchmarks: ours beside torch, interleaved in one run, behind the accuracy gate."""
