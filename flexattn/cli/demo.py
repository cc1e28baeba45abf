"""`flexattn demo`: attention of real models, judged, and timed where there is a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from flexattn.cli import demo_cpu, demo_gpu, parts
from flexattn.cli.terminal import say
from flexattn.errors import InputError
from flexattn.settings import current


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("demo-out"),
    part: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Llama-3 and Gemma-2 attention beside torch's, checked against a float64 oracle.

    Without a GPU the kernels run in Triton's interpreter and are compiled for an H200.
    """
    if part is not None:
        say(_part(part))
        return
    console = Console()
    on_gpu = torch.cuda.is_available() and not current().interpret
    passed = demo_gpu.show(console, out) if on_gpu else demo_cpu.show(console, out)
    if not passed:
        console.print("[red]The demo failed: see above.")
        raise typer.Exit(1)


def _part(name: str) -> str:
    if name == "interpret":
        return parts.interpret()
    if name == "compile":
        return parts.compile_all()
    raise InputError(f"--part {name}", "it is interpret or compile")
