"""export(): a directory from which a fresh process serves tuned problems without compiling.

It works on any machine: kernels are compiled for a named device, which need not be here. What it
writes is read by `flexattn.runtime.kernel_store` and by `flexattn.mods.recorded`, where
FLEXATTN_BINARIES names the directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from flexattn.device import Device
from flexattn.errors import FlexAttnError, UnsupportedError
from flexattn.kernels.base.source import Source
from flexattn.kernels.block_mask.source import render_block_mask
from flexattn.kernels.choose.options import NONE, Options
from flexattn.kernels.choose.registry import family_of, leading
from flexattn.measure.task import Task
from flexattn.mods.bind import record
from flexattn.problem import Problem, all_captures
from flexattn.records.store import Store
from flexattn.runtime.build import Kernel, path_of, unloaded
from flexattn.runtime.candidates import Choice
from flexattn.runtime.decay_skip import sources
from flexattn.runtime.dispatch import chosen
from flexattn.runtime.kernel_store import KernelStore
from flexattn.runtime.outcomes import memory
from flexattn.settings import current, override
from flexattn.tuning.evaluator import SILENT, Progress

_Mods = Iterable[tuple[Callable[..., Any], str]]
# (lse, max_scores) of flex_attention's calls: with no statistics, and with return_lse.
DEFAULT_OUTPUTS = ((False, False), (True, False))


@dataclass(frozen=True, slots=True)
class Exported:
    """What a directory got: kernels that attend or combine, kernels that make block masks, mods.

    traced: mods that cannot be recognised in another process, by name: they are traced there.
    """

    kernels: int
    block_masks: int
    mods: int
    traced: tuple[str, ...]


def export(
    tasks: Iterable[Task],
    device: Device,
    out: Path,
    store: Store | None = None,
    mods: _Mods = (),
    outputs: Iterable[tuple[bool, bool]] = DEFAULT_OUTPUTS,
    progress: Progress = SILENT,
) -> Exported:
    """Write what a server of these tasks on this device needs to compile and trace nothing.

    store: tuned records that choose the configs, before all others that dispatch looks at. mods:
    the callables of the tasks with their kind, "score" or "mask": a Task holds expressions alone.
    outputs: which statistics the calls ask for, as (lse, max_scores). What lies in `out` already
    stays, and the same kernel is compiled once.

    Raises UnsupportedError for a device whose kernels only Triton can launch, BuildError for a
    kernel that does not compile.
    """
    if device.backend != "cuda":
        raise UnsupportedError(
            f"binaries for {device.name}",
            "kernels are launched from files through NVIDIA's driver alone",
            "export without binaries: the first call compiles there",
        )
    found, wanted = list(tasks), list(outputs)
    writer, kernels, block_masks = _Writer(out, device), 0, 0
    first = (store.root, *current().cache) if store is not None else ()
    with override(cache=first) if first else nullcontext():
        progress.stage("binaries", len(found))
        for task in found:
            for lse, max_scores in wanted:
                structure = replace(task.problem.structure, lse=lse, max_scores=max_scores)
                kernels += writer.attend(replace(task.problem, structure=structure))
            block_masks += writer.block_mask(task)
            progress.step(task.title)
    known = [(fn, record(fn, kind, out)) for fn, kind in mods]
    traced = tuple(str(getattr(fn, "__name__", fn)) for fn, sure in known if not sure)
    return Exported(kernels, block_masks, len(known) - len(traced), traced)


class _Writer:
    """Compiles each source once."""

    def __init__(self, root: Path, device: Device) -> None:
        self._store = KernelStore(root)
        self._device = device
        self._kernels: dict[str, Kernel] = {}
        self._written: set[str] = set()

    def attend(self, problem: Problem) -> int:
        """The kernels that dispatch would choose for a problem; how many are new.

        Where a later template serves a short prompt, the first one's are there for long ones.
        """
        before = len(self._written)
        served = chosen(problem, self._device, NONE, self._compiled)
        self._choice(problem, served)
        first = next(leading(problem.structure, self._device))
        if served.how == "default" and family_of(served.config) is not first:
            for config in islice(first.at_other_sizes(problem, self._device), 1):
                with suppress(FlexAttnError):  # it may have been left for not building
                    long = Options(exact=config)
                    self._choice(problem, chosen(problem, self._device, long, self._compiled))
        return len(self._written) - before

    def _choice(self, problem: Problem, choice: Choice) -> None:
        config = choice.config
        self._store.write_sources(problem.structure, config, self._device, choice.sources)
        for source in (*choice.sources, *sources(problem.structure, config, self._device)):
            self._write(source)

    def block_mask(self, task: Task) -> int:
        """The kernel that finds the blocks of a task's mask; how many are new."""
        sparsity, before = task.problem.structure.sparsity, len(self._written)
        if task.mask is not None and sparsity is not None:
            block = sparsity.q_block, sparsity.kv_block
            self._write(render_block_mask(all_captures(task.mask), *block, self._device))
        return len(self._written) - before

    def _compiled(self, source: Source) -> Kernel:
        known = self._kernels.get(source.hash)
        if known is None:
            known = self._kernels[source.hash] = unloaded(source, self._device)
        return known

    def _write(self, source: Source) -> None:
        """Compile and write a kernel that is not there yet."""
        if source.hash in self._written:
            return
        kernel = self._compiled(source)
        if kernel.binary is None:
            raise UnsupportedError(
                f"{path_of(source)} as a binary", "it needs what only Triton's own launcher does"
            )
        binary = replace(kernel.binary, verified=memory().verified(source, self._device))
        self._store.write_binary(source, binary, kernel.compiled.metadata.triton_version)
        self._written.add(source.hash)
