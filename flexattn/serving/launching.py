"""Launch on the current stream of a plan's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexattn.runtime.build import Launcher
from flexattn.serving.streams import Streams


def launch_here(
    launcher: Launcher, gpu: int, given: Sequence[Any], streams: Streams | None = None
) -> None:
    """Launch on the stream that is current on a GPU; -1: in the interpreter.

    given: the values whose names the launcher was prepared for, in their order. streams: of a plan
    whose memory a run reads and writes; the launch comes after the one before, on whatever stream.
    """
    if gpu < 0:
        launcher.launch(-1, given)
    elif gpu == torch._C._cuda_getDevice():
        stream = torch._C._cuda_getCurrentRawStream(gpu)
        if streams is not None and stream != streams.last:
            streams.follow()
        launcher.launch(stream, given)
    else:
        with torch.cuda.device(gpu):
            launch_here(launcher, gpu, given, streams)
