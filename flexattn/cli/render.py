"""`flexattn render`: what a mod becomes, for any device, without one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.syntax import Syntax

from flexattn import options
from flexattn.cli.mods import resolve
from flexattn.cli.offline import Numbers, compiled, problem_of
from flexattn.device import Device, named
from flexattn.dispatch import Choice, choices
from flexattn.errors import InputError
from flexattn.mods.expr import pretty
from flexattn.problem import Captures, Kind, Problem
from flexattn.resources import Resources, resources
from flexattn.space.config import describe

LENGTH = 4096


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


def render(
    mod: Annotated[
        str, typer.Argument(help="A name of the catalogue, or package.module:function.")
    ],
    arg: Annotated[
        list[str] | None, typer.Option("--arg", help="An argument of a factory; repeatable.")
    ] = None,
    role: Annotated[
        str | None, typer.Option("--as", help="score or mask, where arity cannot tell.")
    ] = None,
    kind: Annotated[str, typer.Option(help="prefill or decode.")] = "prefill",
    head_dim: Annotated[int, typer.Option(help="Head dimension of query and key.")] = 128,
    head_dim_v: Annotated[
        int | None, typer.Option(help="Head dimension of value; the same by default.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "bfloat16",
    device: Annotated[
        str, typer.Option(help="A name that `flexattn devices` lists.")
    ] = "nvidia-h200",
    hq: Annotated[int, typer.Option("--Hq", help="Query heads.")] = 32,
    hkv: Annotated[int, typer.Option("--Hkv", help="Key heads.")] = 8,
    block_size: Annotated[int, typer.Option(help="Block size of a mask's BlockMask.")] = 128,
    block_m: Annotated[int | None, typer.Option(help="Force BLOCK_M.")] = None,
    block_n: Annotated[int | None, typer.Option(help="Force BLOCK_N.")] = None,
    num_warps: Annotated[int | None, typer.Option(help="Force num_warps.")] = None,
    num_stages: Annotated[int | None, typer.Option(help="Force num_stages.")] = None,
    split_kv: Annotated[int | None, typer.Option(help="Force SPLIT_KV.")] = None,
    use_tma: Annotated[bool | None, typer.Option(help="Force USE_TMA.")] = None,
    show: Annotated[
        list[Show] | None, typer.Option(help="Repeatable; by default expr and source.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the expression, the kernel's source, its PTX's path or the resources it takes."""
    forced = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "SPLIT_KV": split_kv,
        "USE_TMA": use_tma,
    }
    chosen = options.parse({key: value for key, value in forced.items() if value is not None})
    mods = resolve(mod, arg or (), role, (hq, hkv))
    which = _kind(kind)
    v = head_dim if head_dim_v is None else head_dim_v
    numbers = Numbers(1, hq, hkv, 1 if which == "decode" else LENGTH, LENGTH, head_dim, v)
    problem = problem_of(which, dtype, numbers, mods.score_mod, mods.mask_mod, block_size)
    wanted = set(show or (Show.expr, Show.source))
    found = _rendered(problem, named(device), chosen, wanted)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=1))
    else:
        _print(found)


def _kind(text: str) -> Kind:
    if text == "prefill":
        return "prefill"
    if text == "decode":
        return "decode"
    raise InputError(f"--kind {text}", "it is prefill or decode")


def _rendered(
    problem: Problem, device: Device, chosen: options.Options, wanted: set[Show]
) -> Rendered:
    ptx, taken = None, None
    if wanted & {Show.ptx, Show.resources}:
        choice, kernel = compiled(problem, device, chosen)
        if Show.ptx in wanted:
            ptx = _assembly(choice, kernel, device)
        if Show.resources in wanted:
            taken = _facts(resources(kernel, device))
    else:
        choice = next(choices(problem, device, chosen))
    structure, expr = problem.structure, Show.expr in wanted
    return Rendered(
        problem.describe(),
        f"{device.name} ({device.arch})",
        describe(choice.config),
        choice.origin,
        str(choice.source.path()),
        None if choice.combine is None else str(choice.combine.path()),
        _expression(structure.score) if expr else None,
        _expression(structure.mask) if expr else None,
        choice.source.text if Show.source in wanted else None,
        ptx,
        taken,
    )


def _facts(taken: Resources) -> dict[str, Any]:
    return {field.name: getattr(taken, field.name) for field in fields(taken)}


def _expression(captures: Captures | None) -> str | None:
    return None if captures is None else pretty(captures.mod.expr)


def _assembly(choice: Choice, kernel: Any, device: Device) -> str:
    """Write the compiler's last text, PTX or AMD's assembly, beside the source; its path."""
    kind = "amdgcn" if device.backend == "hip" else "ptx"
    source: Path = choice.source.path()
    path = source.with_name(f"{source.stem}.{device.arch}.{kind}")
    path.write_text(kernel.asm[kind])
    return str(path)


def _print(found: Rendered) -> None:
    console = Console()
    for name in ("score_mod", "mask_mod"):
        if (expression := getattr(found, name)) is not None:
            typer.echo(f"{name:<10}" + expression.replace("\n", "\n" + " " * 10))
    typer.echo(f"{'problem':<10}{found.problem}")
    typer.echo(f"{'device':<10}{found.device}")
    typer.echo(f"{'config':<10}{found.config}\n{'':<10}{found.origin}")
    typer.echo(f"{'source':<10}{found.path}")
    if found.combine_path is not None:
        typer.echo(f"{'combine':<10}{found.combine_path}")
    if found.ptx is not None:
        typer.echo(f"{'assembly':<10}{found.ptx}")
    if found.resources is not None:
        text = " ".join(f"{name}={value}" for name, value in found.resources.items())
        typer.echo(f"{'resources':<10}{text}")
    if found.source is not None:
        typer.echo()
        if console.is_terminal:
            console.print(Syntax(found.source, "python", background_color="default"))
        else:
            typer.echo(found.source, nl=False)
