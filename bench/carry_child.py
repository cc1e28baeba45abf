"""What the kernels of records are, in the tree that this process runs in: JSON to stdout.

It is fed to Python's stdin by bench.carry_records, also in trees of older revisions: it imports
what these have, and nothing of bench.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

from flexattn.device import named
from flexattn.presets import files
from flexattn.tune.tasks import plan_task, task_of
from flexattn.tune.workload import read

# Where a module of this tree was in older ones, the latest first.
OLDER = {
    "flexattn.kernels.triton.source": ("flexattn.kernels.render.kernel", "flexattn.render.kernel"),
    "flexattn.kernels.paged_decode.source": (
        "flexattn.kernels.render.serving", "flexattn.render.serving",
    ),
    "flexattn.kernels.hopper.merge_consumers": (
        "flexattn.kernels.ptx.merge_consumers", "flexattn.ptx.merge_consumers",
    ),
    "flexattn.records.codec": ("flexattn.cache.codec",),
    "flexattn.records.environment": ("flexattn.cache.environment",),
    "flexattn.records.key": ("flexattn.cache.key",),
    "flexattn.records.store": ("flexattn.cache.store",),
    "flexattn.runtime.reach": ("flexattn.reach",),
}  # fmt: skip


def found_here(module: str) -> str:
    """A module's name in the tree that this process runs in; "" where there is none."""
    for name in (module, *OLDER.get(module, ())):
        try:
            if importlib.util.find_spec(name) is not None:
                return name
        except ModuleNotFoundError:
            continue
    return ""


def _import(module: str) -> Any:
    return importlib.import_module(found_here(module))


serving = _import("flexattn.kernels.paged_decode.source")
decode_record = _import("flexattn.records.codec").decode_record
environment = _import("flexattn.records.environment").environment
key_of = _import("flexattn.records.key").key_of
Store = _import("flexattn.records.store").Store
reach = _import("flexattn.runtime.reach")

# Older trees have none.
REGISTRY = "flexattn.kernels.choose.registry"
# What a Gluon kernel's text becomes machine code through, and what it imports.
AFTER = ("flexattn.kernels.hopper.merge_consumers", "flexattn.gluon_api")


def main(root: Path, former: dict[str, str]) -> dict[str, Any]:
    """For each record: its kind's hash here, a digest of its kernels, or why there is none.

    former: what names of records were in older trees.
    """
    rows = [row for path in files().values() for row in read(path).rows]
    tasks: dict[tuple[str, str], list[Any]] = {}
    found: dict[str, Any] = {}
    for path in Store(root).paths():
        name = path.relative_to(root).as_posix()
        try:
            record = _record(path.read_bytes(), former)
            device = named(record.environment.device)
            where = record.title, device.name
            if where not in tasks:
                tasks[where] = [_task(row, device) for row in rows if row.title == record.title]
            task = next(each for each in tasks[where] if key_of(each.problem) == record.key)
            kind = record.key.kind
            here = environment(kind, device).template
            found[name] = {"template": here, "kernels": _digest(task.problem, record, device)}
        except StopIteration:
            found[name] = {"why": "no row of a preset has its title and its key"}
        except Exception as error:  # of any revision: what cannot be rendered is not carried over
            found[name] = {"why": f"{type(error).__name__}: {error}".splitlines()[0]}
    return found


def _record(raw: bytes, former: dict[str, str]) -> Any:
    """A record by its names of today, or by those that an older tree reads."""
    try:
        return decode_record(raw)
    except Exception:  # of any revision
        return decode_record(in_former_words(raw, former))


def in_former_words(raw: bytes, former: dict[str, str]) -> bytes:
    """A record's text with former names of configs' classes and fields, and their checksum."""
    body, mark, _ = raw.rpartition(b',\n "sha256": "')
    for now, before in former.items():
        body = body.replace(f'"{now}"'.encode(), f'"{before}"'.encode())
    return body + mark + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def _task(row: Any, device: Any) -> Any:
    return plan_task(row, device) if row.served else task_of(row, device, torch.device("cpu"))


def _digest(problem: Any, record: Any, device: Any) -> str:
    """Of all that is compiled and how, without headers and comments."""
    config = record.config
    if record.key.kind == "serving":
        sources = [serving.render_serving(problem.form, config, device, "")]
        if config.combine == "launch" and not problem.form.prefix:
            sources.append(serving.render_serving_combine(problem.form, config, device))
    else:
        structure = problem.structure
        sources = _rendered(structure, config, device)
        sources += reach.sources(structure, config, device)
    parts = [json.dumps([_facts(each) for each in sources])]
    if any(each.language == "gluon" for each in sources):
        parts += map(_module, AFTER)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _rendered(structure: Any, config: Any, device: Any) -> list[Any]:
    """The kernel of a call, and decode's second one."""
    if found_here(REGISTRY):
        family = importlib.import_module(REGISTRY).family_of(config)
        found = family.render(structure, config, device, ""), family.combine(structure, device)
        return [source for source in found if source is not None]
    kernel = _import("flexattn.kernels.triton.source")
    found = [kernel.render(structure, config, device, "")]
    if structure.kind == "decode":
        folder = kernel.__name__.rpartition(".")[0]
        second = importlib.import_module(f"{folder}.source")
        found.append(second.render_combine(structure, device))
    return found


def _facts(source: Any) -> list[Any]:
    arguments = [[each.name, each.type, each.divisible_by] for each in source.arguments]
    text = ast.dump(_unnamed(source.text[source.text.index("import triton") :]))
    how = [source.num_warps, source.num_stages, source.language, source.registers]
    return [text, arguments, *how]


def _module(name: str) -> str:
    """A module's syntax tree without docstrings; nothing where there is no such module."""
    spec = importlib.util.find_spec(place) if (place := found_here(name)) else None
    if spec is None or spec.origin is None:
        return ""
    return ast.dump(_unnamed(Path(spec.origin).read_text(encoding="utf-8")))


def _unnamed(text: str) -> ast.Module:
    """Python's tree without docstrings and the folders that imports name: files may move."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            node.module = (node.module or "").rpartition(".")[2]
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:]
    return tree


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))))
