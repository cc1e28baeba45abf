"""Attention through an NKI kernel: by AWS's compiler, our interpreter, or AWS's simulator.

kernel() is the public way to Trainium: two mods and the shapes of a call as an NKI kernel with all
that it is called with. It is written from the documentation of NKI 0.7 and torch-neuronx 2.14
(Neuron SDK 2.33) and tested with stand-ins for both. No device has run it.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.create import create_block_mask
from flexattn.device import NEURON
from flexattn.device.neuroncore import CORES
from flexattn.errors import ConfigError, InputError, KernelError, UnsupportedError
from flexattn.kernels.base.config import describe
from flexattn.mods import Bound, bind
from flexattn.mods.expr import MaskMod, ScoreMod
from flexattn.neuron.config import CHUNK, NkiConfig, NkiPrefillConfig, visits_of
from flexattn.neuron.family import default_config, target_reasons
from flexattn.neuron.instance import driver_target, nki_op, real_package
from flexattn.neuron.interpreter.interpret import Interpreted, interpret
from flexattn.neuron.schedule import schedule_of
from flexattn.neuron.source import NkiSource, render_nki, render_nki_combine
from flexattn.neuron.tables import TABLE_LIMIT, make_table
from flexattn.problem import DTYPES, FP8, Problem, Shape, checks, kind_for, make_problem
from flexattn.problem.mask_lists import keeps_all
from flexattn.runtime.codecache import module_of, text_file
from flexattn.runtime.launch import Lists, Outputs
from flexattn.settings import neuron_names
from flexattn.verify.oracle import moved


@dataclass(frozen=True)
class NkiOutputs:
    """out [B, Hq, L, Dv]; lse and max_scores [B, Hq, L] where the structure asks for them.

    runs: what the interpreter found of each kernel; empty where something else ran them.
    """

    out: Tensor
    lse: Tensor | None
    max_scores: Tensor | None
    runs: tuple[Interpreted, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """A kernel with all that it is called with but q, k and v.

    cores: physical ones, which share the rows. source: its text, and the names of its arguments.
    combine: what merges the splits of a decode. extra: the scale, the schedule, tables of what the
    mods capture, numbers that they capture.
    """

    problem: Problem
    config: NkiConfig
    target: str
    cores: int
    source: NkiSource
    combine: NkiSource | None
    extra: tuple[Any, ...]

    @cached_property
    def function(self) -> Any:
        """The kernel as nki.jit makes it; `function[cores](*arguments)` launches it.

        Raises UnsupportedError where AWS's nki is not installed.
        """
        return _function(self.source)

    @cached_property
    def merge(self) -> Any:
        """As function, of `combine`; it takes q as the kernel does and the kernel's results."""
        return None if self.combine is None else _function(self.combine)

    def arguments(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        """The kernel's arguments, on q's device; decode's rows are packed head by head.

        Raises InputError for shapes that it was not made for.
        """
        problem, s = self.problem, self.problem.structure
        B, Hq, L, D = q.shape
        rows = (problem.B, problem.Hq, problem.q_len, s.head_dim_qk)
        keys = (problem.Hkv, problem.kv_len)
        ends = ((*keys, s.head_dim_qk), (*keys, s.head_dim_v))
        batch = {k.shape[0], v.shape[0]} <= {1, problem.B}
        if q.shape != rows or not batch or (k.shape[1:], v.shape[1:]) != ends:
            raise InputError(
                f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
                f"the kernel was made for {problem.describe()}",
                "make one for these: flexattn.neuron.kernel",
            )
        packed = q.contiguous().view(B, Hq // s.packed_heads, s.packed_heads * L, D)
        extra = (x.to(q.device) if isinstance(x, Tensor) else x for x in self.extra)
        return (packed, k.contiguous(), v.contiguous(), *extra)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> NkiOutputs:
        """Run it where AWS's packages are; on `neuron` tensors as an operator of torch's."""

        def kernel(source: NkiSource, given: tuple[Any, ...]) -> Sequence[Tensor]:
            if q.device.type == "neuron":
                return self._operator(source, given)
            return _as_list(self._function_of(source)[self.cores](*given))

        return self.run(q, k, v, kernel)

    def write(self, folder: Path) -> None:
        """Write what calls the kernel without this library: its file, arguments and tables.

        kernel.py and, of splits, combine.py; arguments.py has the names of the kernel's arguments
        and those that are no tensors, tables.pt the others by name.
        """
        folder.mkdir(parents=True, exist_ok=True)
        problem, heads = self.problem, self.problem.structure.packed_heads
        names = self.source.arguments
        given = dict(zip(names[3:], self.extra, strict=True))
        tables = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        rows = problem.B, problem.Hq // heads, heads * problem.q_len
        lines = [
            f"# {problem.describe()}, for {self.target}",
            "# kernel[CORES] takes what NAMES says, in order; tables.pt has the tensors by name.",
            f"# Its q has the shape {(*rows, problem.structure.head_dim_qk)}.",
            "# combine[CORES] takes that q, and the kernel's results.",
            f"CORES = {self.cores}",
            f"NAMES = {names!r}",
            *(f"{name.upper()} = {x!r}" for name, x in given.items() if name not in tables),
        ]
        (folder / "kernel.py").write_text(self.source.text, encoding="utf-8")
        if self.combine is not None:
            (folder / "combine.py").write_text(self.combine.text, encoding="utf-8")
        (folder / "arguments.py").write_text("\n".join((*lines, "")), encoding="utf-8")
        torch.save(tables, folder / "tables.pt")

    def _function_of(self, source: NkiSource) -> Any:
        return self.function if source is self.source else self.merge

    def _operator(self, source: NkiSource, given: tuple[Any, ...]) -> Sequence[Tensor]:
        """A kernel's results by an operator that nki_op makes, which torch.compile can trace.

        It takes the tensors; all else is a part of it, and of its name.
        """
        tensors = [each for each in given if isinstance(each, Tensor)]
        rest = [None if isinstance(each, Tensor) else each for each in given]
        digest = hashlib.sha256(repr((source.hash, self.cores, rest)).encode()).hexdigest()
        name = f"nki_{digest[:24]}"
        if not hasattr(torch.ops.flexattn, name):
            compiled, register = self._function_of(source)[self.cores], nki_op()

            def call(tensors):  # type: ignore[no-untyped-def]
                left = iter(tensors)
                return _as_list(compiled(*(next(left) if x is None else x for x in rest)))

            # Classes, which torch takes from here; of names it knows its own alone.
            call.__annotations__ = {"tensors": list[Tensor], "return": list[Tensor]}
            register(f"flexattn::{name}", call, mutates_args=())
        found: list[Tensor] = getattr(torch.ops.flexattn, name)(tensors)
        return found

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kernel: Callable[[NkiSource, tuple[Any, ...]], Sequence[Tensor]],
    ) -> NkiOutputs:
        """Attention, in the shapes of attention; kernel: runs a source on its arguments."""
        given, last = self.arguments(q, k, v), self.source
        results = kernel(last, given)
        if self.combine is not None:
            last = self.combine
            results = kernel(last, (given[0], *results))
        problem = self.problem
        rows = (problem.B, problem.Hq, problem.q_len)
        found = {
            name: value.reshape(*rows, *([-1] if name == "out" else []))
            for name, value in zip(last.results, results, strict=True)
        }
        return NkiOutputs(found["out"], found.get("lse"), found.get("max_scores"))

    def interpret(self, q: Tensor, k: Tensor, v: Tensor) -> NkiOutputs:
        """Run it in the strict interpreter; raises KernelError for a broken rule."""
        runs: list[Interpreted] = []

        def kernel(source: NkiSource, given: tuple[Any, ...]) -> Sequence[Tensor]:
            core = CORES[self.target]
            runs.append(interpret(source.text, given, core, programs=self.cores))
            return runs[-1].results

        return replace(self.run(q, k, v, kernel), runs=tuple(runs))


def _function(source: NkiSource) -> Any:
    simulate, why = real_package()
    if simulate is None:
        raise UnsupportedError(
            "an NKI kernel to run by AWS's compiler", why, "interpret(q, k, v) runs it anywhere"
        )
    # As the real package decorates it; it looks its text up.
    return module_of(nki_path(source), source.text).kernel


def _as_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple) else [results]


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


