"""Attention through an NKI kernel, off the device: our interpreter, or AWS's simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexattn.device.neuroncore import CORES
from flexattn.errors import ConfigError, UnsupportedError
from flexattn.kernels.base.config import describe
from flexattn.mods import Bound
from flexattn.neuron.config import NkiConfig
from flexattn.neuron.family import target_reasons
from flexattn.neuron.interpreter.interpret import Interpreted, interpret
from flexattn.neuron.lint import lint
from flexattn.neuron.schedule import schedule_of
from flexattn.neuron.source import NkiSource, render_nki, render_nki_combine
from flexattn.neuron.tables import TABLE_LIMIT, make_table
from flexattn.problem import Problem
from flexattn.runtime.codecache import module_of, text_file
from flexattn.runtime.launch import Lists


@dataclass(frozen=True)
class NkiOutputs:
    """out [B, Hq, L, Dv]; lse and max_scores [B, Hq, L] where the structure asks for them.

    runs: what the interpreter counted of each kernel; empty where something else ran them.
    """

    out: Tensor
    lse: Tensor | None
    max_scores: Tensor | None
    runs: tuple[Interpreted, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """A kernel with all that it is called with but q, k and v. cores: physical, that share it."""

    problem: Problem
    config: NkiConfig
    target: str
    cores: int
    source: NkiSource
    combine: NkiSource | None
    extra: tuple[Any, ...]

    def arguments(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        """The kernel's arguments; decode's rows are packed head by head."""
        heads = self.problem.structure.packed_heads
        B, Hq, L, D = q.shape
        packed = q.contiguous().view(B, Hq // heads, heads * L, D)
        return (packed, k.contiguous(), v.contiguous(), *self.extra)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kernel: Callable[[NkiSource, tuple[Any, ...]], Sequence[Tensor]],
    ) -> NkiOutputs:
        """Attention, in the shapes of attention; kernel: runs a source on its arguments.

        It gives no results where it counts alone.
        """
        given, last = self.arguments(q, k, v), self.source
        results = kernel(last, given)
        if self.combine is not None:
            last = self.combine
            results = kernel(last, (given[0], *(results or self._parts(given[0]))))
        problem = self.problem
        rows = (problem.B, problem.Hq, problem.q_len)
        found = {
            name: value.reshape(*rows, *([-1] if name == "out" else []))
            for name, value in zip(last.results, results, strict=False)
        }
        out = found.get("out", torch.empty(0))
        return NkiOutputs(out, found.get("lse"), found.get("max_scores"))

    def interpret(self, q: Tensor, k: Tensor, v: Tensor, *, numerics: bool = True) -> NkiOutputs:
        """Run it in the strict interpreter; raises KernelError for a broken rule."""
        runs: list[Interpreted] = []

        def kernel(source: NkiSource, given: tuple[Any, ...]) -> Sequence[Tensor]:
            core = CORES[self.target]
            runs.append(
                interpret(source.text, given, core, programs=self.cores, numerics=numerics)
            )
            return runs[-1].results

        return replace(self.run(q, k, v, kernel), runs=tuple(runs))

    def _parts(self, q: Tensor) -> tuple[Tensor, ...]:
        """The partial results that combine reads, of the right shapes."""
        B, units, rows, _ = q.shape
        shape = (B, units, self.config.num_splits, rows)
        partial = torch.empty(*shape, self.problem.structure.head_dim_v)
        return partial, torch.empty(shape), torch.empty(shape)

    def simulate(
        self, q: Tensor, k: Tensor, v: Tensor, simulate: Callable[..., Any]
    ) -> NkiOutputs:
        """Run it in AWS's simulator, `nki.simulate`, for the target its environment names."""

        def kernel(source: NkiSource, given: tuple[Any, ...]) -> Sequence[Tensor]:
            # As the real package decorates it; it looks its text up.
            results = simulate(module_of(nki_path(source), source.text).kernel)(*given)
            results = results if isinstance(results, tuple) else (results,)
            return [torch.as_tensor(each) for each in results]

        return self.run(q, k, v, kernel)


def _exact(value: float, target: str) -> float:
    """A captured number, if it is no integer that float32 might round."""
    if isinstance(value, int) and abs(value) > TABLE_LIMIT:
        raise UnsupportedError(
            f"the captured number {value}",
            f"{target} computes in float32: captured integers are at most {TABLE_LIMIT}",
        )
    return value


def nki_path(source: NkiSource) -> Path:
    """The file of a source, beside those of other kernels; it is written if need be."""
    return text_file(f"nki_{source.hash[:24]}.py", source.text)


def prepare(
    problem: Problem,
    config: NkiConfig,
    target: str,
    *,
    scale: float,
    score: Bound | None = None,
    mask: Bound | None = None,
    lists: Lists | None = None,
    cores: int = 1,
    force: bool = False,
) -> Prepared:
    """Render and lint the kernel, and make its schedule and tables from the mods as they are now.

    force: try a config that cannot run. Raises ConfigError with the reasons for such a one,
    UnsupportedError for what the target cannot express, KernelError where lint refuses.
    """
    if min(problem.B, problem.Hq, problem.q_len, problem.kv_len) < 1:
        raise UnsupportedError(problem.describe(), "NKI kernels take no empty tensors")
    found = [] if force else target_reasons(config, problem, target)
    if found:
        raise ConfigError(describe(config), "\n        ".join(found))
    source = render_nki(problem, config, target, f"{problem.describe()} for {target}")
    lint(source.text)
    bound = {"score": score, "mask": mask}
    tables = []
    for table in source.tables:
        mod = bound[table.mod.kind]
        assert mod is not None
        tables.append(make_table(table, mod, problem, config.BLOCK_M, target))
    numbers = []
    for kind, each in bound.items():
        named = [name for name in source.arguments if name.startswith(f"{kind}_scalar")]
        numbers += [_exact(value, target) for value in (each.scalars if each and named else ())]
    combine = None
    if config.num_splits > 1:
        combine = render_nki_combine(problem, target)
        lint(combine.text)
    schedule = schedule_of(problem, config, lists, cores)
    given = (scale, schedule, *tables, *numbers)
    return Prepared(problem, config, target, cores, source, combine, given)
