"""What the kernels of records are, in the tree that this process runs in: JSON to stdout.

It is fed to Python's stdin by bench.carry_records, also in trees of older revisions: it imports
what these have, and nothing of bench.
"""

from __future__ import annotations

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
    "flexattn.runtime.decay_skip": ("flexattn.runtime.reach", "flexattn.reach"),
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
# The head alone: an older tree may not know how this one writes trials.
decode_answer = _import("flexattn.records.codec").decode_answer
environment = _import("flexattn.records.environment").environment
key_of = _import("flexattn.records.key").key_of
Store = _import("flexattn.records.store").Store
decay_skip = _import("flexattn.runtime.decay_skip")

# Older trees have none.
REGISTRY = "flexattn.kernels.choose.registry"
# What a Gluon kernel's text becomes machine code through, and what it imports.
AFTER = ("flexattn.kernels.hopper.merge_consumers", "flexattn.gluon_api")


def main(root: Path, former: dict[str, str]) -> dict[str, Any]:
    """For each record: its kind's hash here and its kernels, or why there are none.

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
            found[name] = {"template": here, "kernels": _kernels(task.problem, record, device)}
        except StopIteration:
            found[name] = {"why": "no row of a preset has its title and its key"}
        except Exception as error:  # of any revision: what cannot be rendered is not carried over
            found[name] = {"why": f"{type(error).__name__}: {error}".splitlines()[0]}
    return found


def _record(raw: bytes, former: dict[str, str]) -> Any:
    """A record by its names of today, or by those that an older tree reads."""
    try:
        return decode_answer(raw)
    except Exception:  # of any revision
        return decode_answer(in_former_words(raw, former))


def in_former_words(raw: bytes, former: dict[str, str]) -> bytes:
    """A record's text with former names of configs' classes and fields, and their checksum."""
    body, mark, _ = raw.rpartition(b',\n "sha256": "')
    for now, before in former.items():
        body = body.replace(f'"{now}"'.encode(), f'"{before}"'.encode())
    return body + mark + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def _task(row: Any, device: Any) -> Any:
    return plan_task(row, device) if row.served else task_of(row, device, torch.device("cpu"))


def _kernels(problem: Any, record: Any, device: Any) -> dict[str, Any]:
    """All that is compiled, without headers, and the modules that it is compiled by."""
    config = record.config
    if record.key.kind == "serving":
        sources = [serving.render_serving(problem.form, config, device, "")]
        if config.combine == "launch" and not problem.form.prefix:
            sources.append(serving.render_serving_combine(problem.form, config, device))
    else:
        structure = problem.structure
        sources = _rendered(structure, config, device)
        sources += decay_skip.sources(structure, config, device)
    gluon = any(each.language == "gluon" for each in sources)
    return {
        "sources": [_facts(each) for each in sources],
        "after": [_module(each) for each in AFTER] if gluon else [],
    }


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


def _facts(source: Any) -> dict[str, Any]:
    return {
        "text": source.text[source.text.index("import triton") :],
        "arguments": [[each.name, each.type, each.divisible_by] for each in source.arguments],
        "how": [source.num_warps, source.num_stages, source.language, source.registers],
    }


def _module(name: str) -> str:
    """A module's text; nothing where there is no such module."""
    spec = importlib.util.find_spec(place) if (place := found_here(name)) else None
    if spec is None or spec.origin is None:
        return ""
    return Path(spec.origin).read_text(encoding="utf-8")


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))))
