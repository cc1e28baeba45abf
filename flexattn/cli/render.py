"""`flexattn render`: what a mod becomes, for any device, without one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.syntax import Syntax

from flexattn.cli import arguments
from flexattn.cli.neuron import kernels
from flexattn.cli.offline import compiled
from flexattn.cli.rewritten import Rewrite, rewrites
from flexattn.cli.terminal import say, say_json, say_text
from flexattn.device import NEURON, Device, named
from flexattn.errors import InputError
from flexattn.kernels.base.config import describe
from flexattn.kernels.choose import options
from flexattn.mods.expr import pretty
from flexattn.neuron.run import path_of
from flexattn.problem import Captures, Problem
from flexattn.runtime import build
from flexattn.runtime.codecache.files import text_file
from flexattn.runtime.dispatch import Choice, candidates_of
from flexattn.runtime.fallback.chain import told
from flexattn.runtime.fallback.memory import memory
from flexattn.runtime.resources import resources


class Show(str, Enum):
    """What render prints; ptx and resources compile the kernel first."""

    expr = "expr"
    source = "source"
    ptx = "ptx"
    resources = "resources"


@dataclass(frozen=True)
class Rendered:
    """Everything render can say; what was not asked for is None."""

    problem: str
    device: str
    config: str
    origin: str
    path: str
    combine_path: str | None
    score_mod: str | None = None
    mask_mod: str | None = None
    source: str | None = None
    ptx: str | None = None
    resources: dict[str, Any] | None = None
    rewrites: list[Rewrite] | None = None


@arguments.spread
def render(
    call: arguments.Call,
    kv_len: Annotated[
        int | None,
        typer.Option(help=f"Key length; a prefill's query length, else {arguments.LENGTH}."),
    ] = None,
    block_m: Annotated[int | None, typer.Option(help="Force BLOCK_M.")] = None,
    block_n: Annotated[int | None, typer.Option(help="Force BLOCK_N.")] = None,
    num_warps: Annotated[int | None, typer.Option(help="Force num_warps.")] = None,
    num_stages: Annotated[int | None, typer.Option(help="Force num_stages.")] = None,
    split_kv: Annotated[int | None, typer.Option(help="Force SPLIT_KV.")] = None,
    use_tma: Annotated[bool | None, typer.Option(help="Force USE_TMA.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="Force a prefill's template: TRITON, or Hopper's GLUON.")
    ] = None,
    show: Annotated[
        list[Show] | None, typer.Option(help="Repeatable; by default expr and source.")
    ] = None,
    explain: Annotated[
        bool, typer.Option(help="Print the rules that rewrote the score_mod, and its terms.")
    ] = False,
    rules_off: Annotated[
        str | None, typer.Option(help='Rules to leave out, separated by commas, or "all".')
    ] = None,
    tanh: Annotated[str | None, typer.Option(help="auto, fast or exact.")] = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Show the expression, the kernel's source, its PTX's path or the resources it takes."""
    forced = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "SPLIT_KV": split_kv,
        "USE_TMA": use_tma,
        "BACKEND": backend,
        "RULES_OFF": rules_off,
        "TANH": tanh,
    }
    chosen = options.parse({key: value for key, value in forced.items() if value is not None})
    keys = kv_len or (None if call.kind == "decode" else call.q_len) or arguments.LENGTH
    problem = call.problem(keys)
    if problem.structure.score is not None:
        spelled = replace(problem.structure, rules_off=chosen.rules_off, tanh=chosen.tanh)
        problem = replace(problem, structure=spelled)
    wanted = set(show or ((Show.expr,) if explain else (Show.expr, Show.source)))
    target = NEURON.get(call.device) or named(call.device)
    if target.backend == "neuron":
        forced_here = chosen != options.NONE
        found = _rendered_nki(problem, target, forced_here, explain, wanted)
    else:
        found = _rendered(problem, target, chosen, wanted)
        if explain:
            found = replace(found, rewrites=rewrites(problem.structure))
    if as_json:
        say_json(asdict(found))
    else:
        _print(found)


