"""What the mods of a record were: it keeps their fingerprints, and a preset's row has the code."""

from __future__ import annotations

from functools import lru_cache

from flexattn.mods import bind
from flexattn.mods.bind import clear
from flexattn.mods.expr import pretty
from flexattn.presets import files
from flexattn.problem import captures_of
from flexattn.records.key import mod_name
from flexattn.records.record import Answer
from flexattn.tune.tasks import mods_of
from flexattn.tune.workload import Row, read


def expression_of(answer: Answer, role: str) -> str:
    """A record's "score" or "mask" as an expression, else where it is from; "none" without one."""
    fingerprint = getattr(answer.key, role)
    if not fingerprint:
        return "none"
    row = _rows().get(answer.title)
    if row is not None:
        # What was traced before decides whether a number is a constant.
        clear()
        score_mod, mask_mod = mods_of(row)
        found = captures_of(bind(score_mod if role == "score" else mask_mod, role))
        if found is not None and mod_name(found) == fingerprint:
            return pretty(found.mod.expr)
    return f"another, that of {answer.title!r}"


@lru_cache(maxsize=1)
def _rows() -> dict[str, Row]:
    """The rows of all presets by title."""
    return {row.title: row for path in files().values() for row in read(path).rows}
