"""`python -m bench.backward`: gradients of training shapes, GPU time of a whole backward.

A backward is all that autograd runs for it: delta or what stands for it, the gradients, and what
turns them into the inputs' dtype. Useful work is 2.5 times the forward's. Below the times stands
what a forward with its backward allocates at its peak, as a share of the bar: inputs, output,
gradients, lse, delta, and one fp32 dq. `--rows '^grid'` has the twelve rows of the bar; torch's
compiled flex_attention runs where it is named.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields

from bench.backward_peers import (
    BACKWARD_PEERS,
    TORCH_PEERS,
    Trainer,
    exactly_trained,
    ours_trained,
)
from bench.backward_runner import BACKWARD, BAR
from bench.command import main, parse_config
from bench.results import Report
from bench.rows import backward_rows
from bench.runner import Method
from bench.table import markdown
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from flexattn.kernels.triton_backward.config import BackwardConfig

__all__ = ["METHOD", "run", "table", "variant"]

# What serves where a field is of both.
_CONFIGS: dict[str, type[HopperBackwardConfig] | type[BackwardConfig]] = {
    "GLUON": HopperBackwardConfig, "TRITON": BackwardConfig,
}  # fmt: skip

METHOD = Method(rounds=15, min_ms=10.0, flush_l2=False, graph=False)


def table(report: Report) -> str:
    """The table of times, and that of memory below it."""
    names = list(dict.fromkeys(n for row in report.rows for n in row.memory if n != BAR))
    lines = [["row", "bar, MiB", *names], ["---"] * (2 + len(names))]
    for row in report.rows:
        if row.memory:
            shares = [row.memory[n] / row.memory[BAR] if n in row.memory else None for n in names]
            cells = ["-" if share is None else f"{share:.3f}" for share in shares]
            lines.append([row.name, f"{row.memory[BAR] / 2**20:.0f}", *cells])
    text = ["| " + " | ".join(cells) + " |" for cells in lines] if names else []
    return "\n".join([markdown(report), *["", "peak memory over the bar:"] * bool(text), *text])


def variant(text: str) -> Trainer:
    """Ours with kernel options, or with fields of a template's config: "dp_rs=1", "guarded=1"."""
    given = parse_config(text)
    if all(map(_is_option, given)):
        return ours_trained(given)
    for backend, config in _CONFIGS.items():
        known = {each.name: each.type for each in fields(config)}
        if given.keys() <= known.keys():
            found = {n: bool(x) if known[n] == "bool" else x for n, x in given.items()}
            return exactly_trained(found, backend)
    return ours_trained(given)


def _is_option(name: str) -> bool:
    return name.isupper() or name.startswith("num_")


def run(argv: Sequence[str] | None = None) -> int:
    """The bench's command; the status as bench.command.main's."""
    return main(
        "backward", backward_rows(), METHOD, argv, known=BACKWARD_PEERS, table=table,
        named=TORCH_PEERS, variant=variant, kind=BACKWARD,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run())
