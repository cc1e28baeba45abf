"""install(): torch's own flex_attention, which this library serves where it can."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FunctionType, TracebackType
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention, flex_attention as theirs

from flexattn.errors import CaptureError, FlexAttnError, UnsupportedError
from flexattn.frontend.attention import flex_attention as ours
from flexattn.frontend.call import Call

_TAKES = (
    "query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse",
    "kernel_options", "return_aux",
)  # fmt: skip
# The name by which torch's function finds ours, among its module's.
_NAME = "_flexattn_serve"


class Installed:
    """The result of `install`: a context manager that uninstalls, and counts of who served what.

    served: how often, by "flexattn", or "torch: " and why; nodes of compiled graphs are counted
    as they are compiled.
    """

    def __init__(self, first: bool) -> None:
        self._first = first

    @property
    def served(self) -> Counter[str]:
        """The counts since the last `install` that changed anything."""
        return served

    def __enter__(self) -> Installed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._first:
            uninstall()


def install(*, eager: bool = True) -> Installed:
    """Serve calls of torch.nn.attention.flex_attention.flex_attention by flexattn where it can.

    Every name that the function was imported under, and what torch.compile made of it, is served;
    torch keeps what flexattn refuses. eager: also calls outside of torch.compile. A second call
    changes nothing; as a context manager it ends what it began.

    Raises UnsupportedError where torch's function has other arguments than those known here.
    """
    if installed():
        return Installed(False)
    takes = tuple(inspect.signature(theirs).parameters)
    if takes != _TAKES or not isinstance(theirs.__code__, CodeType):
        raise UnsupportedError(
            f"torch {torch.__version__}'s flex_attention takes {', '.join(takes)}",
            f"flexattn stands in for one that takes {', '.join(_TAKES)}",
            "call flexattn.flex_attention itself",
        )
    served.clear()
    theirs.__globals__[_NAME] = _serve if eager else _serve_compiled
    theirs.__code__ = _in_its_place.__code__
    return Installed(True)


def uninstall() -> None:
    """Give torch's flex_attention back; nothing where it is not replaced."""
    if installed():
        theirs.__code__ = torch_own.__code__
        del theirs.__globals__[_NAME]


def installed() -> bool:
    """True if torch's function is served by this library."""
    return _NAME in theirs.__globals__


def _in_its_place(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None,
    scale: Any = None, enable_gqa: bool = False, return_lse: bool = False,
    kernel_options: Any = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    # Names are looked up among those of torch's module, whose function this code becomes.
    return _flexattn_serve(  # type: ignore[name-defined] # noqa: F821
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
        return_aux,
    )  # fmt: skip


def _serve(*given: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return _traced(given)
    try:
        found = ours(*given[:-1], return_aux=given[-1])
    except CaptureError:  # which the caller asked for, and torch would read where nothing is
        raise
    except FlexAttnError as error:
        served[f"torch: {error}"] += 1
        return torch_own(*given[:-1], return_aux=given[-1])
    served["flexattn"] += 1
    return found


def _serve_compiled(*given: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return _traced(given)
    return torch_own(*given[:-1], return_aux=given[-1])


def _traced(given: tuple[Any, ...]) -> Any:
    from flexattn.frontend.compiled.node import node_of

    make: Any = Call
    found = node_of(make(*given, options=None), True)
    return torch_own(*given[:-1], return_aux=given[-1]) if found is None else found


_own = FunctionType(
    flex_attention.__code__, flex_attention.__globals__, "flex_attention",
    flex_attention.__defaults__, flex_attention.__closure__,
)  # fmt: skip
_own.__kwdefaults__ = flex_attention.__kwdefaults__
# Its type is torch's, but for keys of kernel_options that are others'.
torch_own: Any = _own
# Who served calls of torch's function, and nodes of graphs as they were compiled.
served: Counter[str] = Counter()


@lru_cache(maxsize=1)
def torch_flex_attention() -> Callable[..., Any]:
    """torch's flex_attention, compiled, for calls that it differentiates; shapes may change."""
    return torch.compile(torch_own)
