"""`python -m bench.mods`: what a mod costs, as a share of plain causal attention's rate.

In each row, plain causal attention on the same tensors runs in the same interleaved race, in both
of our templates and in torch. A share is the rate per useful element with the mod over that
without: 1 is free.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from bench.command import main
from bench.inputs import Inputs
from bench.peers import PEERS, TEMPLATES, Peer, Refusal
from bench.results import Report, RowResult
from bench.rows import Row, mods_rows
from bench.runner import Method
from flexattn.catalogue.masks import causal
from flexattn.measure.timing import Ratio, paired_ratio

__all__ = ["BARS", "METHOD", "RIVALS", "base_of", "share", "table"]

METHOD = Method(rounds=20, min_ms=10.0, flush_l2=False, graph=False)
TRITON, GLUON = TEMPLATES
TORCH = "torch-flex"
# Of plain causal's rate per useful element. In the Triton template times within 3, 30 and 25 % of
# plain causal's, then shares of its rate at 16k; the Hopper template has shares alone.
BARS = {
    TRITON: {
        "mods-8k-alibi": 1 / 1.03,
        "mods-8k-softcap": 1 / 1.30,
        "mods-8k-relative": 1 / 1.25,
        "mods-16k-window": 0.75,
        "mods-16k-documents": 0.80,
    },
    GLUON: {"mods-8k-alibi": 0.97, "mods-8k-softcap": 0.80, "mods-8k-relative": 0.75},
}
# A bar holds when the median reaches it within 2 %.
MARGIN = 0.98
ROWS = {row.name: row for row in mods_rows()}


def _plain(peer: Peer) -> Peer:
    """The plain causal call on a row's tensors; a row that is that call needs no second."""

    def build(inputs: Inputs) -> Callable[[], Tensor] | Refusal:
        if inputs.row.plain:
            return Refusal("the row is plain causal attention itself")
        row = replace(inputs.row, mask="causal", score="none")
        return peer(replace(inputs, row=row, score_mod=None, mask_mod=causal))

    return build


_MEASURED = {**TEMPLATES, TORCH: PEERS[TORCH]}
RIVALS: dict[str, Peer] = _MEASURED | {f"causal-{n}": _plain(p) for n, p in _MEASURED.items()}


def base_of(name: str) -> str:
    """The plain call that a peer is compared with; `--config` makes variants of both templates."""
    if name in RIVALS:
        return f"causal-{name}"
    return f"causal-{GLUON if 'consumers' in name else TRITON}"


def share(result: RowResult, row: Row, name: str, base: str) -> Ratio | None:
    """The rate of `name` per useful element over that of the plain call `base`, round by round."""
    if name not in result.samples or base not in result.samples:
        return None
    times = paired_ratio(result.samples[base], result.samples[name])
    work = row.flops / replace(row, mask="causal", score="none").flops
    return Ratio(times.value * work, times.low * work, times.high * work, times.rounds)


def table(report: Report) -> str:
    """A markdown table of shares beside the bars, and what was refused or is red below it."""
    ran = list(dict.fromkeys(n for r in report.rows for n in (*r.gates, *r.samples)))
    names = [name for name in ran if not name.startswith("causal-")]
    head = ["row", *(f"{name}: µs, TFLOP/s, share of causal" for name in names), "bars"]
    lines = [head, ["---"] * len(head)]
    for result in report.rows:
        row = ROWS[result.name]
        bars = [_verdict(result, row, name) for name in names]
        cells = [_cell(result, row, name) for name in names]
        lines.append([result.name, *cells, ", ".join(filter(None, bars)) or "-"])
    text = ["| " + " | ".join(cells) + " |" for cells in lines]
    text += ["", *(f"measured on {_facts(each)}" for each in report.environments)]
    for result in report.rows:
        red = [f"{name}: {gate.message}" for name, gate in result.gates.items() if not gate.passed]
        failed = [f"{n}: {s.failure}" for n, s in result.samples.items() if s.failure]
        refused = [f"{n}: {w}" for n, w in result.refused.items() if not n.startswith("causal-")]
        text += [f"{result.name}, {each}" for each in (*red, *failed, *refused)]
    return "\n".join(text)


def _verdict(result: RowResult, row: Row, name: str) -> str:
    bar = BARS.get(name, {}).get(result.name)
    found = share(result, row, name, base_of(name))
    if bar is None or found is None or math.isnan(found.value):
        return ""
    return f"{name} {'meets' if found.value >= MARGIN * bar else 'misses'} {bar:.3f}"


def _cell(result: RowResult, row: Row, name: str) -> str:
    samples = result.samples.get(name)
    if name in result.gates and not result.gates[name].passed:
        return "gate red"
    if samples is None or samples.failure:
        return "failed" if samples else "-"
    text = f"{samples.median:.1f}, {row.flops / samples.median / 1e6:.0f}"
    found = share(result, row, name, base_of(name))
    if found is None:
        return text
    return f"{text}, {found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _facts(facts: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())


if __name__ == "__main__":
    sys.exit(main("mods", mods_rows(), METHOD, known=RIVALS, table=table))
