"""untuned.jsonl: the problems that were met without a tuned record, as data to tune them from.

A line holds a problem's structure and sizes, its mods as expressions, what they capture in shapes
and dtypes (tensors' contents never, numbers as they are), and the class of its mask.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from flexattn.device import Device
from flexattn.errors import CacheError
from flexattn.mods import Bound, Mod
from flexattn.mods.derivative import loaded_floats
from flexattn.mods.recorded import from_data, number_from_data, number_to_data, to_data
from flexattn.problem import (
    DTYPES,
    FP8,
    ITEMSIZE,
    MAX_HEADS,
    MAX_LENGTH,
    NARROWER,
    Captures,
    Problem,
    Structure,
)
from flexattn.records.codec import decode, encode
from flexattn.records.record import SCHEMA, Key, Sizes, key_of
from flexattn.settings import current, log, say_once
from flexattn.util.files import append_line, drop_lines, read_regular
from flexattn.util.locks import Lru

_MAX_FILE, MAX_LINE = 4 * 2**20, 2**18
MAX_NOTED = 1000
MAX_ELEMENTS = 2**32
# Blocks of a mask that is rebuilt, which takes some twenty bytes of memory for each.
MAX_BLOCKS = 2**28
_CLASS = re.compile(r"|unknown|empty|d1(/(2|4|8|16|32|64))? i(1|2|4|8|16) (runs|gaps)")
COMMAND = "flexattn tune --from-untuned"
_NAMES = DTYPES | FP8
_NARROWER = {_NAMES[q]: tuple(_NAMES[kv] for kv in found) for q, found in NARROWER.items()}

_noted: Lru[tuple[Key, str], bool] = Lru(MAX_NOTED)


@dataclass(frozen=True, slots=True)
class UntunedMod:
    """A mod and what it captured: dtype and shape of each tensor, in the order of its buffers."""

    mod: Mod
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    contiguous: tuple[bool, ...]
    scalars: tuple[int | float | bool, ...]


@dataclass(frozen=True, slots=True)
class Untuned:
    """One problem that was met; how: what served it then ("default", "nearest" or "hint")."""

    problem: Problem
    device: str
    how: str
    made: str
    score: UntunedMod | None
    mask: UntunedMod | None


# Of the fields of a problem and its structure, those that a line has not as they are.
_UNLISTED = frozenset(
    ("structure score mask rules_off tanh dropout batch_invariant fp8_weights ragged_kv").split()
)
_SIZES = [field.name for field in fields(Problem) if field.name not in _UNLISTED]


def untuned_path() -> Path:
    """The user's list."""
    return current().cache_dir / "untuned.jsonl"


def note(
    problem: Problem, device: Device, how: str, score: Bound | None, mask: Bound | None
) -> None:
    """Put a problem without a tuned record on the list, and log that once.

    A record of another environment is noted in mode "tune" alone, and without a word. It never
    raises: it logs once that a list cannot be written.
    """
    mode = current().mode
    if mode == "off" or device.backend == "interpreter":
        return
    if how in ("hit", "forced") or (how == "hint" and mode != "tune"):
        return
    key = key_of(problem)
    if _noted.get((key, device.name)):
        return
    _noted.put((key, device.name), True)
    if how != "hint":
        instead = "the static default" if how == "default" else "the nearest sizes' record"
        say_once(
            f"no tuned record for {problem.describe()} on {device.name}: {instead} serves "
            f"{key.sizes}; `{COMMAND}` tunes what is listed in {untuned_path()}",
            logging.INFO,
        )
    try:
        line = _line(problem, device, how, score, mask)
        path = untuned_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        if len(line) > MAX_LINE:
            log.debug("not listed, %d bytes are too many: %s", len(line), problem.describe())
        elif not append_line(path, line, _MAX_FILE):
            say_once(f"{path} is full, nothing is listed any more: tune what it has and remove it")
    except (OSError, ValueError) as error:
        say_once(f"{untuned_path()} cannot be written: {error}")


