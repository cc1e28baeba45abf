"""`flexattn doctor`: the installation, the GPU, the caches, and what would run.

`flexattn devices`: the table of devices that can be named without being here.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from dataclasses import asdict, fields
from importlib import metadata
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import torch
import typer
from rich.table import Table

from flexattn import __version__
from flexattn.cli import options
from flexattn.cli.selection import device_here, device_of, places, say_assumed
from flexattn.cli.terminal import say, say_json, table_of, wide_console
from flexattn.device import INTERPRETER, KNOWN, Device
from flexattn.device.neuroncore import BANK_BYTES, CORES, PSUM_BANKS
from flexattn.errors import CacheError, FlexAttnError
from flexattn.kernels.base.config import describe
from flexattn.kernels.base.environment import templates_folder
from flexattn.kernels.ptx.assembler import own_ptxas, preferred
from flexattn.problem import Kind, Shape, make_problem
from flexattn.records.environment import environment
from flexattn.records.layers import RecordLayer
from flexattn.records.untuned import COMMAND, read_untuned, untuned_path
from flexattn.records.why import why
from flexattn.runtime.outcomes import FORMER, Noted, Outcome, compiler_of, memory
from flexattn.settings import current
from flexattn.tuning.tuner import plugin_of

PACKAGES = ("torch", "triton", "jinja2", "sympy", "typer", "rich", "optuna", "matplotlib")
SAMPLES: tuple[tuple[Kind, Shape], ...] = (
    ("prefill", Shape(1, 32, 8, 8192, 8192, 128, 128)),
    ("decode", Shape(8, 32, 8, 1, 8192, 128, 128)),
)
# Untuned problems that are printed; --json has all of them.
_SHOWN = 20
_RECORDED: tuple[Kind, ...] = ("prefill", "decode", "backward", "serving")


def run(args: options.Doctor) -> None:
    """Run `flexattn doctor`."""
    target = device_of(args.device)
    say_assumed(args.device, target)
    neuron = plugin_of("neuron")
    cleared = memory().clear() if args.clear_outcomes else 0
    health = [_health(layer, target) for layer in places()]
    faults = [fault for each in health for fault in each["invalid"]]
    facts: dict[str, Any] = {
        "versions": _versions(),
        "gpus": _gpus(),
        "device": asdict(target),
        "settings": {name: _plain(value) for name, value in asdict(current()).items()},
        "templates": _folder(faults),
        "tools": _tools(faults),
        "compiler": _compiler(target),
        "unwritable": _unwritable(current().cache_dir),
        "triton_cache": _triton_cache(),
        "outcomes": [_flat(each) for each in memory().entries(target)],
        "cleared": cleared,
        "layers": health,
        "untuned": _untuned(faults),
        "samples": [_sample(kind, shape, target, faults) for kind, shape in SAMPLES],
        "neuron": [asdict(rung) for rung in neuron.rungs()] if neuron else [],
        "faults": faults,
    }
    facts["verdict"] = _verdict(facts)
    if args.as_json:
        say_json(facts)
    else:
        _print(facts)
    if faults:
        raise typer.Exit(1)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "flexattn": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
    }
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    # What runs may be another copy than the one that is registered.
    found["torch"] = torch.__version__
    found["triton"] = str(importlib.import_module("triton").__version__)
    found["cuda"] = torch.version.cuda or torch.version.hip
    found["driver"] = environment("prefill", device_here() or INTERPRETER).driver
    return found


def _gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append({
            "name": properties.name,
            "sms": properties.multi_processor_count,
            "gib": round(properties.total_memory / 2**30, 1),
        })  # fmt: skip
    return found


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, int | float | bool | None) else str(value)


def _folder(faults: list[str]) -> str:
    folder = templates_folder()
    if not any(folder.rglob("*.jinja")):
        faults.append(f"no templates in {folder}")
    return str(folder)


def _tools(faults: list[str]) -> dict[str, str | None]:
    """Both ptxas compile for NVIDIA, nvdisasm reads registers and spills; Triton brings them."""
    knobs = importlib.import_module("triton").knobs
    found: dict[str, str | None] = {}
    for name in ("ptxas", "ptxas_blackwell", "nvdisasm"):
        try:
            tool = getattr(knobs.nvidia, name)
            of_hopper = name.replace("_", "-") == (preferred() or own_ptxas())
            use = ", for Hopper's template" if of_hopper else ""
            found[name] = f"{tool.path} ({tool.version}{use})"
        except (RuntimeError, AttributeError, OSError) as error:
            found[name] = None
            faults.append(f"{name}: {error}")
    return found


def _compiler(device: Device) -> str:
    """The compiler for a device, by the name that outcomes and calls use."""
    try:
        return compiler_of(device)
    except (RuntimeError, OSError, SubprocessError) as error:
        return f"none: {error}"


def _unwritable(folder: Path) -> str:
    """The path that refuses writes to a folder; "" where none does."""
    # Path's own exists() raises below a folder that may not be searched.
    there = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    return "" if os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK) else str(there)


def _triton_cache() -> dict[str, Any]:
    folder = Path(importlib.import_module("triton").knobs.cache.dir)
    kernels = sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
    return {"path": str(folder), "entries": kernels}


def _health(layer: RecordLayer, device: Device) -> dict[str, Any]:
    """One layer of records; here: how many hold exactly in this environment."""
    here = {environment(kind, device).folder for kind in _RECORDED}
    answers = list(layer.store.answers())
    sound = [path for path, entry in answers if not isinstance(entry, CacheError)]
    root = layer.store.root
    return {
        "layer": layer.name,
        "path": str(root),
        "exists": os.path.isdir(root),
        "records": len(sound),
        "here": sum(path.parent.parent.name in here for path in sound),
        "invalid": [entry.line for _, entry in answers if isinstance(entry, CacheError)],
        "strays": len(layer.store.strays()),
    }


def _untuned(faults: list[str]) -> list[dict[str, str]]:
    """The problems that calls met without a tuned record, of every device."""
    try:
        listed = read_untuned(untuned_path())
    except CacheError as error:
        faults.append(error.line)
        return []
    return [
        {"problem": each.problem.describe(), "device": each.device, "how": each.how}
        for each in listed
    ]


def _sample(kind: Kind, shape: Shape, device: Device, faults: list[str]) -> dict[str, Any]:
    problem = make_problem(kind, "bfloat16", shape, None, None, None)
    try:
        found = why(problem, device)
    except FlexAttnError as error:
        faults.append(f"{problem.describe()}: {error.got}")
        return {"problem": problem.describe(), "how": "error", "config": error.got}
    return {"problem": found.problem, "how": found.how, "config": describe(found.config)}


def _flat(noted: Noted) -> dict[str, Any]:
    """An outcome's fields beside those of its file."""
    told = asdict(noted)
    return {**told.pop("outcome"), **told}


