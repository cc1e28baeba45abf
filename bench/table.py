"""A report as a markdown table: medians, rates, and paired ratios with their geometric means."""

from __future__ import annotations

import math
from collections.abc import Iterable

from bench.peers import OURS
from bench.results import Report, RowResult
from flexattn.measure.timing import paired_ratio

# The bytes that a row's calls may have at their peak, among those that peers have.
BAR = "bar"

# Peers that are no rivals: measures of the machine, and ours in another form.
ASIDE = {"empty kernel", "streaming read", "reading", "bf16", "dropout", "matmul"}
# Ratios against the best rival that are counted.
BARS = (0.97, 0.92)


def ratios(report: Report, peer: str, ours: str = OURS) -> dict[str, float]:
    """Time of the peer over time of ours for each row that has both: above 1, ours is faster."""
    found = {}
    for row in report.rows:
        if ours in row.samples and peer in row.samples:
            ratio = paired_ratio(row.samples[peer], row.samples[ours])
            if not math.isnan(ratio.value):
                found[row.name] = ratio.value
    return found


def markdown(report: Report) -> str:
    """The table with geometric means; below it, what failed or was refused.

    Behind ± stands half the interquartile range, in brackets the interval of the paired ratio.
    """
    names = _names(report.rows)
    peers = [name for name in names if name != OURS]
    unit = " (TB/s)" if report.bench == "decode" else " (TFLOP/s)"
    if report.bench == "host" or not any(row.flops or row.kv_bytes for row in report.rows):
        unit = ""
    shown = [f"{name} µs{unit}" for name in names]
    head = ["row", *shown, *(f"ours vs {name}" for name in peers)]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in report.rows:
        times = [_time(row, name, report.bench) for name in names]
        lines.append(_line([row.name, *times, *(_ratio(row, name) for name in peers)]))
    if len(report.rows) > 1:
        means = [_means(ratios(report, name).values()) for name in peers]
        lines.append(_line(["geometric mean (least)", *[""] * len(names), *means]))
    return "\n".join(
        [*lines, *_memory(report), "", *_best_rivals(report, peers), *_remarks(report)]
    )


def _memory(report: Report) -> Iterable[str]:
    """A table of memory at the peak, as shares of the bar."""
    names = list(dict.fromkeys(n for row in report.rows for n in row.memory if n != BAR))
    if names:
        yield from ("", "peak memory over the bar:", _line(["row", "bar, MiB", *names]))
        yield _line(["---"] * (2 + len(names)))
    for row in report.rows:
        if row.memory:
            bar = row.memory[BAR]
            shares = [f"{row.memory[n] / bar:.3f}" if n in row.memory else "-" for n in names]
            yield _line([row.name, f"{bar / 2**20:.0f}", *shares])


def _best_rivals(report: Report, peers: Iterable[str]) -> Iterable[str]:
    """Ours against the fastest rival of each row: mean, least, and how many are below the bars."""
    rivals = [name for name in peers if name not in ASIDE and not name.startswith(OURS)]
    found = [ratios(report, name) for name in rivals]
    best = [
        min(each[row.name] for each in found if row.name in each)
        for row in report.rows
        if any(row.name in each for each in found)
    ]
    if best:
        below = ", ".join(f"{sum(value < bar for value in best)} below {bar}" for bar in BARS)
        yield f"ours vs the best rival of each row: {_means(best)} of {len(best)}, {below}"


def _names(rows: Iterable[RowResult]) -> list[str]:
    found = {name: None for row in rows for name in (*row.gates, *row.samples, *row.refused)}
    return sorted(found, key=lambda name: not name.startswith(OURS))


def _time(row: RowResult, name: str, bench: str) -> str:
    samples = row.samples.get(name)
    if name in row.gates and not row.gates[name].passed:
        return "gate red"
    if samples is None or samples.failure:
        return "failed" if samples else "-"
    text = f"{samples.median:.1f} ±{50 * samples.spread:.1f}%"
    work = row.kv_bytes if bench == "decode" else row.flops
    if bench == "host" or not work:
        return text
    rate = work / samples.median / 1e6
    return f"{text} ({rate:.2f})" if bench == "decode" else f"{text} ({rate:.0f})"


def _ratio(row: RowResult, name: str) -> str:
    if OURS not in row.samples or name not in row.samples:
        return "-"
    ratio = paired_ratio(row.samples[name], row.samples[OURS])
    if math.isnan(ratio.value):
        return "-"
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _means(values: Iterable[float]) -> str:
    found = list(values)
    if not found:
        return "-"
    mean = math.exp(math.fsum(map(math.log, found)) / len(found))
    return f"{mean:.3f} ({min(found):.3f})"


def _remarks(report: Report) -> Iterable[str]:
    """Environments, red gates, failures and refusals."""
    for facts in report.environments:
        yield "measured on " + ", ".join(f"{key} {value}" for key, value in facts.items())
    for row in report.rows:
        for name, gate in row.gates.items():
            if not gate.passed:
                yield f"{row.name}, {name}: {gate.message}"
        for name, samples in row.samples.items():
            if samples.failure:
                yield f"{row.name}, {name}: {samples.failure}"
    reasons: dict[str, list[str]] = {}
    for row in report.rows:
        for name, reason in row.refused.items():
            if name not in row.gates or row.gates[name].passed:
                reasons.setdefault(f"{name}: {reason}", []).append(row.name)
    yield from (f"{reason} ({', '.join(rows)})" for reason, rows in reasons.items())


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
