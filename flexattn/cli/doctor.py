"""`flexattn doctor`: the installation, the GPU, the caches, and what would run.

`flexattn devices`: the table of devices that can be named without being here.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from subprocess import SubprocessError
from typing import TypeAlias

import torch
import typer
from rich.table import Table

from flexattn import __version__
from flexattn.cli import options
from flexattn.cli.selection import device_here, device_of, places, say_assumed
from flexattn.cli.terminal import say, table_of, wide_console
from flexattn.device import INTERPRETER, KNOWN, Device
from flexattn.device.neuroncore import BANK_BYTES, CORES, PSUM_BANKS
from flexattn.errors import CacheError, FlexAttnError
from flexattn.kernels.base.config import describe
from flexattn.kernels.base.environment import templates_folder
from flexattn.kernels.ptx.assembler import own_ptxas, preferred
from flexattn.problem import Kind, Shape, make_problem
from flexattn.records.environment import environment
from flexattn.records.untuned import COMMAND, read_untuned, untuned_path
from flexattn.records.why import why
from flexattn.runtime.outcomes import compiler_of, memory
from flexattn.settings import current
from flexattn.tuning.tuner import plugin_of

PACKAGES = ("jinja2", "sympy", "typer", "rich", "optuna", "matplotlib")
SAMPLES: tuple[tuple[Kind, Shape], ...] = (
    ("prefill", Shape(1, 32, 8, 8192, 8192, 128, 128)),
    ("decode", Shape(8, 32, 8, 1, 8192, 128, 128)),
)
# Untuned problems that are printed.
_SHOWN = 20
_RECORDED: tuple[Kind, ...] = ("prefill", "decode", "backward", "serving")
# What a line is about, and what it says.
_Lines: TypeAlias = Iterator[tuple[str, str]]


def run(args: options.Doctor) -> None:
    """Run `flexattn doctor`."""
    target = device_of(args.device)
    say_assumed(args.device, target)
    cleared = [("outcomes", f"{memory().clear()} cleared")] if args.clear_outcomes else []
    faults: list[str] = []
    here, layers = _layers(target, faults)
    found = [
        *_versions(), *_machine(target), *_files(faults), *layers, *cleared, *_outcomes(target),
        *_untuned(faults), *_samples(target, faults), *_neuron_rungs(),
    ]  # fmt: skip
    say(f"{'verdict':<12}{_verdict(target, here, len(faults))}")
    for name, text in [*found, *(("FAULT", fault) for fault in faults)]:
        say(f"{name:<12}{text}")
    if faults:
        raise typer.Exit(1)


def _verdict(device: Device, here: int, faults: int) -> str:
    """A summary of what works here, in a sentence or two. here: records of this environment."""
    if faults:
        return f"broken: {faults} fault{'s' * (faults > 1)}, below; mend or remove what they name"
    if not _gpus():
        return (
            "the installation is sound, and torch sees no GPU: calls on CPU tensors are computed "
            "by torch; render, build, why and tune --dry-run work for any device"
        )
    served = (
        f"{here} tuned records hold exactly here"
        if here
        else "no record was made in this environment, so those of others are hints, and the "
        "static defaults serve the rest; `flexattn tune` makes records"
    )
    return f"sound: kernels run on {device.name}; {served}"


def _versions() -> _Lines:
    yield "flexattn", __version__
    yield "python", sys.version.split()[0]
    yield "platform", platform.platform()
    # What runs may be another copy than the one that is registered.
    yield "torch", torch.__version__
    yield "triton", str(importlib.import_module("triton").__version__)
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"
    yield "cuda", torch.version.cuda or torch.version.hip or "none"
    yield "driver", environment("prefill", device_here() or INTERPRETER).driver or "none"


def _gpus() -> list[str]:
    """The GPUs that torch sees, in words."""
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        f"{x.name}, {x.multi_processor_count} SMs, {x.total_memory / 2**30:.1f} GiB" for x in found
    ]


def _machine(device: Device) -> _Lines:
    for gpu in _gpus() or ["none that torch sees"]:
        yield "gpu", gpu
    yield "device", f"{device.name} ({device.arch})"
    for name, value in asdict(current()).items():
        yield "setting", f"{name} = {value}"
    try:
        yield "compiler", compiler_of(device)
    except (RuntimeError, OSError, SubprocessError) as error:
        yield "compiler", f"none: {error}"


def _files(faults: list[str]) -> _Lines:
    """Templates, Triton's tools, and caches.

    Both ptxas compile for NVIDIA, nvdisasm reads registers and spills; Triton brings them.
    """
    knobs = importlib.import_module("triton").knobs
    folder = templates_folder()
    if not any(folder.rglob("*.jinja")):
        faults.append(f"no templates in {folder}")
    yield "templates", str(folder)
    for name in ("ptxas", "ptxas_blackwell", "nvdisasm"):
        try:
            tool = getattr(knobs.nvidia, name)
        except (RuntimeError, AttributeError, OSError) as error:
            faults.append(f"{name}: {error}")
            continue
        of_hopper = name.replace("_", "-") == (preferred() or own_ptxas())
        use = ", for Hopper's template" if of_hopper else ""
        yield "tool", f"{name} {tool.version}{use}: {tool.path}"
    if refused := _unwritable(current().cache_dir):
        yield (
            "read-only",
            f"{refused} takes no file of ours: a process renders its kernels anew, and tune has "
            "no place for records; FLEXATTN_CACHE_DIR names another",
        )
    cache = Path(knobs.cache.dir)
    entries = sum(1 for _ in cache.iterdir()) if cache.is_dir() else 0
    yield "cache", f"of Triton: {cache}: {entries} entries"


def _unwritable(folder: Path) -> str:
    """The path that refuses writes to a folder; "" where none does."""
    # Path's own exists() raises below a folder that may not be searched.
    there = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    return "" if os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK) else str(there)


def _layers(device: Device, faults: list[str]) -> tuple[int, list[tuple[str, str]]]:
    """The number of records that hold exactly in this environment, and a line for each layer."""
    folders = {environment(kind, device).folder for kind in _RECORDED}
    every, lines = 0, []
    for layer in places():
        sound = here = 0
        for path, entry in layer.store.answers():
            if isinstance(entry, CacheError):
                faults.append(entry.line)
                continue
            sound, here = sound + 1, here + (path.parent.parent.name in folders)
        words = f"{sound} records, {here} of this environment"
        if strays := layer.store.strays():
            words += f", {len(strays)} files moved aside or left by writers that died"
        lines.append(("layer", f"{layer.name}: {layer.store.root}: {words}"))
        every += here
    return every, lines


def _outcomes(device: Device) -> _Lines:
    """Which kernels the compiler refused, whose loops spill, and which are wrong."""
    noted = memory().entries(device)
    verified = sum(each.outcome.verified for each in noted)
    yield "verified", f"{verified} kernels by their first launch; {current().verify}"
    for each in noted:
        if not each.outcome.built or each.outcome.starved:
            yield "outcome", f"{each.made[:10]} {each.title}: {each.outcome}"


def _untuned(faults: list[str]) -> _Lines:
    """The problems that calls met without a tuned record, of every device."""
    try:
        listed = read_untuned(untuned_path())
    except CacheError as error:
        faults.append(error.line)
        return
    if listed:
        yield "untuned", f"{len(listed)} in {untuned_path()}; `{COMMAND}` tunes them"
    for each in listed[:_SHOWN]:
        yield "", f"{each.problem.describe()} on {each.device}: {each.how}"
    if len(listed) > _SHOWN:
        yield "", f"and {len(listed) - _SHOWN} more"


def _samples(device: Device, faults: list[str]) -> _Lines:
    for kind, shape in SAMPLES:
        problem = make_problem(kind, "bfloat16", shape, None, None, None)
        try:
            found = why(problem, device)
        except FlexAttnError as error:
            faults.append(f"{problem.describe()}: {error.got}")
        else:
            yield "would run", f"{found.problem}: {found.how}: {describe(found.config)}"


def _neuron_rungs() -> _Lines:
    plugin = plugin_of("neuron")
    for rung in plugin.rungs() if plugin else ():
        words = rung.proves if rung.available else f"not here: {rung.why}"
        yield "neuron", f"{rung.name}: {words}"


def print_devices(args: options.Devices) -> None:
    """Run `flexattn devices`."""
    console = wide_console()
    # 80 columns hold it: a heading of two lines is as wide as the longer one.
    headings = ">SMs\nor CUs", ">shared\nmemory", ">registers", ">of a\nthread"
    table = table_of("device", "arch", *headings)
    for device in KNOWN.values():
        numbers = (device.num_sms, device.shared_memory, device.registers, device.max_registers)
        table.add_row(device.name, device.arch, *map(str, numbers))
    console.print(table)
    console.print(_neuron())


def _neuron() -> Table:
    """The limits of one core: memory of a partition, columns of a matmul's moving operand."""
    title = "AWS Neuron: one core of 128 partitions, cores of a chip"
    numbers = ">cores", ">SBUF KiB", ">PSUM KiB", ">moving"
    table = table_of("device", *numbers, title=title, title_justify="left")
    for core in CORES.values():
        table.add_row(
            core.name,
            str(core.cores),
            str(core.sbuf_bytes // 1024),
            f"{PSUM_BANKS} x {BANK_BYTES // 1024}",
            str(core.moving_max),
        )
    return table