MODULES = {"nki", "nki.isa", "nki.language"}
# Names of nl of the interface before 0.2; names that are deprecated, or were removed in 0.7.
OLD = {"arange", "mgrid", "par_dim"}
GONE = {"static_range": "range", "affine_range": "range", "sequential_range": "range",
        "dynamic_range": "nl.fori_loop"}  # fmt: skip


def lint(source: str) -> None:
    """Raise KernelError that names each line that NKI would refuse."""
    found = findings(source)
    if found:
        raise KernelError("\n        ".join(found), "NKI 0.7 refuses these, or has them no more")


def findings(source: str) -> list[str]:
    """Lines that break a rule, each with what it is: "12: import neuronxcc"."""
    tree = ast.parse(source)
    found = [(line, what) for node in ast.walk(tree) for line, what in _node(node)]
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            found += _found_in(statement)
        elif not isinstance(statement, ast.Import | ast.ImportFrom):
            found.append(
                (statement.lineno, "a statement at module level: a kernel reads no state")
            )
    return [f"{line}: {what}" for line, what in sorted(set(found))]


def _found_in(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    decorators = [ast.unparse(each) for each in function.decorator_list]
    if decorators != ["nki.jit"]:
        yield function.lineno, f"decorators {decorators}: a kernel has nki.jit alone"
    nodes = list(ast.walk(function))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    known = {"nki", "nl", "nisa", *(node.arg for node in nodes if isinstance(node, ast.arg))}
    known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    known |= set(vars(builtins)) | {x.id for x in names if isinstance(x.ctx, ast.Store)}
    for name in names:
        if name.id not in known:
            yield name.lineno, f"the name {name.id}: a kernel reads its parameters alone"
    if not any(isinstance(node, ast.Return) for node in nodes):
        yield function.lineno, "no result"


def _node(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        for keyword in node.keywords:
            if keyword.arg == "mask" and name.startswith("nisa."):
                yield node.lineno, f"{name} with mask=, which is of the old interface"
            if keyword.arg == "buffer" and isinstance(keyword.value, ast.Constant):
                yield node.lineno, "a buffer that is a string: buffers are names of nl"
    elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "nl":
        if node.attr in OLD:
            yield node.lineno, f"nl.{node.attr}, which is of the old interface"
        elif node.attr in GONE:
            yield node.lineno, f"nl.{node.attr}: use {GONE[node.attr]}"
    elif isinstance(node, ast.Import | ast.ImportFrom):
        modules = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for name in modules:
            if name not in MODULES:
                yield node.lineno, f"import {name}"


_CPU = torch.device("cpu")


def kernel(
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | BlockMask | None,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    scale: float | None = None,
    return_lse: bool = False,
    target: str = "trn2",
    cores: int | None = None,
    config: NkiConfig | None = None,
) -> Prepared:
    """The kernel of flex_attention for two mods and shapes, on a target such as "trn2".

    Called with q, k and v it runs where AWS's packages are; `interpret` of them runs anywhere. Its
    `function` is what nki.jit makes, and `arguments(q, k, v)` what that takes: the schedule of key
    tiles, and tables of what the mods read of the tensors that they capture now.

    q_shape [B, Hq, L, E], k_shape [B or 1, Hkv, S, E], v_shape [B or 1, Hkv, S, Ev], k_shape where
    None. mask_mod: or a BlockMask of one. scale: 1/sqrt(E) where None. cores: physical cores of a
    logical one, which share the rows: 1 or 2; where None what NEURON_LOGICAL_NC_CONFIG says, else
    the compiler's default. config: the first that fits where None.

    Raises InputError, ModError, ConfigError, and UnsupportedError for what the target cannot
    express.
    """
    shapes = tuple(q_shape), tuple(k_shape), tuple(k_shape if v_shape is None else v_shape)
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    checks.check_tensors(q, k, v, True)
    block_mask = None
    if isinstance(mask_mod, BlockMask):
        block_mask, mask_mod = mask_mod, mask_mod.mask_mod
        checks.check_block_mask(block_mask, q, k)
    mask = bind(mask_mod, "mask")
    if mask_mod is not None and mask is not None and block_mask is None:
        read = mask.mod.expr.variables
        B, H = (size if name in read else None for name, size in zip("bh", q.shape, strict=False))
        block_mask = create_block_mask(mask_mod, B, H, q.shape[2], k.shape[2], "cpu")
    return _prepared(
        (q, k, v), bind(score_mod, "score"), mask, block_mask,
        checks.check_scale(scale, q.shape[-1]), (return_lse, False), target, cores, config,
    )  # fmt: skip


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Bound | None,
    mask: Bound | None,
    block_mask: BlockMask | None,
    scale: float,
    statistics: tuple[bool, bool],
) -> Outputs:
    """As Plugin.attend; raises UnsupportedError where AWS's packages are not those of SDK 2.33."""
    target, why = neuron_names()[0], ""
    if not target:
        target, why = driver_target()
    if not target:
        raise UnsupportedError(
            f"query is on {q.device}", why, "set NEURON_PLATFORM_TARGET_OVERRIDE to trn2 or trn3"
        )
    run = _prepared((q, k, v), score, mask, block_mask, scale, statistics, target, None, None)
    found = run(q, k, v)
    return Outputs(found.out, found.lse, found.max_scores)


def _prepared(
    tensors: tuple[Tensor, Tensor, Tensor],
    score: Bound | None,
    mask: Bound | None,
    block_mask: BlockMask | None,
    scale: float,
    statistics: tuple[bool, bool],
    target: str,
    cores: int | None,
    config: NkiConfig | None,
) -> Prepared:
    q, k, v = tensors
    if target not in CORES:
        raise InputError(f"target={target!r}", f"it is one of {', '.join(CORES)}")
    cores = cores_of(target, cores)
    if q.dtype in FP8 or checks.mixes(q, k):
        raise UnsupportedError(
            f"query is {q.dtype}, key {k.dtype}, for {target}",
            "kernels for Neuron take one dtype: float16, bfloat16 or float32",
            "convert them: x.to(torch.bfloat16)",
        )
    B, Hq, L, D = q.shape
    shape = Shape(B, Hq, k.shape[1], L, k.shape[2], D, v.shape[-1])
    lists = sparsity = None
    if block_mask is not None and not keeps_all(block_mask):
        lists = Lists.of(block_mask).to(_CPU)
        sparsity = lists.sparsity(block_mask.BLOCK_SIZE, shape.Hq // shape.Hkv)
    score, mask = moved(score, _CPU), None if lists is None else moved(mask, _CPU)
    problem = make_problem(
        kind_for(shape, NEURON[target].num_sms)[0], DTYPES[q.dtype], shape, score, mask, sparsity,
        lse=statistics[0], max_scores=statistics[1], positive_scale=scale > 0,
    )  # fmt: skip
    if config is None:
        config = first_config(problem, target, cores)
    elif config.kind != problem.structure.kind:
        problem = replace(problem, structure=replace(problem.structure, kind=config.kind))
    return prepare(
        problem, config, target, scale=scale, score=score, mask=mask, lists=lists, cores=cores
    )


def cores_of(target: str, cores: int | None) -> int:
    """The physical cores of a logical one, by the argument, the environment or the target."""
    most = CORES[target].physical_cores
    asked = neuron_names()[1] if cores is None else cores
    found = str(asked or most)
    if found not in ("1", str(most)):
        raise ConfigError(
            f"{found} physical cores of a logical one on {target}",
            f"it has 1{f' or {most}' if most > 1 else ''}",
            "see cores, and NEURON_LOGICAL_NC_CONFIG",
        )
    return int(found)


def first_config(problem: Problem, target: str, cores: int) -> NkiConfig:
    """The default; of a decode without rows for all cores its keys are split over them."""
    config = default_config(problem, target)
    tiles = problem.B * problem.Hkv * visits_of(problem, config)
    if isinstance(config, NkiPrefillConfig) or tiles >= cores or problem.kv_len <= cores * CHUNK:
        return config
    split = replace(config, num_splits=cores)
    return config if target_reasons(split, problem, target) else split