def _print_outcomes(facts: dict[str, Any]) -> None:
    """Print which kernels the compiler refused, whose loops spill, and which are wrong."""
    if facts["cleared"]:
        say(f"{'outcomes':<12}{facts['cleared']} cleared")
    if (old := current().cache_dir / FORMER).is_dir():
        say(f"{'outcomes':<12}{old} is of an earlier version; --clear-outcomes removes it")
    verified = sum(each["verified"] for each in facts["outcomes"])
    say(f"{'verified':<12}{verified} kernels by their first launch; {facts['settings']['verify']}")
    for each in facts["outcomes"]:
        outcome = Outcome(**{field.name: each[field.name] for field in fields(Outcome)})
        if not outcome.built or outcome.starved:
            say(f"{'outcome':<12}{each['made'][:10]} {each['title']}: {outcome}")


def _print_untuned(listed: list[dict[str, str]]) -> None:
    if not listed:
        return
    say(f"{'untuned':<12}{len(listed)} in {untuned_path()}; `{COMMAND}` tunes them")
    for each in listed[:_SHOWN]:
        say(f"{'':<12}{each['problem']} on {each['device']}: {each['how']}")
    if len(listed) > _SHOWN:
        say(f"{'':<12}and {len(listed) - _SHOWN} more: --json lists all")


