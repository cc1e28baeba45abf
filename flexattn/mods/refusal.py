"""Refusal: why a mod cannot be traced, the line of the user's code and the captures to blame."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sysconfig
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flexattn.errors import FlexAttnError, ModError, NoKernelError, UnsupportedError
from flexattn.mods.expr import MAX_NODES
from flexattn.mods.identity import Path, identify

SourceLine = tuple[str, int]

_HERE = os.path.dirname(os.path.abspath(__file__))
_FOREIGN = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, _HERE + os.sep)
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_RULE = "a mod is run once, for all positions together: there is no single value to look at"
_CHOICE = "use torch.where for a choice, and & | ~ for conditions"
_FLOAT = (
    "reads a traced value as a Python float, as math.exp and its like do",
    "use torch's function: torch.exp(score) for math.exp(score)",
)
_INT = (
    "reads a traced value as a Python int",
    "leave it a tensor: it can be an index, // and % take it, and x.long() rounds towards 0",
)
_INDEX = (
    "indexes a Python list, tuple or range by a traced value",
    "capture torch.tensor(the_list), made once outside of the mod, and index that",
)
_ITEM = "reads a traced value in Python", "compute with the tensor itself"
_ARRAY = (
    "gives a tensor to numpy",
    "use torch's function of that name, and capture arrays as torch.from_numpy(array)",
)
# The method that was called: what that means in the user's code, and what to write instead.
WORDS: dict[Any, tuple[str, str]] = {
    Tensor.__float__: _FLOAT,
    Tensor.__int__: _INT,
    Tensor.__index__: _INDEX,
    Tensor.item: _ITEM,
    Tensor.tolist: _ITEM,
    Tensor.__array__: _ARRAY,
    Tensor.numpy: _ARRAY,
    Tensor.__dlpack__: _ARRAY,
}
# What else takes the values of a captured tensor, and says nothing of a traced one.
READS = frozenset((
    Tensor.__repr__, Tensor.__format__, Tensor.__reduce_ex__, Tensor.__deepcopy__,
    Tensor.storage, Tensor.untyped_storage,
))  # fmt: skip
_NUMPY = "a mod is read as torch's operations, and numpy computes at once with values"


class Refusal(Exception):
    """Raised wherever a mod proves untraceable; becomes the public error at the end of a trace."""

    def __init__(
        self, got: str, rule: str = "", do: str = "", *, raises: type[FlexAttnError] = ModError
    ) -> None:
        super().__init__(got)
        self.got, self.rule, self.do = got, rule, do
        self.raises = raises
        self.line: SourceLine | None = None  # where another than the traceback's is known

    def error(
        self, fn: Callable[..., Any], kind: str, line: SourceLine | None = None
    ) -> Exception:
        """The exception that a user sees; the line is the definition's where None."""
        return self.raises(f"{named_mod(fn, kind, line)} {self.got}", self.rule, self.do)


def unknown(op: Any) -> Refusal:
    """The refusal of an operation that is in no table."""
    space = getattr(op, "namespace", "aten")
    found = unread(f"torch.{op.overloadpacket.__name__}" if space == "prims" else str(op))
    if space not in ("aten", "prims", "prim"):
        name = str(getattr(op, "overloadpacket", op)).replace(".", "::")
        found.do = (
            f'say what it computes in torch\'s operations: flexattn.register_op("{name}", ...)'
        )
        found.raises = UnsupportedError
    return found


def unread(what: str) -> Refusal:
    """The refusal of what torch computes, and no kernel here."""
    return Refusal(
        f"uses {what}",
        "a mod is made of pointwise operations, indexing, views and small reductions",
        "compute it outside of the mod and capture the result",
        raises=NoKernelError,
    )


def part_written(how: str) -> Refusal:
    """The refusal of a write to a part of a tensor that the mod made, which no kernel has."""
    return Refusal(
        f"writes to a part of a tensor, or to one that has views ({how})",
        "a mod changes a tensor that it made as a whole, as by x += 1",
        "choose with torch.where(position == k, new, old)",
        raises=NoKernelError,
    )


def too_long(size: str) -> Refusal:
    """The refusal of a mod of so many operations."""
    return Refusal(
        f"is {size} operations long",
        f"a mod has at most {MAX_NODES:,}: compilers take minutes for more",
        "compute what it repeats outside of the mod, capture it as a tensor and index that",
        raises=UnsupportedError,
    )


