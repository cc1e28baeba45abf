"""A workload file: what a deployment computes, as rows of shapes, mods and policies.

Its layers name heads, head dimensions and mods by import path; each has calls with batch mixes:

    title = "My model"
    [[layers]]
    heads = [32, 8]                                   # of the query, of the keys
    head_dim = 128                                    # or [192, 128]: of q and k, of v
    score = { mod = "my_model.mods:softcap", args = [50.0] }
    sinks = true                                      # a learned logit of each head in the sum
    [[layers.calls]]
    name = "prefill"
    mask = "flexattn.catalogue:causal"
    batch = [1, 4]                                    # x q_len (x kv_len): the product
    q_len = [2048, 8192]
    [[layers.calls]]
    name = "decode"
    mixes = [[8, 1, 8192], [64, 1, 4096]]             # or batch, q_len, kv_len one by one
    [[layers.calls]]
    name = "training"
    backward = true                                   # the forward, with lse, and the gradients
    q_len = 8192
    [[layers.calls]]
    name = "paged decode"                             # of a DecodePlan
    kind = "serving"
    page_size = [16, 64]                              # a contiguous cache without one
    lengths = ["uniform", "ragged"]                   # or "mixed": chunks of q_len and decoding
    kv_dtype = "float8_e4m3fn"                        # the queries' dtype without one
    scaled = "token_head"                             # a scale of each tensor without it
    mixes = [[64, 1, 4096]]

What a layer says holds for its calls unless they say otherwise. In args, "$B", "$Hq", "$Hkv",
"$q_len" and "$kv_len" stand for the sizes of the call. A file is data: its mods come from
flexattn.catalogue, or from modules that its reader allows, such as my_model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, cast

from flexattn.device import Device
from flexattn.errors import InputError, InputTypeError
from flexattn.mods.path import load_path
from flexattn.problem import FP8, ITEMSIZE, Kind, Shape
from flexattn.problem.serving import LENGTHS, Lengths
from flexattn.records.environment import serving_policy
from flexattn.records.record import Policy
from flexattn.tuning.tables import Table, check_values, read_file
from flexattn.util.text import DTYPE_NAMES, did_you_mean

OF_PLANS = (
    "page_size", "lengths", "kv_dtype", "scaled", "shared_kv", "batch_invariant", "selection",
)  # fmt: skip
_SHARED = (
    "dtype", "score", "mask", "sinks", "block_size", *OF_PLANS, "scale", "policy", "backward",
)  # fmt: skip
TOP = ("title", "models", "note", "dtype", "layers")
LAYER = ("name", "heads", "head_dim", *_SHARED, "calls")
CALL = ("name", "kind", "batch", "q_len", "kv_len", "mixes", *_SHARED)
FP8_NAMES = frozenset(FP8.values())
POLICY = ("graph", "cold_l2", "rounds", "min_ms")
_SIZES = ("B", "Hq", "Hkv", "q_len", "kv_len")
_MOST_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class ModPath:
    """A mod by import path; args call it where it is a factory, "$B" and the like filled in."""

    path: str
    args: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class ServedRow:
    """The part of a row about a DecodePlan's cache and batches; see flexattn.serving.

    page: keys of a page, 0 for a contiguous cache. kv_dtype: "" for the queries' dtype.
    scaled: of what a cache of eight bits has scales, "" for one of each tensor. selection: the
    most units that a KV head chooses, and keys of one; (0, 0): all keys are read.
    """

    page: int
    lengths: Lengths
    kv_dtype: str = ""
    shared_kv: bool = False
    batch_invariant: bool = False
    scaled: str = ""
    selection: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Row:
    """One call of a workload, or its backward. kind: None lets lengths decide, as dispatch does.

    sinks: whether each head has a sink, of the row's dtype. served: where a DecodePlan is meant,
    whose kind is None. lse: the call also gives the log-sum-exp, as one that is differentiated.
    Of a backward, what its score_mod captures and requires a gradient gets one. made: gives
    score_mod and mask_mod in place of `score` and `mask`.
    """

    title: str
    kind: Kind | None
    dtype: str
    shape: Shape
    score: ModPath | None
    mask: ModPath | None
    block_size: tuple[int, int]
    scale: float | None
    policy: tuple[tuple[str, float], ...]
    sinks: bool = False
    served: ServedRow | None = None
    lse: bool = False
    made: Callable[[], tuple[Callable[..., Any] | None, Callable[..., Any] | None]] | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """A file's rows, with what it says of itself. models: whose public configs it follows."""

    name: str
    title: str
    models: tuple[str, ...]
    note: str
    rows: tuple[Row, ...]


def policy_for(kind: Kind, device: Device, changes: tuple[tuple[str, float], ...] = ()) -> Policy:
    """The policy of timing unless a workload says otherwise: the one that dispatch will look
    for.
    """
    graph, cold_l2 = serving_policy(kind, device)
    base = Policy(graph, cold_l2, rounds=20, min_ms=5.0)
    return replace(base, **dict(changes))  # type: ignore[arg-type]


