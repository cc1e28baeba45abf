"""The figures of a run: what is printed, and the JSON that bench's results are like."""

import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.environment import describe

SCHEMA = 1


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the largest, in milliseconds; nothing of nothing."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    at = lambda share: 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
    return {"p50": at(0.5), "p99": at(0.99), "max": 1e3 * ordered[-1]}


def table(row: dict[str, Any]) -> str:
    """What a reader wants to see first."""
    lines = [
        f"{row['requests'] - row['burst'] - row['retried']} requests as asked, "
        f"{row['burst']} more at once to fill the queue, {row['retried']} sent again; "
        f"{row['seconds']:.1f} s, {row['tokens']} tokens, "
        f"{row['tokens'] / row['seconds']:.0f} a second",
        "ends: " + ", ".join(f"{k} {v}" for k, v in sorted(row["ends"].items())),
        "server: " + ", ".join(f"{k} {v:.0f}" for k, v in sorted(row["server"].items())),
        f"{'ms':<22}{'p50':>10}{'p99':>10}{'max':>10}",
    ]
    for name in ("time_to_first_token", "time_between_tokens"):
        if found := row[name]:
            lines.append(f"{name:<22}" + "".join(f"{x:>10.2f}" for x in found.values()))
    for name, samples in row["memory"].items():
        lines.append(f"{name}: " + ", ".join(f"{x / 2**20:.1f}" for x in samples) + " MiB")
    lines.append(
        f"{row['compared']} answers compared with an earlier one, {row['different']} different; "
        f"{row['one_by_one']} one by one, {row['one_by_one_different']} different; "
        f"{row['judged']} judged in float64"
    )
    return "\n".join(lines)


def save(path: Path, method: dict[str, Any], row: dict[str, Any]) -> None:
    """Write the figures with versions and device, as the files in bench/results have them."""
    environment = describe() | {
        name: metadata.version(name) for name in ("aiohttp", "prometheus-client", "pydantic")
    }
    data = {
        "schema": SCHEMA, "bench": "serving-load", "method": method,
        "environments": [environment], "rows": [{"environment": 0, **row}],
    }  # fmt: skip
    path.write_text(json.dumps(data, indent=1) + "\n")
