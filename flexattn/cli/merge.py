"""`flexattn merge`: the records of many machines in one directory."""

from __future__ import annotations

from typing import Any

from flexattn.cli import options
from flexattn.cli.places import places, users
from flexattn.cli.terminal import say, say_json
from flexattn.kernels.base.config import describe
from flexattn.records.merge import Conflict, merge as merged


def run(asked: options.Merge) -> None:
    """As `flexattn merge` is asked."""
    roots = [layer.store.root for layer in places(asked.sources)]
    target = asked.out or users()
    done = merged(roots, target, lambda text: None if asked.as_json else say(text, err=True))
    if asked.as_json:
        told = {
            "directory": str(target),
            "written": done.written,
            "kept": done.kept,
            "conflicts": [_told(each) for each in done.conflicts],
            "refused": [{"path": str(path), "why": why} for path, why in done.refused],
        }
        say_json(told)
        return
    for conflict in done.conflicts:
        say(f"conflict: {conflict}")
    for path, why in done.refused:
        say(f"refused: {path}: {why}", err=True)
    say(
        f"{done.written} written to {target}, {done.kept} kept as they were, "
        f"{len(done.conflicts)} conflicts"
    )


def _told(conflict: Conflict) -> dict[str, Any]:
    return {
        "title": conflict.kept.title,
        "sizes": str(conflict.kept.key.sizes),
        "kept": describe(conflict.kept.config),
        "kept_from": str(conflict.kept_from),
        "dropped": describe(conflict.dropped.config),
        "dropped_from": str(conflict.dropped_from),
    }
