"""A Record as a file's text and back: data alone, checked field by field against the types.

The text is one JSON object that people can read, a line for each field: what dispatch needs stands
first, then a line for each trial, then a checksum of all before it. Dispatch checks the sum and
decodes the head alone, so a lookup costs the same however many samples a record keeps.

Trials are lines: the names of the columns, then a list for each trial. What follows a trial's last
entry that says something is left out. A field of `config` or `gate` that is missing is what the
first one of that `type`, or of that `name`, says; a missing type or name is the very first one's.
The first config is the record's, and of a study the first trial's. Files of earlier versions have
an object for each trial, in which nothing is missing: they read alike.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from flexattn.device import is_neuron
from flexattn.errors import CacheError
from flexattn.kernels.base.config import Config
from flexattn.kernels.choose.registry import backend_of, config_class, config_names, is_config
from flexattn.records.record import SCHEMA, Answer, Environment, Key, Record, Sizes, Trial, is_time

# The parts of a trial that repeat, with the field that names their kind.
_KINDS = {"config": "type", "gate": "name"}
# A part with more fields is no config and no gate, and copies of it could fill the memory.
_MOST = 64
_DEFAULTS = {field.name: field.default for field in fields(Trial)}


def lines(
    trials: Sequence[Trial], encode: Callable[[Any], Any], config: dict[str, Any] | None = None
) -> str:
    """The columns and a line of JSON for each trial.

    encode: makes JSON data of a field's value. config: the data of the first one, written before.
    """
    first = _known(config)
    rows = [list(_DEFAULTS), *(_row(trial, encode, first) for trial in trials)]
    return ",\n".join(map(compact, rows))


def compact(data: Any) -> str:
    """JSON without spaces."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def whole_trials(rows: Any, config: Any = None) -> Any:
    """The lines as parsed, as an object with all its fields for each trial.

    What is no such line stays as it is: whoever decodes it says what is wrong. config: as above.
    """
    if type(rows) is not list:
        return rows
    if rows and type(rows[0]) is list:
        rows = [_named(rows[0], row) for row in rows[1:]]
    first = _known(config)
    return [_filled(row, first) for row in rows]


def _known(config: Any) -> dict[str, Any]:
    name = config.get("type") if type(config) is dict and len(config) <= _MOST else None
    return {"config": name, f"config {name}": config} if type(name) is str else {}


def _row(trial: Trial, encode: Callable[[Any], Any], first: dict[str, Any]) -> list[Any]:
    values = [getattr(trial, name) for name in _DEFAULTS]
    told = max(at for at, name in enumerate(_DEFAULTS, 1) if values[at - 1] != _DEFAULTS[name])
    return [
        _differing(name, encode(value), first) if name in _KINDS and value else encode(value)
        for name, value in zip(_DEFAULTS, values[:told], strict=False)
    ]