def _expected(problem: Problem, device: Device, chosen: options.Options) -> Choice:
    """What a call gets, as far as it is known without compiling anything."""
    candidates = list(candidates_of(problem, device, chosen))
    for candidate in candidates:
        (attempt,) = told([candidate], device, memory())
        outcome = attempt.outcome
        if outcome is None or candidate.measured or (outcome.built and not outcome.starved):
            return candidate.choice()
    return candidates[0].choice()


def _rendered(
    problem: Problem, device: Device, chosen: options.Options, wanted: set[Show]
) -> Rendered:
    ptx, taken = None, None
    if wanted & {Show.ptx, Show.resources}:
        choice, kernel = compiled(problem, device, chosen)
        if Show.ptx in wanted:
            ptx = _assembly(choice, kernel, device)
        if Show.resources in wanted:
            taken = asdict(resources(kernel, device))
    else:
        choice = _expected(problem, device, chosen)
    structure, expr = problem.structure, Show.expr in wanted
    return Rendered(
        problem.describe(),
        f"{device.name} ({device.arch})",
        describe(choice.config),
        choice.origin,
        str(build.path_of(choice.source)),
        None if choice.combine is None else str(build.path_of(choice.combine)),
        _expression(structure.score) if expr else None,
        _expression(structure.mask) if expr else None,
        choice.source.text if Show.source in wanted else None,
        ptx,
        taken,
    )


def _rendered_nki(
    problem: Problem, device: Device, forced: bool, explain: bool, wanted: set[Show]
) -> Rendered:
    if forced or explain or wanted & {Show.ptx, Show.resources}:
        raise InputError(
            f"kernel options, --explain, ptx or resources for {device.name}",
            "an NKI kernel has none of Triton's options, and no compiler of it is here",
            "--show takes expr and source",
        )
    if problem.structure.kind == "backward":
        raise InputError(f"--kind backward for {device.name}", "gradients run on GPUs")
    config, source, combine = kernels(problem, device.name)
    structure, expr = problem.structure, Show.expr in wanted
    return Rendered(
        problem.describe(),
        f"{device.name} (NKI)",
        describe(config),
        f"the first that fits; flexattn tune --device {device.name} ranks the others",
        str(path_of(source)),
        None if combine is None else str(path_of(combine)),
        _expression(structure.score) if expr else None,
        _expression(structure.mask) if expr else None,
        source.text if Show.source in wanted else None,
    )


def _expression(captures: Captures | None) -> str | None:
    return None if captures is None else pretty(captures.mod.expr)


def _assembly(choice: Choice, kernel: Any, device: Device) -> str:
    """Write the compiler's last text, PTX or AMD's assembly, beside the source; its path."""
    kind = "amdgcn" if device.backend == "hip" else "ptx"
    stem = build.path_of(choice.source).stem
    return str(text_file(f"{stem}.{device.arch}.{kind}", kernel.asm[kind]))


def _print(found: Rendered) -> None:
    console = Console()
    for name in ("score_mod", "mask_mod"):
        if (expression := getattr(found, name)) is not None:
            say_text(f"{name:<10}" + expression.replace("\n", "\n" + " " * 10))
    say(f"{'problem':<10}{found.problem}")
    say(f"{'device':<10}{found.device}")
    say(f"{'config':<10}{found.config}")
    say(f"{'':<10}{found.origin}")
    say(f"{'source':<10}{found.path}")
    if found.combine_path is not None:
        say(f"{'combine':<10}{found.combine_path}")
    if found.ptx is not None:
        say(f"{'assembly':<10}{found.ptx}")
    if found.resources is not None:
        text = " ".join(f"{name}={value}" for name, value in found.resources.items())
        say(f"{'resources':<10}{text}")
    for row in found.rewrites or ():
        say(f"{row['what']:<10}{row['name']}: {row['says']}")
        say(f"{'':<12}{row['to']}")
    if found.source is not None:
        say("")
        if console.is_terminal:
            console.print(Syntax(found.source, "python", background_color="default"))
        else:
            say_text(found.source, nl=False)