def read(path: Path, allow: Sequence[str] = ()) -> Workload:
    """A workload file; raises InputError that names the file, the table and the key.

    allow: modules beside this package's own whose functions it may name, which are imported.
    """
    return parse_workload(read_file(path), path.stem, str(path), allow)


def parse_workload(
    data: Mapping[str, Any], name: str, where: str, allow: Sequence[str] = ()
) -> Workload:
    """The workload in a mapping; `where` begins every error. allow: as `read` has it."""
    if isinstance(allow, str):
        raise InputTypeError(f"allow={allow!r}", "it is a list of modules' names")
    check_values(data, where)
    top = Table(data, where, TOP)
    rows: list[Row] = []
    for layer in top.tables("layers", LAYER):
        for call in layer.tables("calls", CALL):
            rows += _rows(name, top, layer, call, allow)
            _check_rows(where, len(rows))
    seen: dict[str, Row] = {}
    for row in rows:
        if seen.setdefault(row.title, row) is not row:
            raise InputError(f"{where}: two rows are called {row.title!r}", "names are unique")
    return Workload(
        name, top.text("title", name), top.texts("models"), top.text("note"), tuple(rows)
    )


def _check_rows(where: str, *counts: int) -> None:
    """Raise InputError where lists of so many sizes make too many rows, before they are made."""
    if (rows := prod(counts)) > _MOST_ROWS:
        raise InputError(
            f"{where}: {rows} rows, the product of its lists",
            f"a workload has at most {_MOST_ROWS}",
            "name fewer sizes, or write several files",
        )


def _rows(name: str, top: Table, layer: Table, call: Table, allow: Sequence[str]) -> Iterator[Row]:
    def said(key: str) -> Table:
        """The innermost table that has the key."""
        return next((t for t in (call, layer) if key in t), top if key in TOP else call)

    heads = layer.numbers("heads")
    if len(heads) not in (1, 2) or heads[0] % heads[-1]:
        raise layer.wrong("heads", "it is [query heads, key heads], the first a multiple")
    dims = layer.numbers("head_dim")
    if len(dims) not in (1, 2):
        raise layer.wrong("head_dim", "it is one number, or [of q and k, of v]")
    blocks = said("block_size").numbers("block_size") or (128,)
    if len(blocks) > 2:
        raise said("block_size").wrong("block_size", "it is one number, or [query rows, keys]")
    written = said("dtype").texts("dtype") or ("bfloat16",)
    dtypes = [DTYPE_NAMES.get(name.lower(), name) for name in written]
    for dtype in dtypes:
        if dtype not in ITEMSIZE:
            rule = f"it is one of {', '.join(ITEMSIZE)}"
            raise said("dtype").wrong("dtype", rule, did_you_mean(dtype, ITEMSIZE))
    named = " ".join(filter(None, [name, layer.text("name"), call.text("name")]))
    plans = _served(call, said)
    differentiated = said("backward").flag("backward") or False
    if differentiated and (any(plans) or not FP8_NAMES.isdisjoint(dtypes)):
        raise said("backward").wrong("backward", "plans and inputs of eight bits have none")
    score, mask = (_mod(said(role), role, allow) for role in ("score", "mask"))
    mixes = _mixes(call)
    _check_rows(call.where, len(dtypes), len(mixes), len(plans))
    for dtype, (B, q_len, kv_len), served in product(dtypes, mixes, plans):
        title = f"{named} B{B} {_lengths(q_len, kv_len)}" + _told(served, plans)
        row = Row(
            title if len(dtypes) == 1 else f"{title} {dtype}",
            _kind(call),
            dtype,
            Shape(B, heads[0], heads[-1], q_len, kv_len, dims[0], dims[-1]),
            score,
            mask,
            (blocks[0], blocks[-1]),
            said("scale").number("scale"),
            _policy(said("policy")),
            said("sinks").flag("sinks") or False,
            served,
            differentiated,
        )
        yield row
        if differentiated:
            yield replace(row, title=f"{row.title} backward", kind="backward", lse=False)


def _served(call: Table, said: Callable[[str], Table]) -> list[ServedRow | None]:
    """The caches and batches of a call's plans; [None] for a call of flex_attention."""
    pages = said("page_size").numbers("page_size", 0)
    if call.text("kind") != "serving" and not any(pages):
        for key in OF_PLANS[1:]:
            if key in call:
                raise call.wrong(key, 'it is of plans: kind = "serving"')
        return [None]
    if call.text("kind") not in ("", "serving"):
        raise call.wrong("kind", 'with page_size it is "serving"')
    names = said("lengths").texts("lengths") or ("uniform",)
    for each in names:
        if each not in LENGTHS:
            raise said("lengths").wrong("lengths", f"it is one of {', '.join(LENGTHS)}")
    kv_dtype = said("kv_dtype").text("kv_dtype")
    kv_dtype = DTYPE_NAMES.get(kv_dtype.lower(), kv_dtype)
    scaled = said("scaled").text("scaled")
    shared = said("shared_kv").flag("shared_kv") or False
    invariant = said("batch_invariant").flag("batch_invariant") or False
    chosen = said("selection").numbers("selection") or (0, 0)
    if len(chosen) != 2:
        raise said("selection").wrong("selection", "it is [k, unit]")
    _check_rows(call.where, len(pages), len(names))
    return [
        ServedRow(page, name, kv_dtype, shared, invariant, scaled, chosen)  # type: ignore[arg-type]
        for page, name in product(pages or (0,), names)
    ]


