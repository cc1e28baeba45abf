"""Beside: a part of a plan's launches in a stream of its own, beside the others."""

from __future__ import annotations

import torch

from flexattn.serving.streams import Streams


class Beside:
    """A stream in which a part of the current stream's work runs beside the rest of it.

    follow: the current stream waits for what the stream of the last call holds. begin: the same,
    and that work waits for what the stream holds now. As a context, launches inside are its work;
    at the end the stream waits for them. Captured, it is a branch of the graph.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            self._begun, self._ended = torch.cuda.Event(), torch.cuda.Event()
        self._inside = torch.cuda.StreamContext(self._stream)
        self._device = device
        self._callers = Streams(device.index)

    def follow(self) -> torch.cuda.Stream:
        current = torch.cuda.current_stream(self._device)
        if current.cuda_stream != self._callers.last:
            # The last launch of the run before reads what this one's passes write.
            with torch.cuda.device(self._device):
                self._callers.follow()
        return current

    def begin(self) -> None:
        self._begun.record(self.follow())

    def __enter__(self) -> None:
        self._stream.wait_event(self._begun)
        self._inside.__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            self._ended.record(self._stream)
        finally:
            self._inside.__exit__(*error)
        torch.cuda.current_stream(self._device).wait_event(self._ended)
