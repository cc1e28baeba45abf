"""Judging and timing kernels: the accuracy gate, an interleaved race, a worker that survives."""