def _told(served: ServedRow | None, plans: Sequence[ServedRow | None]) -> str:
    """The words that tell a plan's row from the others of its call."""
    if served is None or len(plans) == 1:
        return ""
    return f" page {served.page} {served.lengths}"


def _lengths(q_len: int, kv_len: int) -> str:
    if q_len == 1:
        return f"{kv_len}"
    return f"{q_len}x{kv_len}"


def _mixes(call: Table) -> list[tuple[int, ...]]:
    mixes = list(call.rows("mixes", 3))
    batch, q_len, kv_len = (call.numbers(key) for key in ("batch", "q_len", "kv_len"))
    if mixes and (batch or q_len or kv_len):
        raise call.wrong("mixes", "it stands instead of batch, q_len and kv_len")
    if not mixes and not q_len:
        raise call.wrong("q_len", "a call has q_len, or mixes of [batch, q_len, kv_len]")
    _check_rows(call.where, len(batch) or 1, len(q_len), len(kv_len) or 1)
    if kv_len:
        return mixes + list(product(batch or (1,), q_len, kv_len))
    return mixes + [(B, length, length) for B, length in product(batch or (1,), q_len)]


def _kind(call: Table) -> Kind | None:
    kind = call.text("kind")
    if kind not in ("", "prefill", "decode", "serving"):
        rule = "it is prefill, decode or serving; without it the lengths decide"
        raise call.wrong("kind", rule)
    return cast(Kind, kind) if kind in ("prefill", "decode") else None


def _mod(table: Table, role: str, allow: Sequence[str]) -> ModPath | None:
    value = table.any(role, "")
    args: object = []
    if isinstance(value, Mapping):
        inner = Table(value, f"{table.where}: {role}", ("mod", "args"))
        value, args = inner.text("mod"), inner.any("args", [])
    if value == "" and role in table and not args:
        return None  # takes back what the layer said
    if not isinstance(value, str) or not isinstance(args, list):
        raise table.wrong(role, "it is the name of a mod, or { mod = …, args = […] }")
    if not value:
        return None
    if value.isidentifier():
        value = f"{_OWN[0]}:{value}"
    if not re.fullmatch(r"([\w.]+|[^:]+\.py):[\w.]+", value):
        raise table.wrong(role, "a mod is causal, package.module:function or ./file.py:function")
    for arg in args:
        if isinstance(arg, str) and arg.startswith("$") and arg[1:] not in _SIZES:
            raise table.wrong(role, f"sizes are {', '.join('$' + each for each in _SIZES)}")
    check_allowed(value, f"{table.where}: {role}", allow)
    return ModPath(value, tuple(_frozen(arg) for arg in args))


def _frozen(value: object) -> object:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value


def _policy(table: Table) -> tuple[tuple[str, float], ...]:
    value = table.any("policy", {})
    inner = Table(value, f"{table.where}: policy", POLICY)
    found = {
        "graph": inner.flag("graph"),
        "cold_l2": inner.flag("cold_l2"),
        "rounds": next(iter(inner.numbers("rounds")), None),
        "min_ms": inner.number("min_ms"),
    }
    return tuple((key, value) for key, value in found.items() if value is not None)


_OWN = ("flexattn.catalogue", "flexattn.presets.mods")


def check_allowed(path: str, where: str, allow: Sequence[str]) -> None:
    """Raise InputError for a function outside of our own modules and `allow`.

    A file that could name any function of any module could run any program.
    path: "module:function". allow: names of modules, which allow those inside them too. The
    function is also defined there: a module that imports os allows nothing of os.
    """
    module = path.partition(":")[0]
    if not _inside(module, allow):
        raise InputError(
            f"{where}: {path!r}",
            f"a workload names functions of {' and '.join(_OWN)}, and of modules that are allowed",
            f"if you trust {module}, add --allow-module {module}, in Python allow=[{module!r}]",
        )
    home = getattr(load_path(path), "__module__", None)
    if not _inside(str(home), [*allow, *(Path(each).stem for each in allow if "/" in each)]):
        raise InputError(
            f"{where}: {path!r} is from {home}",
            "a function is defined in the module that allows it",
            f"define a function in {module} that calls it",
        )


def _inside(module: str, allow: Sequence[str]) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in (*_OWN, *allow))