def read_untuned(path: Path) -> list[Untuned]:
    """The problems of a list, each key once, the first one met; it logs lines that are none.

    Raises CacheError where the file is no plain file.
    """
    raw = read_regular(path, 2 * _MAX_FILE) or b""
    found: dict[tuple[Key, str], Untuned] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        try:
            each = _untuned(line)
        except CacheError as error:
            say_once(f"{path}:{number}: not used: {error.line}")
            continue
        found.setdefault((key_of(each.problem), each.device), each)
    return list(found.values())


def drop(key: Key, device: str) -> None:
    """Take a problem off the user's list, since it has a record now; other lines stay as they are.

    It never raises: it logs once that a list cannot be written.
    """
    path = untuned_path()

    def listed(line: bytes) -> bool:
        try:
            data = json.loads(line)
            if data["device"] != device or key.sizes != _sizes(data):
                return False  # without a look at the mods
            each = _untuned(line)
        except (ValueError, KeyError, TypeError, RecursionError, CacheError):
            return False
        return key_of(each.problem) == key

    try:
        drop_lines(path, listed, 2 * _MAX_FILE)
    except FileNotFoundError:
        return
    except (OSError, CacheError) as error:
        say_once(f"{path} keeps what was tuned since: {error}")


def _sizes(data: dict[str, Any]) -> Sizes:
    return Sizes(data["B"], data["q_len"], data["kv_len"]).rounded()


def _line(
    problem: Problem, device: Device, how: str, score: Bound | None, mask: Bound | None
) -> bytes:
    s = problem.structure
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    known = {"schema": SCHEMA, "device": device.name, "how": how, "made": made}
    for part in (problem, s):
        names = {field.name for field in fields(part)} - _UNLISTED
        known |= {name: encode(getattr(part, name)) for name in sorted(names)}
    mods = {"score": _captured(s.score, score), "mask": _captured(s.mask, mask)}
    return json.dumps({**known, **mods}, allow_nan=False).encode()


def _captured(captures: Captures | None, bound: Bound | None) -> dict[str, Any] | None:
    if captures is None or bound is None:
        return None
    return {
        "mod": to_data(captures.mod),
        "tensors": [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in bound.tensors],
        "contiguous": list(captures.contiguous),
        "scalars": [number_to_data(each) for each in bound.scalars],
    }


def _untuned(raw: bytes) -> Untuned:
    if len(raw) > MAX_LINE:
        raise CacheError(f"a line of {len(raw)} bytes", f"it has at most {MAX_LINE}")
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        raise CacheError("no JSON", "a line is one object") from None
    if type(data) is not dict or data.pop("schema", None) != SCHEMA:
        raise CacheError("another schema", f"this version reads {SCHEMA}")
    score, mask = (_decoded(data.pop(name, None), name) for name in ("score", "mask"))
    if data.pop("tf32", False) is True:  # older lines have a flag
        data["fp32_products"] = "tf32x3"
    names = "device", "how", "made"
    device, how, made = (decode(str, data.pop(name, None), name) for name in names)
    sizes = {name: data.pop(name) for name in _SIZES if name in data}
    if not _UNLISTED.isdisjoint(data):
        raise CacheError(f"{sorted(_UNLISTED & data.keys())}", "a line has no such fields")
    mods = {"score": _captures(score), "mask": _captures(mask)}
    structure: Structure = decode(Structure, data | mods, "line")
    problem: Problem = decode(Problem, sizes | {"structure": structure}, "line")
    _check_line(problem)
    if not set(structure.grads) <= set(() if score is None else loaded_floats(score.mod)):
        raise CacheError(f"gradients of {structure.grads}", "they are of score's floating tensors")
    return Untuned(problem, device, how, made, score, mask)


