"""The page: one HTML file with everything inside, and the PNGs beside it."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from flexattn.errors import InputError
from flexattn.kernels.base.environment import templates_folder
from flexattn.records.record import Record
from flexattn.report.drawing import Picture, number
from flexattn.report.figures import pictures
from flexattn.report.overview import beside, gains
from flexattn.report.rivals import Bench, geometric_mean
from flexattn.report.summary import Summary, summarize
from flexattn.util.printable import printable

PAGE = "index.html"


@dataclass(frozen=True, slots=True)
class Entry:
    """One problem on the page: what is said of it, and its pictures."""

    anchor: str
    summary: Summary
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """What `write` made."""

    page: Path
    pictures: tuple[Path, ...]
    summaries: tuple[Summary, ...]


def write(records: Sequence[Record], out: Path, benches: Sequence[Bench] = ()) -> Written:
    """Write index.html and its pictures as PNG files into a folder.

    Raises InputError where there is neither a record nor a bench to show.
    """
    if not records and not benches:
        raise InputError(
            "no record to report",
            "a report shows what was tuned",
            "run `flexattn tune`, or name record files or a --cache that has some",
        )
    entries = tuple(_entry(n, record, tuple(benches)) for n, record in enumerate(records, 1))
    summaries = tuple(entry.summary for entry in entries)
    overview = gains(summaries)
    rivals = tuple((bench, beside(bench, f"{_slug(bench.name)}.png")) for bench in benches)
    text = html(entries, overview, rivals)
    drawn = [picture for _, picture in rivals if picture]
    drawn = [overview, *drawn] if overview else drawn
    drawn += [picture for entry in entries for picture in entry.pictures]
    out.mkdir(parents=True, exist_ok=True)
    for picture in drawn:
        (out / picture.name).write_bytes(picture.data)
    page = out / PAGE
    page.write_text(text, encoding="utf-8")
    return Written(page, tuple(out / picture.name for picture in drawn), summaries)


def html(
    entries: Sequence[Entry],
    overview: Picture | None = None,
    rivals: Sequence[tuple[Bench, Picture | None]] = (),
) -> str:
    """The page as text. Every value is escaped; nothing is fetched and no other script runs."""
    environment = _environment()
    script = environment.get_template("report/script.js.jinja").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("report/page.html.jinja").render(
        entries=entries,
        summaries=[entry.summary for entry in entries],
        overview=overview,
        rivals=rivals,
        script=script,
        script_hash=f"sha256-{digest}",
        mean_speedup=_mean([e.summary.speedup for e in entries if e.summary.speedup]),
    )


def _entry(place: int, record: Record, benches: tuple[Bench, ...]) -> Entry:
    summary = summarize(record, benches)
    name = f"{place:02d}-{_slug(summary.title)}"
    return Entry(f"p{place}", summary, pictures(record, summary.importance, name))


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """Everything is escaped: titles and messages come from files that anyone may have written."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_folder()),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["us"] = lambda us: "–" if us is None or math.isnan(us) else number(us)
    environment.filters["ratio"] = lambda x: "–" if x is None or math.isnan(x) else f"{x:.3f}"
    environment.filters["percent"] = lambda x: "–" if x is None else f"{100 * x:.3g} %"
    environment.filters["kib"] = lambda x: "–" if x is None else f"{x / 1024:.3g}"
    environment.filters["count"] = lambda x: "–" if x is None else str(x)
    environment.filters["uri"] = lambda data: base64.b64encode(data).decode()
    environment.globals["geometric_mean"] = geometric_mean
    return environment


def _shown(value: Any) -> Any:
    """Text as UTF-8 can write it and a browser shows it; what is markup already is ours."""
    return printable(value) if type(value) is str else value


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60] or "problem"


def _mean(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return math.exp(math.fsum(map(math.log, values)) / len(values))