def named_mod(fn: Callable[..., Any], kind: str, line: SourceLine | None = None) -> str:
    """A mod's kind, name and line, as messages begin; the line is its definition's where None."""
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return f"{kind}_mod {name!r} {_place(line or line_of_definition(fn))}".rstrip()


def line_of_frame(frame: FrameType | None) -> SourceLine | None:
    """The innermost line of user code among a frame and its callers."""
    while frame is not None:
        if _is_user_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def line_of(trace: TracebackType | None) -> SourceLine | None:
    """The innermost line of user code in a traceback that starts inside this package."""
    found = None
    while trace is not None:
        if _is_user_file(file := trace.tb_frame.f_code.co_filename):
            found = file, trace.tb_lineno
        trace = trace.tb_next
    return found


def line_of_definition(fn: Callable[..., Any]) -> SourceLine | None:
    """The file and line of a callable's definition, if it is written in Python."""
    inner: Any = fn
    while hasattr(inner, "func"):
        inner = inner.func
    if isinstance(inner, torch.nn.Module):
        inner = inner.forward
    elif not hasattr(inner, "__code__") and not hasattr(inner, "__func__"):
        inner = type(inner).__call__
    code = getattr(inner, "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code else None


def _place(line: SourceLine | None) -> str:
    if line is None:
        return ""
    source = linecache.getline(*line).strip()
    return f"({line[0]}:{line[1]}{f': `{source}`' if source else ''}) "


def _is_user_file(name: str) -> bool:
    # A generated frame of torch.fx is no user code, a cell of a notebook or a REPL is.
    if name.startswith(("<eval_with_key>", "<frozen", "<__array_function__")):
        return False
    path = name if os.path.isabs(name) else os.path.abspath(name)
    if path.startswith(_FOREIGN):
        return False
    return "site-packages" in path or not path.startswith(_STDLIB)


class Asked(Refusal):
    """Something asks a traced tensor for its value, and nothing says how."""

    def __init__(self) -> None:
        super().__init__("branches on a traced value, or reads it in Python", _RULE, _CHOICE)


def asked(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a method of a tensor; raises Refusal, with words for it, where it has none."""
    got, do = WORDS.get(func, _ITEM)
    # Of a captured tensor it would take the values of this moment for good.
    if WORDS.get(func) is _ARRAY:
        raise Refusal(got, _NUMPY, do)
    if not isinstance(args[0], FakeTensor):
        raise read_in_python(func.__name__)
    try:
        return func(*args, **kwargs)
    except Asked:
        raise Refusal(got, _RULE, do) from None


def read_in_python(how: str) -> Refusal:
    """The refusal of what asks a captured tensor for its values."""
    return Refusal(
        f"reads the value of a captured tensor in Python ({how})",
        "captured tensors are read when the kernel runs, not when a mod is traced",
        "compute with the tensor itself, or capture a Python number",
    )


def looked_up(error: Exception) -> Refusal | None:
    """The refusal of a dict that was asked for a traced key, if that is what an error says."""
    keys = error.args if isinstance(error, KeyError) else ()
    parts = [part for key in keys for part in (key if isinstance(key, tuple) else (key,))]
    if not any(isinstance(part, Tensor) for part in parts):
        return None
    return Refusal(
        "looks a traced value up in a dict",
        _RULE,
        "capture a tensor of the dict's values and index it: torch.tensor([...])[h]",
    )


def captured(fn: Callable[..., Any], tensor: torch.Tensor) -> str:
    """A callable's name for a tensor, with shape and device: "`bias`, of shape [8] on cpu"."""
    name = capture_name(fn, tensor)
    return (
        f"{f'`{name}`' if name else 'a tensor'}, of shape {list(tensor.shape)} on {tensor.device}"
    )


def capture_name(fn: Callable[..., Any], tensor: torch.Tensor) -> str:
    """The expression by which a callable reads a tensor; "" where it reads no such."""
    path = identify(fn, "").path_of(tensor)
    return _name(fn, path) if path else ""


def _name(fn: Callable[..., Any], path: Path) -> str:
    if len(path) < 3 or path[2] == "__self__":  # the callable, its owner, or a class
        return "self"
    holder, part, name = path
    if holder[1:] == ("attr", "args") and isinstance(fn, functools.partial):
        return list(inspect.signature(fn.func).parameters)[name]
    if holder[1:] == ("attr", "keywords"):
        return str(name)
    if part == "attr":
        return f"{_name(fn, holder)}.{name}"
    if part == "item":
        return f"{_name(fn, holder)}[{name!r}]"
    return str(name)
