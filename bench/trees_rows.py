"""The rows of `bench.trees`, as data: one process sends a row to the children of both checkouts.

A row of `kind` call is a call of flex_attention, with `backward` its gradients; of kind plan a
DecodePlan's run (with `levels` a TreePlan's); of kind append an AppendPlan's. `clock` says what is
timed: "eager" calls, graph "replay" from a cold L2, the "host" alone, or a fresh "process".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from bench.random_draw import SEEDS, drawn
from bench.rows import HEADS, TOKENS, Row, decode_rows, prefill_rows
from bench.serving_rows import ServingRow, serving_rows
from bench.shapes import Shape

__all__ = ["RaceRow", "race_rows", "shrunk"]

RaceRow = dict[str, Any]
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
LLAMA = {"hq": 32, "hkv": 8}


def race_rows() -> dict[str, RaceRow]:
    """Every row by its name, `group/row`."""
    return {row["name"]: row for row in _all()}


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
            yield _call("prefill", row.name, row.shape, mask=row.mask, dtype="float8_e4m3fn")
    for d in HEADS:
        for mod in ("causal", "documents", *(("relative", "softcap", "alibi") * (d == 128))):
            about = _mod(mod) | {"learned": mod == "relative", "backward": True}
            yield _call("backward", f"d{d}-8k-{mod}", _square(d, 8192), **about)
    for row in decode_rows():
        mods = {"score": row.score, "cap": row.cap}
        yield _call("decode", row.name, row.shape, clock="replay", **mods)
    for served in serving_rows():
        if served.group not in ("long", "contiguous") or served.name == "b8-8k-contiguous":
            yield _plan("mla" if served.group == "mla" else "serving", served)
    yield _plan("serving", ServingRow("ragged-b64-fp8", "", RAGGED, "fp8"))
    for name, (lens, new) in PROMPTS.items():
        for variant in ("causal", "fp8"):
            row = ServingRow(f"prompt-{name}-{variant}", "", lens, variant)  # type: ignore[arg-type]
            yield _plan("serving", row, new=new, mask="causal", clock="replay")
    for tokens in (64, 8192):
        for scaled in ("", "head", "token_head"):
            name = f"append/{tokens}-{scaled or 'bf16'}"
            yield {
                "kind": "append", "name": name, "clock": "replay", "tokens": tokens,
                "hkv": 8, "d": 128, "page": 16, "scaled": scaled, "rope": scaled == "token_head",
            }  # fmt: skip
    yield from _invariant()
    for seed in SEEDS:
        for case in drawn(seed):
            if isinstance(case.row, ServingRow):
                yield _plan("random", case.row)
            else:
                about = {"mask": case.row.mask, "dtype": case.dtype}
                clock = "replay" if case.kind == "decode" else "eager"
                yield _call("random", case.name, case.row.shape, clock=clock, **about)
    yield from _host()


def _invariant() -> Iterator[RaceRow]:
    for d in (64, 128):
        yield _call(
            "invariant", f"d{d}-4k-causal", _square(d, 4096), mask="causal", invariant=True
        )
    for batch, k in ((1, 8), (8, 8), (64, 4)):
        row = ServingRow(f"b{batch}-{k}k", "", (k * 1024,) * batch)
        yield _plan("invariant", row, invariant=True)
    row = ServingRow("b1-4k-q1k", "", (4096,), "causal", q_len=1024)
    yield _plan("invariant", row, invariant=True)


def _host() -> Iterator[RaceRow]:
    """Rows of the host's time per call: sizes that the GPU finishes sooner."""
    short, decode = Shape(1, 16, 16, 512, 512, 128), Shape(1, 32, 8, 1, 512, 128)
    yield _call("host", "plain", short, clock="host")
    yield _call("host", "causal", short, mask="causal", clock="host")
    yield _call("host", "captured", short, mask="causal", score="alibi", clock="host")
    yield _call("host", "decode", decode, clock="host")
    yield _call("host", "growing", Shape(1, 32, 8, 1, 8192, 128), clock="host", grows=4097)
    yield _call("host", "backward", short, mask="causal", backward=True, clock="host")
    yield _plan("host", ServingRow("plan-run", "", (512,) * 4), clock="host")
    yield {"kind": "process", "name": "host/import", "clock": "process", "what": "import"}
    capped = _call("host", "first-call", short, mask="causal", score="softcap", cap=30.0)
    yield capped | {"kind": "process", "clock": "process", "what": "call"}
    plan = _plan("host", ServingRow("first-plan", "", (512,) * 4))
    yield plan | {"kind": "process", "clock": "process", "what": "call"}