def _verdict(facts: dict[str, Any]) -> str:
    """A summary of what works here, in a sentence or two."""
    if facts["faults"]:
        count = len(facts["faults"])
        return f"broken: {count} fault{'s' * (count > 1)}, below; mend or remove what they name"
    if not facts["gpus"]:
        return (
            "the installation is sound, and torch sees no GPU: calls on CPU tensors are computed "
            "by torch; render, build, why and tune --dry-run work for any device"
        )
    here = sum(layer["here"] for layer in facts["layers"])
    served = (
        f"{here} tuned records hold exactly here"
        if here
        else "no record was made in this environment, so those of others are hints, and the "
        "static defaults serve the rest; `flexattn tune` makes records"
    )
    return f"sound: kernels run on {facts['device']['name']}; {served}"


def _print(facts: dict[str, Any]) -> None:
    say(f"{'verdict':<12}{facts['verdict']}")
    for name, version in facts["versions"].items():
        say(f"{name:<12}{version or 'not installed'}")
    for gpu in facts["gpus"] or [{"name": "none that torch sees", "sms": "-", "gib": "-"}]:
        say(f"{'gpu':<12}{gpu['name']}, {gpu['sms']} SMs, {gpu['gib']} GiB")
    say(f"{'device':<12}{facts['device']['name']} ({facts['device']['arch']})")
    for name, value in facts["settings"].items():
        say(f"{'setting':<12}{name} = {value}")
    say(f"{'templates':<12}{facts['templates']}")
    for name, path in facts["tools"].items():
        say(f"{name:<16}{path or 'missing'}")
    say(f"{'compiler':<12}{facts['compiler']}")
    if facts["unwritable"]:
        say(
            f"{'read-only':<12}{facts['unwritable']} takes no file of ours: a process renders its "
            "kernels anew, and tune has no place for records; FLEXATTN_CACHE_DIR names another"
        )
    cache = facts["triton_cache"]
    say(f"{'triton cache':<12} {cache['path']}: {cache['entries']} entries")
    for layer in facts["layers"]:
        words = f"{layer['records']} records, {layer['here']} of this environment"
        if layer["strays"]:
            words += f", {layer['strays']} files moved aside or left by writers that died"
        say(f"{'layer':<12}{layer['layer']}: {layer['path']}: {words}")
    _print_outcomes(facts)
    _print_untuned(facts["untuned"])
    for sample in facts["samples"]:
        say(f"{'would run':<12}{sample['problem']}: {sample['how']}: {sample['config']}")
    for rung in facts["neuron"]:
        words = rung["proves"] if rung["available"] else f"not here: {rung['why']}"
        say(f"{'neuron':<12}{rung['name']}: {words}")
    for fault in facts["faults"]:
        say(f"{'FAULT':<12}{fault}")


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
    """The limits of one core: memory of a partition, columns of a matmul's moving operand.

    Clocks are those of the Tensor, Vector, Scalar and GpSimd engines.
    """
    title = "AWS Neuron: one core of 128 partitions, cores of a chip"
    numbers = ">cores", ">SBUF KiB", ">PSUM KiB", ">moving", ">T/V/S/G GHz", ">DMA GB/s"
    table = table_of("device", *numbers, title=title, title_justify="left")
    for core in CORES.values():
        clocks = (core.tensor_ghz, core.vector_ghz, core.scalar_ghz, core.gpsimd_ghz)
        table.add_row(
            core.name,
            str(core.cores),
            str(core.sbuf_bytes // 1024),
            f"{PSUM_BANKS} x {BANK_BYTES // 1024}",
            str(core.moving_max),
            "/".join(map(str, clocks)),
            f"{core.dma_engines * core.dma_engine:.0f}",
        )
    return table
