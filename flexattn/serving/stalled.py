"""GivenUp: a word in the host's memory that a launch sets where it gave up waiting."""

from __future__ import annotations

import ctypes

import torch

from flexattn.errors import StalledError


class GivenUp:
    """The word of one plan. Kernels write it across the bus; runs read it here, and never wait.

    word: int32 [1] in pinned memory, 0 until a launch has waited in vain.
    """

    def __init__(self) -> None:
        pinned = torch.cuda.is_available()
        self.word = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._value = ctypes.c_int32.from_address(self.word.data_ptr())

    def check(self) -> None:
        """Raise StalledError where an earlier run gave up."""
        if self._value.value:
            raise StalledError(
                "an earlier run of this plan waited in vain for a part of its own launch",
                "seq_lens and cu_seqlens_q stay as they are while a run reads them; that run's "
                "rows are NaN",
                "make a new plan",
            )
