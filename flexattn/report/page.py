"""The page: one HTML file with everything inside, and PNGs beside it where they are asked for."""

from __future__ import annotations

import base64
import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from flexattn.errors import InputError
from flexattn.kernels.base.environment import templates_folder
from flexattn.records.record import Record, slug
from flexattn.report.figures import Drawing, pictures, png, rivals_beside, svg, three_figures
from flexattn.report.numbers import Summary, summarize
from flexattn.report.rivals import BenchResults, geometric_mean
from flexattn.util.text import printable

PAGE = "index.html"


@dataclass(frozen=True, slots=True)
class PageEntry:
    """One problem on the page: its text and its pictures."""

    anchor: str
    summary: Summary
    pictures: tuple[Drawing, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """The problems of one model. mean, best: of their speedups; None where none has one."""

    name: str
    anchor: str
    entries: tuple[PageEntry, ...]
    mean: float | None
    best: float | None

    @property
    def changed(self) -> int:
        """The number of entries with a winner other than the static default."""
        return sum(entry.summary.changed for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Written:
    """The files of `write`; pictures: none unless they were asked for."""

    page: Path
    pictures: tuple[Path, ...]
    summaries: tuple[Summary, ...]


def in_order(records: Iterable[Record]) -> tuple[Record, ...]:
    """By device, kind and title, then by size: a page of equal records is equal."""
    return tuple(
        sorted(records, key=lambda r: (r.environment.device, r.key.kind, r.title, r.sizes))
    )


def write_page(
    records: Sequence[Record],
    out: Path,
    benches: Sequence[BenchResults] = (),
    *,
    as_png: bool = False,
    say: Callable[[str], None] = lambda title: None,
) -> Written:
    """Write index.html into a folder; as_png: its pictures as files, too.

    say: told each problem's title when it is drawn. Raises InputError where there is neither a
    record nor a bench to show.
    """
    if not records and not benches:
        raise InputError(
            "no record to report",
            "a report shows what was tuned",
            "run `flexattn tune`, or name record files, or directories that have some",
        )
    entries = []
    for place, record in enumerate(records, 1):
        entries.append(_entry(place, record, tuple(benches)))
        say(entries[-1].summary.title)
    rivals = tuple((bench, rivals_beside(bench, slug(bench.name))) for bench in benches)
    text = html(entries, rivals)
    out.mkdir(parents=True, exist_ok=True)
    page = out / PAGE
    page.write_text(text, encoding="utf-8")
    drawn = [picture for _, picture in rivals if picture]
    drawn += [picture for entry in entries for picture in entry.pictures]
    files = []
    for picture in drawn if as_png else ():
        files.append(out / f"{picture.name}.png")
        files[-1].write_bytes(png(picture))
    return Written(page, tuple(files), tuple(entry.summary for entry in entries))


def html(
    entries: Sequence[PageEntry], rivals: Sequence[tuple[BenchResults, Drawing | None]] = ()
) -> str:
    """The page as text. Every value is escaped; nothing is fetched and no other script runs."""
    environment = _environment()
    script = environment.get_template("report/script.js.jinja").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    speedups = [e.summary.speedup for e in entries if e.summary.speedup]
    return environment.get_template("report/page.html.jinja").render(
        models=models(entries),
        summaries=[entry.summary for entry in entries],
        rivals=rivals,
        script=script,
        script_hash=f"sha256-{digest}",
        mean_speedup=statistics.geometric_mean(speedups) if speedups else None,
    )


def models(entries: Sequence[PageEntry]) -> tuple[Model, ...]:
    """The entries by model, in the order of their names; within one as they came."""

    def name(entry: PageEntry) -> str:
        return entry.summary.model

    found: list[Model] = []
    for model, group in groupby(sorted(entries, key=name), name):
        own = tuple(group)
        speedups = [e.summary.speedup for e in own if e.summary.speedup]
        best = max(speedups, default=None)
        mean = statistics.geometric_mean(speedups) if speedups else None
        found.append(Model(model, f"m{len(found) + 1}", own, mean, best))
    return tuple(found)


def _entry(place: int, record: Record, benches: tuple[BenchResults, ...]) -> PageEntry:
    summary = summarize(record, benches)
    name = f"{place:02d}-{slug(summary.title)}"
    return PageEntry(f"p{place}", summary, pictures(record, name))


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
    environment.filters |= {
        "us": lambda us: "–" if us is None or math.isnan(us) else three_figures(us),
        "ratio": lambda x: "–" if x is None or math.isnan(x) else f"{x:.3f}",
        "percent": lambda x: "–" if x is None else f"{100 * x:.3g} %",
        "kib": lambda x: "–" if x is None else f"{x / 1024:.3g}",
        "count": lambda x: "–" if x is None else str(x),
        "svg": lambda picture: Markup(svg(picture)),
    }
    environment.globals["geometric_mean"] = geometric_mean
    return environment


def _shown(value: Any) -> Any:
    """Text as UTF-8 can write it and a browser shows it; what is markup already is ours."""
    return printable(value) if type(value) is str else value