def _check_line(p: Problem) -> None:
    """Raise CacheError for a problem that no call has, or that could not be rebuilt."""
    s, lengths, heads = p.structure, (p.B, p.q_len, p.kv_len), (p.Hq, p.Hkv)
    if s.dtype not in ITEMSIZE:
        raise CacheError(f"dtype {s.dtype[:20]}", "kernels take half, bfloat16 and float")
    if s.kv_dtype and s.kv_dtype not in _NARROWER.get(s.dtype, ()):
        raise CacheError(f"kv_dtype {s.kv_dtype[:20]}", f"it is narrower than {s.dtype}")
    if s.sinks and s.sinks not in DTYPES.values():
        raise CacheError(f"sinks {s.sinks[:20]}", "they have a dtype of 16 or 32 bits")
    if not (1 <= min(lengths) and max(lengths) <= MAX_LENGTH):
        raise CacheError(f"sizes {lengths}", f"they are from 1 to {MAX_LENGTH}")
    if min(*heads, *s.head_dims) < 1 or p.Hq % p.Hkv:
        raise CacheError("sizes", "heads are multiples, and dimensions at least 1")
    if max(heads) > MAX_HEADS:
        raise CacheError(f"{max(heads)} heads", f"at most {MAX_HEADS}")
    if s.group != (p.Hq // p.Hkv if s.kind == "decode" else 0):
        raise CacheError(f"group {s.group}", "it is decode's query heads for each KV head")
    if _CLASS.fullmatch(p.mask_class) is None or bool(p.mask_class) != bool(s.sparsity):
        raise CacheError(f"mask class {p.mask_class[:40]!r}", "it is that of its blocks")
    if s.sparsity is None:
        return
    q_block, kv_block = s.sparsity.q_block, s.sparsity.kv_block
    if min(q_block, kv_block) < 1:
        raise CacheError(f"blocks of {q_block}x{kv_block}", "they are above 0")
    blocks = -(-p.q_len // q_block) * -(-p.kv_len // kv_block)
    if blocks * (p.Hq if s.sparsity.per_head else 1) > MAX_BLOCKS:
        raise CacheError(f"{blocks} blocks", f"a mask of at most {MAX_BLOCKS} is rebuilt")


def _captures(captured: UntunedMod | None) -> Captures | None:
    return None if captured is None else Captures(captured.mod, captured.contiguous)


def _decoded(data: Any, kind: str) -> UntunedMod | None:
    if data is None:
        return None
    if type(data) is not dict or data.keys() != {"mod", "tensors", "contiguous", "scalars"}:
        raise CacheError(kind, "it is a mod with tensors, contiguous and scalars")
    mod = from_data(data["mod"])
    tensors = decode(tuple[tuple[str, tuple[int, ...]], ...], data["tensors"], "tensors")
    contiguous = decode(tuple[bool, ...], data["contiguous"], "contiguous")
    numbers = data["scalars"] if type(data["scalars"]) is list else [None]
    scalars = tuple(number_from_data(each) for each in numbers)
    buffers = [(buffer.dtype, buffer.rank) for buffer in mod.buffers]
    fits = mod.kind == kind and [(dtype, len(shape)) for dtype, shape in tensors] == buffers
    plain = len(scalars) == len(mod.scalars) and all(type(n) in _NUMBERS for n in scalars)
    small = all(math.prod(shape) <= MAX_ELEMENTS for _, shape in tensors)
    if not (fits and plain and small and len(contiguous) == len(buffers)):
        raise CacheError(f"what {kind} captures", "it is what the mod's slots ask for")
    return UntunedMod(mod, tensors, contiguous, scalars)  # type: ignore[arg-type]


_NUMBERS = (int, float, bool)


def bound_of(captured: UntunedMod) -> Bound:
    """The mod with made-up tensors of the shapes it captured: small floats, zeros for the rest.

    Zeros are in the range of whatever they index, and lie in no mask's way but their own.
    """
    draw = torch.Generator().manual_seed(0)
    tensors = []
    for dtype, shape in captured.tensors:
        kind: torch.dtype = getattr(torch, dtype)
        floats = torch.randn(shape, generator=draw) * 0.5 if kind.is_floating_point else None
        tensors.append(torch.zeros(shape, dtype=kind) if floats is None else floats.to(kind))
    return Bound(captured.mod, tuple(tensors), captured.scalars)
