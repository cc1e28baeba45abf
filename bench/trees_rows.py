"""The rows of `bench.trees`: a process sends them as data to the children of both checkouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from bench.random_draw import SEEDS, drawn
from bench.rows import HEADS, TOKENS, Row, Shape, decode_rows, host_rows, prefill_rows
from bench.serving_rows import ServingRow, serving_rows

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
# Head dimension of keys, of values, query heads and key heads.
DIMS = (
    (40, 40, 51, 51), (80, 80, 25, 25), (96, 96, 21, 21), (192, 128, 32, 32), (512, 512, 8, 8),
    (576, 512, 16, 1),
)  # fmt: skip
MODS = ("alibi", "softcap", "documents", "window", "natten", "relative")
# Keys of a request at most, and its new tokens; a batch of chunks beside steps of decoding.
PROMPTS = {"2k-of-2k": ((2048,), (2048,)), "2k-of-16k": ((16384,), (2048,)),
           "4x512-of-8k": ((8192,) * 4, (512,) * 4),
           "mixed": ((4096, *range(1024, 9216, 1171)), (1024,) + (1,) * 7)}  # fmt: skip
RAGGED = tuple(max(128, int(32768 / (i + 1) ** 0.8)) for i in range(64))


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
    for d in HEADS:
        for length in LENGTHS:
            for mask in ("full", "causal"):
                yield _call("prefill", f"d{d}-{length}-{mask}", _square(d, length), mask=mask)
    for d, dv, hq, hkv in DIMS:
        for mask in ("full", "causal"):
            shape = Shape(2, hq, hkv, 4096, 4096, d)
            yield _call("dims", f"{d}-{dv}-4k-{mask}", shape, mask=mask, dv=dv)
    for d in HEADS:
        for mod in MODS:
            yield _call("mods", f"d{d}-8k-{mod}", _square(d, 8192), **_mod(mod))
    for row in prefill_rows():
        if row.group == "fp8":
            yield RaceRow(f"prefill/{row.name}", row)
    for d in HEADS:
        for mod in ("causal", "documents", *(("relative", "softcap", "alibi") * (d == 128))):
            about = _mod(mod) | {"learned": mod == "relative"}
            made = _call("backward", f"d{d}-8k-{mod}", _square(d, 8192), **about)
            yield replace(made, backward=True)
    for row in decode_rows():
        yield RaceRow(f"decode/{row.name}", row, "replay")
    for served in serving_rows():
        if served.group not in ("long", "contiguous") or served.name == "b8-8k-contiguous":
            yield _plan("mla" if served.group == "mla" else "serving", served)
    yield _plan("serving", ServingRow("ragged-b64-fp8", "", RAGGED, "fp8"))
    for name, (lens, new) in PROMPTS.items():
        yield _plan("serving", ServingRow(f"prompt-{name}-causal", "", lens, "causal", new=new))
        yield _plan("serving", ServingRow(f"prompt-{name}-fp8", "", lens, "fp8", new=new))
    for tokens in (64, 8192):
        for scaled in ("", "head", "token_head"):
            name = f"append/{tokens}-{scaled or 'bf16'}"
            yield RaceRow(name, AppendRow(tokens, scaled), "replay")
    yield from _invariant()
    for seed in SEEDS:
        for case in drawn(seed):
            clock = "eager" if isinstance(case.row, Row) and case.kind != "decode" else "replay"
            yield RaceRow(f"random/{case.name}", case.row, clock)
    yield from _host()


def _invariant() -> Iterator[RaceRow]:
    for d in (64, 128):
        made = _call("invariant", f"d{d}-4k-causal", _square(d, 4096), mask="causal")
        yield replace(made, invariant=True)
    for batch, k in ((1, 8), (8, 8), (64, 4)):
        row = ServingRow(f"b{batch}-{k}k", "", (k * 1024,) * batch)
        yield replace(_plan("invariant", row), invariant=True)
    row = ServingRow("b1-4k-q1k", "", (4096,), "causal", q_len=1024)
    yield replace(_plan("invariant", row), invariant=True)


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


def _square(d: int, length: int) -> Shape:
    return Shape(max(1, TOKENS // length), HEADS[d], HEADS[d], length, length, d)


def _mod(name: str) -> dict[str, Any]:
    """A mod's score and mask; scores are of causal attention."""
    if name == "softcap":
        return {"score": name, "mask": "causal", "cap": 30.0}
    if name in ("alibi", "relative"):
        return {"score": name, "mask": "causal"}
    return {"mask": name, "window": 1024}


def _call(group: str, name: str, shape: Shape, **about: Any) -> RaceRow:
    return RaceRow(f"{group}/{name}", Row(name, group, shape, **about))


def _plan(group: str, served: ServingRow) -> RaceRow:
    return RaceRow(f"{group}/{served.name}", served, "replay")


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
