"""`flexattn demo`: attention of real models, judged, and timed where there is a GPU."""

from __future__ import annotations

import torch
import typer
from rich.console import Console

from flexattn.cli import demo_cpu, demo_gpu, options, parts
from flexattn.cli.places import writable
from flexattn.cli.terminal import say
from flexattn.errors import InputError
from flexattn.settings import current


def run(args: options.Demo) -> None:
    """Run `flexattn demo`."""
    if args.part is not None:
        say(_part(args.part))
        return
    console, out = Console(), writable(args.out)
    on_gpu = torch.cuda.is_available() and not current().interpret
    passed = demo_gpu.show_gpu(console, out) if on_gpu else demo_cpu.show_cpu(console, out)
    if not passed:
        console.print("[red]The demo failed: see above.")
        raise typer.Exit(1)


def _part(name: str) -> str:
    if name == "interpret":
        return parts.interpret_workloads()
    if name == "compile":
        return parts.compile_all()
    raise InputError(f"--part {name}", "it is interpret or compile")
