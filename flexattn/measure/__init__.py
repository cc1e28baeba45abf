"""Judging and timing a kernel: the accuracy gate, and an interleaved timer."""
