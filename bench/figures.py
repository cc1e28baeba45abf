"""Figures of README and manual from bench/results: numbers, tables and pictures, written in place.

    python -m bench.figures            # writes; the tests fail where a page says something else

A page names a figure in a comment before it, and `<!--.-->` ends it:

    <!--= ratio h200-prefill-fa4 fa4 -->1.23<!--.-->

The first word is a function of `VERBS`, the second the file below bench/results.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from bench.drawing import bars, cells
from bench.gallery import GROUPS, gallery, picture
from bench.peers import OURS
from bench.results import Report, RowResult, load
from bench.table import ratios
from flexattn.block_mask.visual import visualize
from flexattn.catalogue import causal, document as of_document, document_ids

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
FIGURE = re.compile(r"<!--= ([^>]+?) -->(.*?)<!--\.-->", re.DOTALL)
NAMES = {
    OURS: "flexattn",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "sdpa-cudnn": "cuDNN",
    "torch-flex": "torch",
    "torch-flex-tuned": "torch, max-autotune",
    "torch-sdpa": "SDPA",
    "flashinfer": "FlashInfer",
    "flashmla": "FlashMLA",
    "flashinfer-tc": "FlashInfer, tensor cores",
    "flexattn-triton": "flexattn, Triton",
    "flexattn-gluon": "flexattn, Gluon",
    "flexattn-contiguous": "flexattn, contiguous",
    "flexattn-deterministic": "flexattn, deterministic",
    "sdpa-flash": "FlashAttention-2",
    "streaming read": "only reads",
    "matmul": "torch.matmul",
    "bf16": "bfloat16",
}


# A run's revision by its name after a rebase, whose kernels are the same text.
REBASED = dict.fromkeys(("4a04cdd", "99b9fb8"), "e62ca1e")


@lru_cache
def report(name: str) -> Report:
    """A file of bench/results that a bench of rows wrote."""
    return load(RESULTS / f"{name}.json")


def row_of(name: str, row: str) -> RowResult:
    """One of its rows; ValueError names those there are."""
    found = {each.name: each for each in report(name).rows}
    if row not in found:
        raise ValueError(f"{name} has no row {row!r}; it has {', '.join(found)}")
    return found[row]


def median(name: str, row: str, peer: str) -> float | None:
    """The median time in microseconds; None where the peer did not run or its gate was red."""
    found = row_of(name, row)
    samples, gate = found.samples.get(peer), found.gates.get(peer)
    if samples is None or samples.failure or (gate and not gate.passed):
        return None
    return samples.median


def rate(name: str, row: str, peer: str) -> float | None:
    """TFLOP/s; of a decode TB/s of keys and values."""
    time = median(name, row, peer)
    found = row_of(name, row)
    work = found.kv_bytes if report(name).bench == "decode" else found.flops
    return None if time is None else work / time / 1e6


def _ratios(name: str, peer: str, pattern: str, ours: str) -> dict[str, float]:
    found = ratios(report(name), peer.replace("_", " "), ours)
    return {row: value for row, value in found.items() if re.search(pattern, row)}


def ratio(name: str, peer: str, pattern: str = "", ours: str = OURS) -> str:
    """The peer's time over ours: of one row, or the geometric mean of those that match."""
    return f"{statistics.geometric_mean(_ratios(name, peer, pattern, ours).values()):.2f}"


def least(name: str, peer: str, pattern: str = "", ours: str = OURS) -> str:
    """The least of these ratios."""
    return f"{min(_ratios(name, peer, pattern, ours).values()):.2f}"


def greatest(name: str, peer: str, pattern: str = "", ours: str = OURS) -> str:
    """The greatest of these ratios."""
    return f"{max(_ratios(name, peer, pattern, ours).values()):.2f}"


def us(name: str, row: str, peer: str = OURS, digits: str = "1") -> str:
    """A median in microseconds; a peer's name may have `_` for a space, as in tables."""
    time = median(name, row, peer.replace("_", " "))
    if time is None:
        raise ValueError(f"{name}: {peer} has no time in {row}")
    return f"{time:.{digits}f}"


def number(name: str, path: str, digits: str = "2", factor: str = "1") -> str:
    """A number of a file by the keys that lead to it, `_` for a space; of a list the median."""
    value: Any = json.loads((RESULTS / f"{name}.json").read_text())
    for key in path.split("/"):
        if isinstance(value, list):
            value = value[int(key)]
        else:
            value = value[key if key in value else key.replace("_", " ")]
    value = statistics.median(value) if isinstance(value, list) else value
    return f"{value * float(factor):.{digits}f}"


def table(name: str, peers: str, pattern: str = "", *also: str) -> str:
    """Times and rates of the rows that match, and the paired ratios; below it the file's note.

    also: `times` for a table without rates, `rates` for one without times. ValueError where no
    row matches.
    """
    shown = peers.replace("_", " ").split(",")
    read = "streaming read"
    found = {peer: ratios(report(name), peer) for peer in shown if peer not in (OURS, read)}
    compared = {peer: by_row for peer, by_row in found.items() if by_row}
    others = list(compared)
    unit = "TB/s" if report(name).bench == "decode" else "TFLOP/s"
    columns = "µs" if "times" in also else unit if "rates" in also else f"µs ({unit})"
    head = ["row", *(f"{NAMES.get(p, p)}, {columns}" for p in shown)]
    head += [f"over {NAMES.get(peer, peer)}" for peer in others]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    chosen = [row.name for row in report(name).rows if re.search(pattern, row.name)]
    if not chosen:
        raise ValueError(f"no row of {name} matches {pattern!r}")
    for row in chosen:
        cells = [_cell(name, row, peer, also) for peer in shown]
        lines.append([row, *cells, *(_two(compared[peer].get(row)) for peer in others)])
    if len(chosen) > 1 and others:
        means = [[v for row, v in compared[peer].items() if row in chosen] for peer in others]
        tail = [f"{statistics.geometric_mean(m):.2f}" if m else "-" for m in means]
        lines.append(["geometric mean", *[""] * len(shown), *tail])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"\n\n{text}{note(name)}"


