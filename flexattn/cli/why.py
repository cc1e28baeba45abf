"""`flexattn why`: what a problem's config rests on, and how the closest records differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer

from flexattn.cli import arguments
from flexattn.cli.mods import resolve
from flexattn.cli.selection import device_of, kind_of, rows_of
from flexattn.cli.terminal import say, say_json
from flexattn.device import Device
from flexattn.errors import InputError
from flexattn.kernels.base.config import describe
from flexattn.kernels.choose.options import NONE
from flexattn.measure.task import Task
from flexattn.problem import Shape
from flexattn.records.why import Closest, Difference, Explanation
from flexattn.records.why import why as explained
from flexattn.runtime.dispatch import candidates_of
from flexattn.runtime.fallback.chain import Attempt, told
from flexattn.runtime.fallback.memory import memory
from flexattn.tune.tasks import task_from, tasks
from flexattn.tune.workload import Row

CPU = torch.device("cpu")


def why(
    mod: Annotated[
        str | None,
        typer.Argument(help="A name of the catalogue, or package.module:function."),
    ] = None,
    arg: arguments.ModArguments = None,
    role: arguments.Role = None,
    kind: Annotated[
        str | None,
        typer.Option(help="prefill, decode or backward; the lengths decide by default."),
    ] = None,
    batch: arguments.Batch = 1,
    hq: arguments.QueryHeads = 32,
    hkv: arguments.KeyHeads = 8,
    q_len: Annotated[int, typer.Option(help="Queries.")] = arguments.LENGTH,
    kv_len: Annotated[int | None, typer.Option(help="Keys; as many as queries.")] = None,
    head_dim: arguments.HeadDim = 128,
    head_dim_v: arguments.HeadDimV = None,
    dtype: arguments.Dtype = "bfloat16",
    block_size: arguments.BlockSize = 128,
    workload: arguments.WorkloadFiles = None,
    preset: arguments.Presets = None,
    only: arguments.Only = None,
    device: arguments.DeviceHere = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Say whether a problem's config is a hit, a hint, the nearest or the default, and why.

    The problem is that of MOD, or those of a workload or a preset.
    """
    target = device_of(device, "nvidia-h200")
    if workload or preset:
        if mod is not None:
            raise InputError(f"{mod} with a workload", "a problem is named by one of them")
        found = list(tasks(rows_of(workload or (), preset or (), only), target))
    else:
        keys = q_len if kv_len is None else kv_len
        v_dim = head_dim if head_dim_v is None else head_dim_v
        row = Row(
            title=mod or "no mods",
            kind=None if kind is None else kind_of(kind),
            dtype=dtype,
            shape=Shape(batch, hq, hkv, q_len, keys, head_dim, v_dim),
            score=None,
            mask=None,
            block_size=(block_size, block_size),
            scale=None,
            policy=(),
        )
        mods = resolve(mod or "noop", arg or (), role, row.shape, dtype)
        found = [task_from(row, mods.score_mod, mods.mask_mod, target, CPU)]
    kept = memory().entries(target)
    answers = [
        (task, explained(task.problem, target), _tried(task, target) if kept else [])
        for task in found
    ]
    if as_json:
        say_json({"problems": [_told(*each) for each in answers]})
    else:
        _print(answers)


def _tried(task: Task, device: Device) -> list[Attempt]:
    """What is remembered of the configs that may serve a problem."""
    return told(candidates_of(task.problem, device, NONE), device, memory())


def _told(task: Task, found: Explanation, tried: Sequence[Attempt]) -> dict[str, Any]:
    return {
        "title": task.title,
        "problem": found.problem,
        "key": asdict(found.key),
        "digest": found.key.digest(),
        "environment": asdict(found.environment),
        "how": found.how,
        "config": asdict(found.config),
        "origin": None if found.found is None else found.found.origin,
        "expected": [{"layer": layer, "path": str(path)} for layer, path in found.expected],
        "passed": [{"path": str(p.path), "reasons": p.reasons} for p in found.passed],
        "closest": [_compared(each) for each in found.closest],
        "broken": [{"path": str(path), "error": error} for path, error in found.broken],
        "candidates": [str(each) for each in tried],
    }


def _compared(closest: Closest) -> dict[str, Any]:
    return {
        "path": str(closest.path),
        "layer": closest.layer,
        "title": closest.answer.title,
        "config": asdict(closest.answer.config),
        "key": [asdict(each) for each in closest.key],
        "environment": [asdict(each) for each in closest.environment],
    }


def _print(answers: Sequence[tuple[Task, Explanation, Sequence[Attempt]]]) -> None:
    for task, found, tried in answers:
        say(f"{task.title}: {found.how}")
        say(f"  problem   {found.problem}")
        say(f"  config    {describe(found.config)}")
        if found.found is not None:
            say(f"            {found.found.origin}")
        for attempt in tried:
            say(f"  candidate {attempt}")
        for layer, path in found.expected:
            say(f"  expected  {layer}: {path}")
        for passed in found.passed:
            say(f"  passed    {passed.path}: {'; '.join(passed.reasons)}")
        for each in found.closest:
            say(f"  closest   {each.layer}: {each.path}")
            for name, differences in (("key", each.key), ("environment", each.environment)):
                for difference in differences:
                    say(f"            {name}: {_difference(difference)}")
        for path, error in found.broken:
            say(f"  no record {path}: {error}")


def _difference(each: Difference) -> str:
    return f"{each.field} is {each.asked!r}, the record's {each.stored!r}"
