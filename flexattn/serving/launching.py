"""State of a plan between launches: known tensors, streams, and kernels that gave up."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.errors import StalledError
from flexattn.problem.facts import facts_of
from flexattn.runtime.build import Launcher
from flexattn.util.locks import Lru, renewed

# Plans that calls have made which hold none, by what these are for; one is made at a time.
kept_plans: Lru[Any, Any] = Lru(128)
making = renewed(threading.Lock())
# Pairs that are known at once: the caches of a model's layers, lengths and tables of its batches.
_KNOWN = 256


class Seen(NamedTuple):
    """Two tensors, not kept alive, and their facts."""

    first: Callable[[], Tensor | None]
    second: Callable[[], Tensor | None]
    facts: tuple[Any, ...]


def _nothing() -> None:
    """In the place of a weak reference to a tensor that was not given."""


NOTHING = Seen(_nothing, _nothing, ())


def see(known: dict[int, Seen], first: Tensor, second: Tensor | None) -> Seen:
    """The known facts of two tensors, by the first one's id; read now where there are none."""
    found = known.get(id(first))
    if found is None or found.first() is not first or found.second() is not second:
        if len(known) >= _KNOWN:
            known.clear()
        if second is None:
            found = Seen(weakref.ref(first), _nothing, facts(first))
        else:
            both = facts(first) + facts(second)
            found = Seen(weakref.ref(first), weakref.ref(second), both)
        known[id(first)] = found
    return found


def facts(tensor: Tensor) -> tuple[Any, ...]:
    """All that checks look at."""
    learned = tensor.requires_grad and torch.is_grad_enabled()
    return (*facts_of(tensor), tensor.device, learned)


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


class Beside:
    """A stream in which a part of the current stream's work runs beside the rest of it.

    follow: the current stream waits for what the stream of the last call holds. begin: the same,
    and that work waits for what the stream holds now. As a context, launches inside are its work;
    at the end the stream waits for them. launch: the same of one launcher, without the
    microseconds that a change of streams takes in Python. Captured, it is a branch of the graph.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            self._begun, self._ended = torch.cuda.Event(), torch.cuda.Event()
            self._current = torch.cuda.current_stream(device)
        self._inside = torch.cuda.StreamContext(self._stream)
        self._device = device
        self._callers = Streams(device.index)

    def follow(self) -> torch.cuda.Stream:
        # The raw handle costs the host a tenth of what the stream itself does.
        if torch._C._cuda_getCurrentRawStream(self._device.index) != self._current.cuda_stream:
            self._current = torch.cuda.current_stream(self._device)
        if self._current.cuda_stream != self._callers.last:
            # The last launch of the run before reads what this one's passes write.
            with torch.cuda.device(self._device):
                self._callers.follow()
        return self._current

    def begin(self) -> None:
        self._begun.record(self.follow())

    def launch(self, launcher: Launcher, given: Sequence[Any]) -> None:
        if self._device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self._device):
                return self.launch(launcher, given)
        self._stream.wait_event(self._begun)
        launcher.launch(self._stream.cuda_stream, given)
        self._end()

    def __enter__(self) -> None:
        self._stream.wait_event(self._begun)
        self._inside.__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            self._end()
        finally:
            self._inside.__exit__(*error)

    def _end(self) -> None:
        self._ended.record(self._stream)
        self._current.wait_event(self._ended)


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