def note(name: str) -> str:
    """The footnote of a file: where it was measured, with what, at which revision."""
    data = json.loads((RESULTS / f"{name}.json").read_text())
    places = data.get("environments") or [data.get("environment") or data]
    first = places[0]
    revisions = sorted({REBASED.get(at := place["revision"], at) for place in places})
    also = f", FlashAttention-4 {first['flash-attn-4']}" if "flash-attn-4" in first else ""
    return (
        f"\n\n[^{name}]: `bench/results/{name}.json`: {first['device']}, torch {first['torch']}, "
        f"Triton {first['triton']}{also}, revision {' and '.join(revisions)}.\n\n"
    )


def mods() -> str:
    """The gallery: every mod of the catalogue, and how fast it ran beside torch's kernel."""
    name = "h200-prefill-torch"

    def speed(row: str) -> str:
        return (
            f"Measured: {us(name, row, digits='0')} µs, {ratio(name, 'torch-flex-tuned', row)} "
            f"times as fast as torch's flex_attention with max-autotune (row `{row}`).[^{name}]"
        )

    return f"\n\n{gallery(speed)}{note(name)}"


def _cell(name: str, row: str, peer: str, also: tuple[str, ...]) -> str:
    time = median(name, row, peer)
    if time is None:
        return "-"
    speed = _rate(name, row, peer)
    if "rates" in also:
        return speed
    return f"{time:.1f}" if "times" in also else f"{time:.1f} ({speed})"


def _rate(name: str, row: str, peer: str) -> str:
    value = rate(name, row, peer)
    if value is None:
        return ""
    return f"{value:.2f}" if report(name).bench == "decode" else f"{value:.0f}"


def _two(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.2f}"


VERBS: Mapping[str, Callable[..., str]] = {
    verb.__name__: verb for verb in (ratio, least, greatest, us, number, table, note, mods)
}

# Rows of the chart: FlashAttention-4 and cuDNN were raced in one run, torch's kernel in another.
CHART = {
    "D 64": "d64-16k-causal",
    "D 128": "d128-16k-causal",
    "D 256": "d256-16k-causal",
    "soft cap": "d128-8k-softcap",
    "bias by distance": "d128-8k-relative",
    "window": "d128-8k-window",
    "documents": "d128-8k-documents",
}


def forward_chart() -> str:
    """Ours beside FlashAttention-4, cuDNN and torch's flex_attention."""
    one, other = "h200-prefill-fa4", "h200-prefill-torch"
    series = {
        "flexattn": [rate(one, row, OURS) for row in CHART.values()],
        "FlashAttention-4": [rate(one, row, "fa4") for row in CHART.values()],
        "cuDNN": [rate(one, row, "sdpa-cudnn") for row in CHART.values()],
        "torch, max-autotune": [rate(other, row, "torch-flex-tuned") for row in CHART.values()],
    }
    title = "Forward on an H200, bfloat16: causal at 16k, and mods at 8k with D 128"
    remark = (
        "torch's bars are of a second run. Gaps: cuDNN takes no mods; FA4 was given no documents."
    )
    return bars(title, "TFLOP/s", list(CHART), series, remark)


def mask_picture() -> str:
    """Packed documents, each causal: the mask beside the chart."""
    import torch

    inside = of_document(document_ids(torch.tensor([0, 420, 1100, 1300, 2048])))

    def packed(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return causal(b, h, q_idx, kv_idx) & inside(b, h, q_idx, kv_idx)

    return cells(visualize(packed, 2048, cells=64), "four documents, causal")


def selection_picture() -> str:
    """Blocks of rows that each chose blocks of keys, causal."""
    import torch

    block, unit = torch.arange(16)[:, None], torch.arange(32)
    # As if scores had chosen: the first block, the row's own two, and a few others.
    far = (unit * unit * 3 + block * block * 5 + unit * block * 2 + unit // 3) % 7 == 0
    chosen = (unit == 0) | (unit // 2 == block) | far

    def kept(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return chosen[q_idx // 128, kv_idx // 64] & causal(b, h, q_idx, kv_idx)

    return cells(visualize(kept, 2048, cells=64), "128 rows choose 64 keys")


PICTURES: Mapping[str, Callable[[], str]] = {
    "docs/pictures/selection.svg": selection_picture,
    "docs/pictures/forward.svg": forward_chart,
    "docs/pictures/mask.svg": mask_picture,
    **{
        f"docs/pictures/gallery/{name}.svg": partial(picture, name)
        for names in GROUPS.values()
        for name in names.split()
    },
}


def rewritten(text: str) -> str:
    """The page with every figure as the files say it. Raises ValueError for one nobody knows."""

    def figure(found: re.Match[str]) -> str:
        verb, *arguments = found[1].split()
        if verb not in VERBS:
            raise ValueError(f"<!--= {found[1]} -->: the verbs are {', '.join(VERBS)}")
        return f"<!--= {found[1]} -->{VERBS[verb](*arguments)}<!--.-->"

    return FIGURE.sub(figure, text)


def pages() -> Iterable[Path]:
    """README and the pages of the manual."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    """Write all figures anew."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        page.write_text(rewritten(text), encoding="utf-8")
    for name, draw in PICTURES.items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
