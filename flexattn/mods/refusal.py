"""Refusal: why a mod cannot be traced, and the line of the user's code that is to blame."""

from __future__ import annotations

import linecache
import os
import sysconfig
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FrameType, TracebackType
from typing import Any

import torch

from flexattn.errors import FlexAttnError, ModError, NoKernelError, UnsupportedError
from flexattn.mods.expr import MAX_NODES

SourceLine = tuple[str, int]

_HERE = os.path.dirname(os.path.abspath(__file__))
_FOREIGN = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, _HERE + os.sep)
_STDLIB = sysconfig.get_path("stdlib") + os.sep


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


def too_long(size: str) -> Refusal:
    """The refusal of a mod of so many operations."""
    return Refusal(
        f"is {size} operations long",
        f"a mod has at most {MAX_NODES:,}: compilers take minutes for more",
        "compute what it repeats outside of the mod, capture it as a tensor and index that",
        raises=UnsupportedError,
    )


def _describe(fn: Callable[..., Any]) -> str:
    """A callable's name, for messages."""
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return repr(name)


def named_mod(fn: Callable[..., Any], kind: str, line: SourceLine | None = None) -> str:
    """A mod's kind, name and line, as messages begin; the line is its definition's where None."""
    return f"{kind}_mod {_describe(fn)} {_place(line or line_of_definition(fn))}".rstrip()


def line_of_frame(frame: FrameType | None) -> SourceLine | None:
    """The innermost line of user code among a frame and its callers."""
    while frame is not None:
        if _is_user_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def line_of(trace: TracebackType | None) -> SourceLine | None:
    """The innermost line of user code in a traceback that starts inside this package."""
    lines = [line for line in _lines(trace) if _is_user_file(line[0])]
    return lines[-1] if lines else None


def line_of_definition(fn: Callable[..., Any]) -> SourceLine | None:
    """Where a callable is defined, if it is written in Python."""
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


def _lines(trace: TracebackType | None) -> Iterator[SourceLine]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


@lru_cache(maxsize=1024)
def _is_user_file(name: str) -> bool:
    # A generated frame of torch.fx is no user code, a cell of a notebook or a REPL is.
    if name.startswith(("<eval_with_key>", "<frozen", "<__array_function__")):
        return False
    path = os.path.abspath(name)
    if path.startswith(_FOREIGN):
        return False
    return "site-packages" in path or not path.startswith(_STDLIB)
