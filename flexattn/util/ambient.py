"""without_modes(): a block in which the modes that a caller is in have no part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def without_modes() -> Iterator[None]:
    """A block on real tensors, on the CPU unless said otherwise, whose tensors autograd may save.

    A default device, inference mode, a FakeTensorMode and other dispatch modes of the caller's do
    not reach it; gradients are recorded, or not, as outside of it. The default dtype is the
    process's: who makes floats names their dtype.
    """
    grad = torch.is_grad_enabled()
    # Leaving inference mode would turn gradients on.
    with (
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.set_grad_enabled(grad),
        torch.device("cpu"),
    ):
        yield
