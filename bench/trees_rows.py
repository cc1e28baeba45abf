"""The rows of `bench.trees`: a process sends them as data to the children of both checkouts.

They are the rows of the other benches by the bench's name, and those that no bench has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from bench.chunks import chunk_rows
from bench.random_draw import SEEDS, drawn
from bench.rows import (
    Row,
    Shape,
    backward_rows,
    decode_rows,
    host_rows,
    prefill_rows,
    shape_rows,
)
from bench.serving_rows import ServingRow, serving_rows

# Groups of plans whose rows take long, or say what others say.
LEFT_OUT = ("long", "contiguous", "random-chunks", "chosen")
# Plans that are also raced over a cache of eight bits.
EIGHT_BITS = ("ragged-b64", "2k-of-2k", "2k-of-16k", "4x1000", "1984-of-8k-64x4k")
INVARIANT = ("b1-8k", "b8-8k", "b64-4k", "b1-4k-q1k")


@dataclass(frozen=True)
class AppendRow:
    """An AppendPlan's run of new tokens into pages. scaled: "", "head" or "token_head"."""

    tokens: int
    scaled: str = ""
    hkv: int = 8
    d: int = 128
    page: int = 16

    @property
    def rope(self) -> bool:
        """True where keys are rotated before they are stored."""
        return self.scaled == "token_head"


@dataclass(frozen=True)
class RaceRow:
    """A call of flex_attention, or a plan's or an AppendPlan's run, by the name `group/row`.

    clock: what is timed, "eager" calls, graph "replay" from a cold L2, the "host" alone, or a
    fresh "process", whose `first` call or import it is. backward: of a call, its gradients.
    invariant: each row's bits are its own. grows: of a call, the keys of the first one, where
    each has a key more.
    """

    name: str
    of: Row | ServingRow | AppendRow
    clock: Literal["eager", "replay", "host", "process"] = "eager"
    backward: bool = False
    invariant: bool = False
    grows: int = 0
    first: Literal["", "import", "call"] = ""


def race_row(data: dict[str, Any]) -> RaceRow:
    """The row that `dataclasses.asdict` and JSON have made a dict of."""
    of = data["of"]
    if "shape" in of:
        row: Any = Row(**of | {"shape": Shape(**of["shape"])})
    else:
        row = (AppendRow if "tokens" in of else ServingRow)(**of)
    return RaceRow(**data | {"of": row})


def race_rows() -> dict[str, RaceRow]:
    """Every row by its name, `group/row`."""
    return {row.name: row for row in _all()}


def _all() -> Iterator[RaceRow]:
    natten = Row("d128-8k-natten", "mods", Shape(4, 16, 16, 8192, 8192, 128), "natten")
    for row in (*prefill_rows(), *shape_rows(), natten):
        yield RaceRow(f"prefill/{row.name}", row)
    for row in backward_rows():
        if row.group != "forward":
            yield RaceRow(f"backward/{row.name}", row, backward=True)
    for row in decode_rows():
        yield RaceRow(f"decode/{row.name}", row, "replay")
    plans = [row for row in (*serving_rows(), *chunk_rows()) if row.group not in LEFT_OUT]
    eight = [replace(row, variant="fp8") for row in plans if row.name in EIGHT_BITS]
    for plan in (*plans, *eight):
        name = f"{plan.name}-fp8" if plan in eight else plan.name
        yield RaceRow(f"serving/{name}", plan, "replay")
        if name in INVARIANT:
            yield RaceRow(f"invariant/{name}", plan, "replay", invariant=True)
    for d, heads in ((64, 32), (128, 16)):
        row = Row(f"d{d}-4k-causal", "grid", Shape(8, heads, heads, 4096, 4096, d), "causal")
        yield RaceRow(f"invariant/{row.name}", row, invariant=True)
    for tokens in (64, 8192):
        for scaled in ("", "head", "token_head"):
            name = f"append/{tokens}-{scaled or 'bf16'}"
            yield RaceRow(name, AppendRow(tokens, scaled), "replay")
    for seed in SEEDS:
        for case in drawn(seed):
            clock = "eager" if isinstance(case.row, Row) and case.kind != "decode" else "replay"
            yield RaceRow(f"random/{case.name}", case.row, clock)
    yield from _host()


def _host() -> Iterator[RaceRow]:
    """Rows of the host's time per call: sizes that the GPU finishes sooner."""
    for row in host_rows():
        name = row.name.removeprefix("host-").removeprefix("causal-")
        yield RaceRow(f"host/{name}", row, "host", grows=4097 * (name == "growing"))
    short = Shape(1, 16, 16, 512, 512, 128)
    causal = Row("backward", "host", short, "causal")
    yield RaceRow("host/backward", causal, "host", backward=True)
    plan = ServingRow("plan-run", "", (512,) * 4)
    yield RaceRow("host/plan-run", plan, "host")
    yield RaceRow("host/import", causal, "process", first="import")
    capped = Row("first-call", "host", short, "causal", "softcap", cap=30.0)
    yield RaceRow("host/first-call", capped, "process", first="call")
    yield RaceRow("host/first-plan", replace(plan, name="first-plan"), "process", first="call")


def shrunk(row: RaceRow, factor: int) -> RaceRow:
    """The same row of so many times fewer keys, and of at most two requests: for tests."""
    if factor == 1:
        return row

    def least(n: int, low: int = 24) -> int:
        return min(n, max(low, n // factor))

    of: Any = row.of
    if isinstance(of, AppendRow):
        return replace(row, of=replace(of, tokens=least(of.tokens)))
    if isinstance(of, Row):
        s = of.shape
        hkv, keys = min(s.hkv, 2), 64 if row.grows else least(s.kv_len)
        rows = s.q_len if s.q_len == 1 else least(s.q_len)
        small = Shape(min(s.batch, 2), s.hq // s.hkv * hkv, hkv, rows, keys, s.d)
        of = replace(of, shape=small, window=least(of.window))
        return replace(row, of=of, grows=min(row.grows, 17))
    hkv = min(of.hkv, 2)
    new = tuple(least(n, 3) for n in of.new[:2])
    levels = tuple((min(nodes, 1), of.page) for nodes, _ in of.nodes)
    shared = sum(keys for _, keys in levels)
    lens = [shared + least(n, 40) - i for i, n in enumerate(of.lens[:2])]
    q_len = of.q_len if of.q_len == 1 else least(of.q_len, 3)
    rows = new or (q_len,) * len(lens)
    lens = tuple(max(n, own) for n, own in zip(lens, rows, strict=True))
    of = replace(
        of, hq=of.hq // of.hkv * hkv, hkv=hkv, lens=lens, new=new, levels=levels, shared=shared,
        q_len=q_len,
    )  # fmt: skip
    return replace(row, of=of)
