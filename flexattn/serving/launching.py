"""Launch on the current stream of a plan's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexattn.runtime.build import Launcher


def launch_here(launcher: Launcher, gpu: int, given: Sequence[Any]) -> None:
    """Launch on the stream that is current on a GPU; -1: in the interpreter.

    given: the values whose names the launcher was prepared for, in their order.
    """
    if gpu < 0:
        launcher.launch(-1, given)
    elif gpu == torch._C._cuda_getDevice():
        launcher.launch(torch._C._cuda_getCurrentRawStream(gpu), given)
    else:
        with torch.cuda.device(gpu):
            launcher.launch(torch._C._cuda_getCurrentRawStream(gpu), given)
