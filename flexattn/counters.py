"""Zeroes from which blocks of a kernel count: one for each launch, and many made at a time."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["counter"]

# A zero of its own would cost a call an allocation and a launch: 5 us of the host, and on the GPU
# a kernel before the kernel.
_MADE = 512
_STREAMS = 64


class _Left(threading.local):
    """Zeroes that no launch has had yet, by the stream that made them."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[torch.device, int], list[Tensor]] = {}


_left = _Left()


def counter(device: torch.device, stream: int) -> Tensor:
    """An int32 zero [1] for one launch on a stream, -1 for none; what is captured makes its own.

    Memory goes back in the order of the stream that made it, so a kernel may still count in a zero
    that nobody holds. A graph that is replayed needs a zero each time: it makes it.
    """
    if stream < 0 or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    left = _left.by_stream.get((device, stream))
    if not left:
        if len(_left.by_stream) >= _STREAMS:
            _left.by_stream.clear()
        made = torch.zeros(_MADE, dtype=torch.int32, device=device)
        left = _left.by_stream[device, stream] = list(made.split(1))
    return left.pop()
