"""`flexattn tune --dry-run`: problems, keys and spaces, with nothing built or timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flexattn.cli.terminal import cell, tell, wide_console
from flexattn.device import Device
from flexattn.errors import FlexAttnError
from flexattn.kernels.base.config import Fields
from flexattn.kernels.base.family import Effort
from flexattn.kernels.choose.registry import short
from flexattn.kernels.choose.space import survey
from flexattn.measure.task import AnyTask
from flexattn.records.key import key_of
from flexattn.records.store import Store
from flexattn.tune.campaign import Where, environment_of, pending
from flexattn.tune.plugin import plugin_of


def plan_of(
    target: Device,
    chosen: Sequence[AnyTask],
    others: Sequence[tuple[AnyTask, AnyTask]],
    store: Store,
    effort: Effort,
    again: bool,
    where: Where = environment_of,
) -> dict[str, Any]:
    """What a tuning would do: problems with their keys, configs and rejections by reason."""
    open_titles = {task.title for task in pending(chosen, store, again, where)}
    problems = []
    for task in chosen:
        status, message = "to tune" if task.title in open_titles else "kept", ""
        configs: Sequence[Fields] = ()
        rejected: dict[str, int] = {}
        try:
            configs, rejected = _space(task, effort)
        except FlexAttnError as error:
            if plugin_of(task.device.backend) is None:
                raise
            status, message = "cannot", str(error)
        key = key_of(task.problem)
        problems.append({
            "title": task.title,
            "problem": task.problem.describe(),
            "key": asdict(key),
            "digest": key.digest(),
            "policy": asdict(task.policy),
            "default": short(configs[0]) if configs else "",
            "configs": len(configs),
            "rejected": rejected,
            "status": status,
            "message": message,
        })  # fmt: skip
    return {
        "device": target.name,
        "effort": effort,
        "directory": str(store.root),
        "problems": problems,
        "same_key": {task.title: kept.title for task, kept in others},
    }


def _space(task: AnyTask, effort: Effort) -> tuple[Sequence[Fields], dict[str, int]]:
    """The configs of a task, the default first, and how many others each rule rejects."""
    plugin = plugin_of(task.device.backend)
    if plugin is not None:
        fits = plugin.survey_of(task, effort)
        return fits.configs, dict(fits.rejected)
    found = survey(task.problem, task.device, effort)
    return found.configs, dict(found.rejected)


_COLUMNS = (
    ("key", "the sizes under which a record is filed: each rounded up to a power of two"),
    ("mask class", "of the mask's blocks: how many are kept (d1/8: an eighth), how uneven the "
     "rows are (i1: even), and whether a row's blocks are runs or have gaps"),
    ("configs", "variants of kernels that would be compiled, checked and raced"),
    ("rejected", "variants that cannot run or are never fast; the last line counts them by rule"),
)  # fmt: skip


def print_plan(plan: dict[str, Any]) -> None:
    """The plan as a table, and below it what its columns are and what was rejected."""
    console = wide_console()
    title = f"{plan['device']}, effort {plan['effort']}: nothing is built or timed"
    table = Table(title=title, box=SIMPLE_HEAD)
    # On a narrow screen titles and classes wrap, and the numbers stay.
    for name in ("problem", "key", "mask class"):
        table.add_column(name, overflow="fold", no_wrap=name == "key")
    for name in ("configs", "rejected"):
        table.add_column(name, justify="right", min_width=len(name))
    table.add_column("")
    rejected: dict[str, int] = {}
    for each in plan["problems"]:
        key = each["key"]
        for name, count in each["rejected"].items():
            rejected[name] = rejected.get(name, 0) + count
        table.add_row(
            cell(each["title"]),
            f"B{key['B']} {key['q_len']}x{key['kv_len']}",
            cell(key["mask_class"]),
            str(each["configs"]),
            str(sum(each["rejected"].values())),
            "" if each["status"] == "to tune" else each["status"],
        )
    console.print(table)
    for each in plan["problems"]:
        if each["message"]:
            text = f"{each['title']}: {each['message']}"
            tell(console, text)
    for title, kept in plan["same_key"].items():
        tell(console, f"{title}: same key as {kept}")
    for name, meaning in _COLUMNS:
        tell(console, f"{name}: {meaning}", "dim")
    total = sum(each["configs"] for each in plan["problems"])
    said = ", ".join(f"{count} {name}" for name, count in sorted(rejected.items()))
    count = len(plan["problems"])
    tell(console, f"{count} problems, {total} configs; rejected: {said or 'none'}")