def _differing(part: str, data: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    kind = _KINDS[part]
    named, base = _first(data[kind], part, data, first)
    if base is data:
        return data
    short = {name: each for name, each in data.items() if base[name] != each}
    return short if named == data[kind] else {kind: data[kind], **short}


def _named(columns: list[Any], row: Any) -> Any:
    if type(row) is not list or len(row) > len(columns):
        return row
    names = [name if type(name) is str else "" for name in columns]
    return dict(zip(names, row, strict=False))


def _filled(row: Any, first: dict[str, Any]) -> Any:
    if type(row) is not dict:
        return row
    for part, kind in _KINDS.items():
        data = row.get(part)
        if type(data) is not dict or len(data) > _MOST:
            continue
        name = data.get(kind, first.get(part))
        if type(name) is str:
            _, base = _first(name, part, data, first)
            row[part] = {**base, **data}
    return row


def _first(
    name: str, part: str, data: dict[str, Any], first: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The first kind of a part, and the first data of this one; they are noted if these are."""
    return first.setdefault(part, name), first.setdefault(f"{part} {name}", data)


MAX_BYTES = 8 * 2**20
_MAX_TEXT, MAX_INT = 4096, 2**48
# Entries of a list, by the field's name.
MAX_ITEMS = {"trials": 4096, "screening": 16384, "finals": 16384}
MAX_OTHER_ITEMS = 1024
# Lists of microseconds, which are divided by one another.
TIMES = ("screening", "finals")
# The fields that stand behind the head; raw line breaks never occur inside a JSON string, so the
# first of them at this depth is where the head ends.
TAIL = ("rejected", "seconds", "tool", "note")
_TAIL_MARK = b',\n "rejected": '
_TRIALS_MARK = ',\n "trials": [\n'
_SUM_MARK = b',\n "sha256": "'


def encode(value: Any) -> Any:
    """A frozen dataclass, or what it is made of, as JSON data; configs name their class."""
    if is_dataclass(value):
        data = {field.name: encode(getattr(value, field.name)) for field in fields(value)}
        if is_config(value):
            return {"type": type(value).__name__, **data}
        return data
    if isinstance(value, tuple):
        return [encode(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        # A gate's error may be infinite or no number; JSON has neither, and readers refuse both.
        return math.copysign(sys.float_info.max, value)
    return value


def encode_record(record: Record) -> str:
    """The text of a record's file."""
    head = {"schema": SCHEMA, **encode(record.answer)}
    head |= {name: encode(getattr(record, name)) for name in TAIL}
    rows = (f' "{name}": {compact(each)}' for name, each in head.items())
    trials = lines(record.trials, encode, head["config"])
    body = "{\n" + ",\n".join(rows) + _TRIALS_MARK + trials + "\n ]"
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body}{_SUM_MARK.decode()}{digest}"\n}}\n'


def decode_answer(
    raw: bytes, key: Key | None = None, environment: Environment | None = None
) -> Answer:
    """The part of a record's file that dispatch needs; raises CacheError for anything else.

    key, environment: those that are looked for, which are not decoded where the file has them.
    """
    head, mark, _ = _checked(raw).partition(_TAIL_MARK)
    if not mark:
        raise CacheError("no head", "a record's fields stand in the order they are written in")
    return _answer(_parse(head + b"\n}"), key, environment)


def decode_record(raw: bytes) -> Record:
    """A whole record, its trials too; raises CacheError for anything that is none."""
    data = _object(_parse(_checked(raw) + b"\n}"), "record")
    tail = {name: data.pop(name, None) for name in (*TAIL, "trials")}
    tail["trials"] = whole_trials(tail["trials"], data.get("config"))
    answer = _answer(data)
    hints, given = get_type_hints(Record), _data(answer)
    found = {name: decode(hints[name], each, name) for name, each in tail.items()}
    config = given.pop("config")
    record = Record(**given, **found)
    _check_trials(record.trials, answer)
    if record.config != config:
        raise CacheError("config", "it is the winner's")
    return record


def decode(kind: Any, data: Any, where: str) -> Any:
    """JSON data as a value of a type: no field but its own, exactly their types, sane sizes.

    A field that has a default may be missing, so a config that gained a knob still reads; so does
    one that lost a knob (`retired` of its class), where it was not turned.

    kind: a dataclass, int, float, bool, str, a Literal, a tuple or a union of these. where: what
    an error calls it. Raises CacheError.
    """
    try:
        return _decoder(kind, MAX_ITEMS.get(where, MAX_OTHER_ITEMS))(data)
    except CacheError as error:
        raise CacheError(f"{where}{error.got}", error.rule) from None


def _data(known: Key | Environment | Answer) -> dict[str, Any]:
    return {field.name: getattr(known, field.name) for field in fields(known)}


def _answer(data: Any, *known: Key | Environment | None) -> Answer:
    found = dict(_object(data, "record"))
    schema, _ = found.pop("schema", None), found.pop("transfer", None)
    if schema != SCHEMA or type(schema) is not int:
        raise CacheError(f"schema {str(schema)[:20]}", f"this version reads schema {SCHEMA}")
    for name, each in zip(("key", "environment"), known, strict=False):
        if each is not None and found.get(name) == _data(each):
            found[name] = each
    answer: Answer = decode(Answer, found, "record")
    if answer.environment.schema != SCHEMA:
        raise CacheError("environment.schema", "it is the record's schema")
    if Sizes(*answer.sizes).rounded() != answer.key.sizes:
        raise CacheError(f"sizes {answer.sizes}", "rounded, they are those of the key")
    name = type(answer.config).__name__
    if not name.lower().endswith(f"{answer.key.kind}config"):
        raise CacheError(f"a {name}", "it is of the key's kind")
    wanted = "neuron" if is_neuron(answer.environment.arch) else "gpu"
    if backend_of(answer.config) != wanted:
        raise CacheError(f"a {name} for {answer.environment.arch}", "it is of the device's kind")
    return answer


def _check_trials(trials: tuple[Trial, ...], answer: Answer) -> None:
    decision, count = answer.decision, len(trials)
    twins = (trial.same_code_as for trial in trials if trial.same_code_as is not None)
    if not all(index < count for index in (decision.winner, decision.default, *twins)):
        raise CacheError("an index past the trials", "winner, default and same_code_as are theirs")
    winner = trials[decision.winner]
    if winner.failed is not None:
        raise CacheError("a winner that failed", "the winner ran")
    if winner.gate is None or not winner.gate.passed:
        raise CacheError("a winner without a green gate", "the winner passed the accuracy gate")


def _checked(raw: bytes) -> bytes:
    """All that stands before the checksum, if it fits."""
    if len(raw) > MAX_BYTES:
        raise CacheError(f"{len(raw)} bytes", f"a record has at most {MAX_BYTES}")
    body, mark, tail = raw.rpartition(_SUM_MARK)
    digest = hashlib.sha256(body).hexdigest()
    if not mark or tail != f'{digest}"\n}}\n'.encode():
        raise CacheError(
            "its checksum does not fit", "a record is whole, and written by this tool alone"
        )
    return body


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CacheError(f"no JSON: {str(error)[:200]}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _object(data: Any, where: str) -> dict[str, Any]:
    if type(data) is not dict:
        raise CacheError(f"{where}: a {type(data).__name__}", "it is an object")
    return data


Decoder = Callable[[Any], Any]


def _decoder(kind: Any, most: int = MAX_OTHER_ITEMS) -> Decoder:
    """The decoder of a type. most: how long its lists may be."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin is Literal:
        return _plain(lambda data: type(data) is str and data in args, f"it is one of {args}")
    if origin is tuple:
        return _list(_decoder(args[0]), most) if args[1:] == (...,) else _fixed(args)
    if origin in (Union, UnionType):
        return _optional(args)
    if kind is Config or getattr(kind, "__name__", "") in config_names():
        return _config
    if is_dataclass(kind) and isinstance(kind, type):
        # A value that is decoded already stays as it is: JSON has no such type.
        return lambda data: data if type(data) is kind else _fields(kind)(data)
    raise TypeError(f"{kind} has no decoder")


def _plain(
    holds: Callable[[Any], bool], rule: str, value: Callable[[Any], Any] = lambda data: data
) -> Decoder:
    """The decoder of what this holds for."""

    def read(data: Any) -> Any:
        if not holds(data):
            raise CacheError(f" is {str(data)[:40]!r}", rule)
        return value(data)

    return read


def _is_finite(data: Any) -> bool:
    return type(data) in (int, float) and abs(data) <= sys.float_info.max


_PLAIN: dict[Any, Decoder] = {
    bool: _plain(lambda data: type(data) is bool, "it is true or false"),
    int: _plain(
        lambda data: type(data) is int and 0 <= data <= MAX_INT,
        f"it is an integer from 0 to {MAX_INT}",
    ),
    float: _plain(_is_finite, "it is a finite number", float),
    str: _plain(
        lambda data: type(data) is str and len(data) <= _MAX_TEXT,
        f"it is text of at most {_MAX_TEXT} characters",
    ),
}
_time = _plain(
    lambda data: _is_finite(data) and is_time(data), "a time is a finite number above 0", float
)


def _list(item: Decoder, most: int) -> Decoder:
    def read(data: Any) -> tuple[Any, ...]:
        if type(data) is not list or len(data) > most:
            raise CacheError(" is no such list", f"it is a list of at most {most}")
        return tuple([item(each) for each in data])

    return read


def _fixed(kinds: tuple[Any, ...]) -> Decoder:
    items = [_decoder(kind) for kind in kinds]

    def read(data: Any) -> tuple[Any, ...]:
        if type(data) is not list or len(data) != len(items):
            raise CacheError(" is no such list", f"it is a list of {len(items)}")
        return tuple([item(each) for item, each in zip(items, data, strict=True)])

    return read


def _optional(kinds: tuple[Any, ...]) -> Decoder:
    rest = [kind for kind in kinds if kind is not NoneType]
    if len(rest) != 1:
        raise TypeError(f"{kinds} have no decoder")
    inner = _decoder(rest[0])
    return lambda data: None if data is None else inner(data)


@lru_cache(maxsize=256)
def _fields(cls: type) -> Decoder:
    """The decoder of a dataclass, made once."""
    hints = get_type_hints(cls)
    decoders = {
        field.name: _decoder(hints[field.name], MAX_ITEMS.get(field.name, MAX_OTHER_ITEMS))
        for field in fields(cls)
    }
    decoders |= {name: _list(_time, MAX_ITEMS[name]) for name in TIMES if name in decoders}
    needed = {f.name for f in fields(cls) if f.default is MISSING}

    def read(data: Any) -> Any:
        if type(data) is not dict or not needed <= data.keys() <= decoders.keys():
            raise CacheError(" has other fields", f"it is an object of {', '.join(decoders)}")
        values, name = {}, ""
        try:
            for name, each in data.items():
                values[name] = decoders[name](each)
        except CacheError as error:
            raise CacheError(f".{name}{error.got}", error.rule) from None
        return cls(**values)

    return read


def _config(data: Any) -> Any:
    """A config: its class by name, its numbers in the ranges that any template could take."""
    name = data.get("type") if type(data) is dict else None
    given = {k: v for k, v in data.items() if k != "type"} if type(name) is str else {}
    if name not in config_names():
        raise CacheError(" is no config", f"its type is one of {', '.join(config_names())}")
    kind = config_class(name)
    # Fields of earlier versions that say what every kernel is now.
    retired: dict[str, object] = getattr(kind, "retired", {})
    for field, only in retired.items():
        if given.pop(field, only) != only:
            raise CacheError(f".{field} is not {only!r}", "no kernel has another value now")
    config = _fields(kind)(given)
    for each in fields(config):
        _check_range(each.name, getattr(config, each.name))
    return config


_POWERS = {"BLOCK_M": (8, 1024), "BLOCK_N": (16, 2048), "num_warps": (1, 32)}
_OTHER_RANGE = (0, 65536)


def _check_range(name: str, value: Any) -> None:
    if type(value) is not int:
        return
    low, high = _POWERS.get(name, _OTHER_RANGE)
    if not low <= value <= high or (name in _POWERS and value & (value - 1)):
        rule = f"it is {'a power of two ' * (name in _POWERS)}from {low} to {high}"
        raise CacheError(f".{name} is {value}", rule)