def _square(d: int, length: int) -> Shape:
    return Shape(max(1, TOKENS // length), HEADS[d], HEADS[d], length, length, d)


def _mod(name: str) -> RaceRow:
    """A mod's score and mask; scores are of causal attention."""
    if name == "softcap":
        return {"score": name, "mask": "causal", "cap": 30.0}
    if name in ("alibi", "relative"):
        return {"score": name, "mask": "causal"}
    return {"mask": name, "window": 1024}


def _call(group: str, name: str, shape: Shape, **about: Any) -> RaceRow:
    row = asdict(Row(name, "grid", shape))
    row |= {"kind": "call", "clock": "eager", "backward": False, "invariant": False, "grows": 0}
    row |= row.pop("shape") | {"dtype": "bfloat16"} | about
    if row["mask"] == "documents":
        row["documents"] = Row(name, "grid", shape, "documents").documents
    return row | {"name": f"{group}/{name}", "dv": row["dv"] or row["d"]}


def _plan(group: str, served: ServingRow, new: tuple[int, ...] = (), **about: Any) -> RaceRow:
    """`new`: query rows of each request, which cu_seqlens_q cuts; none, and all have q_len."""
    variant, row = served.variant, asdict(served)
    row |= {"kind": "plan", "clock": "replay", "invariant": False, "levels": served.nodes}
    row |= {"new": new or (served.q_len,) * len(served.lens), "ragged": bool(new)}
    row |= {"mask": "full", "score": "none", "cap": 30.0, "window": max(served.lens) // 2 - 1}
    if variant in ("softcap", "alibi"):
        row["score"] = variant
    elif variant in ("window", "causal", "tree"):
        row["mask"] = variant
    row["fp8"] = {"fp8": "head", "fp8-token-head": "token_head"}.get(variant, "")
    row |= {"sinks": variant == "sinks", "mla": variant == "mla"}
    row["shares"] = variant in ("cascade", "prefix-tree")
    return row | about | {"name": f"{group}/{served.name}"}


def shrunk(row: RaceRow, factor: int) -> RaceRow:
    """The same row of so many times fewer keys, and of at most two requests: for tests."""
    if factor == 1:
        return row

    def least(n: int, low: int = 24) -> int:
        return min(n, max(low, n // factor))

    small = dict(row)
    if "hq" in row:
        group = row["hq"] // row["hkv"]
        small |= {"hkv": min(row["hkv"], 2), "hq": group * min(row["hkv"], 2)}
    for name in ("q_len", "kv_len", "window", "tokens"):
        if row.get(name, 1) > 1:
            small[name] = least(row[name])
    if "batch" in row:
        small["batch"] = min(row["batch"], 2)
    if "documents" in row:
        small["documents"] = (11, 2, small["kv_len"] - 13)
    if row.get("grows"):
        small |= {"grows": 17, "kv_len": 64}
    if row["kind"] == "plan" or "lens" in row:
        small["levels"] = [(min(nodes, 1), row["page"]) for nodes, _ in row["levels"]]
        small["shared"] = sum(keys for _, keys in small["levels"])
        small["new"] = [least(n, 3) for n in row["new"][:2]]
        small["lens"] = [small["shared"] + least(n, 40) - i for i, n in enumerate(row["lens"][:2])]
        small["lens"] = [max(n, new) for n, new in zip(small["lens"], small["new"], strict=True)]
    return small
