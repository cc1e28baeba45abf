"""Streams: runs of one plan on several CUDA streams, each after the one before."""

from __future__ import annotations

import torch


class Streams:
    """The stream of a plan's last run, for which a run on another one waits.

    What a plan keeps between runs (workspace, counters, output) is then read and written as on one
    stream. Runs under the capture of a CUDA graph wait for nothing and are not remembered: a graph
    depends on no work outside of it, and nobody tells where it is replayed.

    last: the raw handle of the stream, -1 without a GPU; comparing it is all that most runs do.
    """

    __slots__ = ("_gpu", "_stream", "last")

    def __init__(self, gpu: int) -> None:
        """gpu: its index, -1 for none; its current stream writes what the plan is made of."""
        self._gpu = gpu
        self._stream = torch.cuda.current_stream(gpu) if gpu >= 0 else None
        self.last = -1 if self._stream is None else int(self._stream.cuda_stream)

    def follow(self) -> None:
        """Let the GPU's current stream wait for what the last one holds; the GPU is current."""
        now = torch.cuda.current_stream(self._gpu)
        before = self._stream
        assert before is not None
        if torch.cuda.is_current_stream_capturing():
            return
        with torch.cuda.stream(before):
            # Waiting for a stream under capture would draw this one into its graph.
            captured = torch.cuda.is_current_stream_capturing()
        if not captured:
            now.wait_stream(before)
        self._stream, self.last = now, int(now.cuda_stream)
