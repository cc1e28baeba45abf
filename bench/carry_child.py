"""Kernels of records, and static defaults, in the tree that this process runs in: JSON to stdout.

It is fed to Python's stdin by bench.carry_records, also in trees of older revisions: it imports
what these have, and nothing of bench.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

from flexattn.device import named
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.paged_decode.source import render_serving, render_serving_combine
from flexattn.presets import files
from flexattn.records.codec import decode_answer, encode
from flexattn.records.environment import environment
from flexattn.records.store import Store
from flexattn.runtime import decay_skip
from flexattn.tuning.tasks import plan_task, task_of
from flexattn.tuning.workload import read

try:
    from flexattn.records.record import key_of
except ImportError:  # of a revision whose keys have a file of their own
    from flexattn.records.key import key_of

# What a Gluon kernel's text becomes machine code through, and what it imports.
AFTER = ("flexattn.kernels.hopper.merge_consumers", "flexattn.gluon_api")


def main(root: Path) -> dict[str, Any]:
    """For each record: its kind's hash here, its kernels, and the static default of its problem.

    Where there are no kernels: why.
    """
    rows = [row for path in files().values() for row in read(path).rows]
    tasks: dict[tuple[str, str], list[Any]] = {}
    found: dict[str, Any] = {}
    for path in Store(root).paths():
        name = path.relative_to(root).as_posix()
        try:
            record = decode_answer(path.read_bytes())
            device = named(record.environment.device)
            where = record.title, device.name
            if where not in tasks:
                tasks[where] = [_task(row, device) for row in rows if row.title == record.title]
            task = next(each for each in tasks[where] if key_of(each.problem) == record.key)
            kind = record.key.kind
            here = environment(kind, device).template
            found[name] = {
                "template": here,
                "kernels": _kernels(task.problem, record, device),
                "default": encode(_default(task.problem, record, device)),
            }
        except StopIteration:
            found[name] = {"why": "no row of a preset has its title and its key"}
        except Exception as error:  # of any revision: what cannot be rendered is not carried over
            found[name] = {"why": f"{type(error).__name__}: {error}".splitlines()[0]}
    return found


def _task(row: Any, device: Any) -> Any:
    return plan_task(row, device) if row.served else task_of(row, device, torch.device("cpu"))


def _default(problem: Any, record: Any, device: Any) -> Any:
    """The config that runs first where nothing is tuned."""
    if hasattr(problem, "form"):  # a plan's, of older trees
        from flexattn.kernels.paged_decode import space

        return next(space.serving_candidates(problem.form, device))
    return default(problem, device)


def _kernels(problem: Any, record: Any, device: Any) -> dict[str, Any]:
    """All that is compiled, without headers, and the modules that it is compiled by."""
    config = record.config
    if record.key.kind == "serving":
        # As older trees can say it, too.
        form = problem.form if hasattr(problem, "form") else problem.structure
        sources = [render_serving(form, config, device, "")]
        if config.combine in ("launch", "dependent") and not form.prefix:
            sources.append(render_serving_combine(form, config, device))
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
    family = family_of(config)
    found = family.render(structure, config, device, ""), family.combine(structure, device)
    return [source for source in found if source is not None]


def _facts(source: Any) -> dict[str, Any]:
    return {
        "text": source.text[source.text.index("import triton") :],
        "arguments": [[each.name, each.type, each.divisible_by] for each in source.arguments],
        "how": [source.num_warps, source.num_stages, source.language, source.registers],
        "stages": [list(source.stages.passes), source.stages.ptxas],
    }


def _module(name: str) -> str:
    """A module's text; nothing where there is no such module."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return ""
    return Path(spec.origin).read_text(encoding="utf-8")


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
