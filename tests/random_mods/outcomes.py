"""What became of each random mod, and all of them as a table and as JSON."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from flexattn.errors import BuildError, FlexAttnError
from flexattn.records.record import Failed
from flexattn.tuning.builds import Pool


@dataclass(frozen=True, slots=True)
class Task:
    """One mod by its name; longest: of L and S where it runs."""

    seed: int
    index: int
    longest: int = 400


@dataclass(frozen=True, slots=True)
class Outcome:
    """candidate: which of dispatch's served, from 1. cause: what groups errors; message: all."""

    index: int
    how: Literal["served", "refused", "failed", "wrong"]
    call: str = ""
    mod: str = ""
    candidate: int = 0
    config: str = ""
    cause: str = ""
    message: str = ""
    seconds: float = 0.0


def outcome(task: Task, mod: object, check: Callable[[], str]) -> Outcome:
    """The outcome of one mod, in a process of its own: a device that is lost takes it along.

    check: runs it, and returns the call in words.
    """
    begin = time.monotonic()
    found: dict[str, Any] = {"mod": str(mod)}
    try:
        found |= {"how": "served", "call": check()}
    except Exception as error:  # whatever it is, it is what a user would see
        if "CUDA error" in str(error):
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(70)
        found |= failure(error)
    return Outcome(task.index, seconds=round(time.monotonic() - begin, 2), **found)


def failure(error: Exception) -> dict[str, Any]:
    """The fields of an Outcome that say what was raised."""
    how = "wrong" if isinstance(error, AssertionError) else "failed"
    if isinstance(error, FlexAttnError) and not isinstance(error, BuildError):
        how = "refused"
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = [line.strip() for line in str(root).splitlines() if line.strip()] or [""]
    # A compiler shows the line of the kernel first and says what is wrong with it last.
    line = lines[-1] if isinstance(error, BuildError) and root is not error else lines[0]
    return {"how": how, "cause": f"{type(root).__name__}: {general(line)}", "message": str(error)}


def general(line: str) -> str:
    """An error's line without what differs from kernel to kernel."""
    line = re.sub(r"\S*/\S+", "PATH", line.partition("[")[0])
    line = re.sub(r"%\w+|\b(score|mask)_\d+\b", "NAME", line)
    return re.sub(r"\d+", "N", line)[:160]


def outcomes(pool: Pool, tasks: Sequence[Task]) -> Iterator[Outcome]:
    """What became of each task as it ends; one whose process died or was late has failed."""
    for place, found in pool.run(tasks):
        if isinstance(found, Failed):
            cause = f"{found.stage}: {found.error}"
            found = Outcome(tasks[place].index, "failed", cause=cause, message=found.message)
        yield found


def table(found: Sequence[Outcome]) -> str:
    """How many were served by which candidate, and the others by cause, with two of each."""
    served = Counter(each.candidate for each in found if each.how == "served")
    lines = [f"{len(found)} mods"]
    for candidate, count in sorted(served.items()):
        named = f"served by candidate {candidate}" if candidate else "right"
        lines.append(f"{count:6d} {100 * count / len(found):5.1f} %  {named}")
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for each in found:
        if each.how != "served":
            groups[each.how, each.cause].append(each)
    for (how, cause), members in sorted(groups.items(), key=lambda item: -len(item[1])):
        some = ", ".join(str(each.index) for each in members[:6])
        share = 100 * len(members) / len(found)
        lines.append(f"{len(members):6d} {share:5.1f} %  {how}: {cause} (index {some})")
    return "\n".join(lines)


def write(path: Path, facts: dict[str, Any], found: Sequence[Outcome]) -> None:
    """All of it, in the order of the mods' indices."""
    ordered = sorted(found, key=lambda each: each.index)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, "outcomes": [asdict(e) for e in ordered]}, indent=1))
