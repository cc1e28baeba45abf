"""Zeroes from which blocks of a kernel count: one for each launch, and many made at a time."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

# A zero of its own would cost a call an allocation and a launch: 5 us of the host, and on the GPU
# a kernel before the kernel.
_MADE = 512


class _Left(threading.local):
    """Zeroes that no launch of this thread has had yet, by their GPU."""

    def __init__(self) -> None:
        self.on: dict[torch.device, list[Tensor]] = {}


_left = _Left()


def counter(device: torch.device, stream: int) -> Tensor:
    """An int32 zero [1] for one launch on a stream, -1 for none; what is captured makes its own.

    Memory goes back in the order of the stream that made it, so a kernel may still count in a zero
    that nobody holds. A graph that is replayed needs a zero each time: it makes it. So does any
    stream but the default one: whoever is about to capture allocates there from a graph's memory,
    which is not ours to keep.
    """
    if stream or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    left = _left.on.get(device)
    if not left:
        made = torch.zeros(_MADE, dtype=torch.int32, device=device)
        # A tensor that a transform made has no memory, and is gone when the transform is.
        if type(made) is not Tensor or not made.data_ptr():
            return made[:1]
        left = _left.on[device] = list(made.split(1))
    return left.pop()
