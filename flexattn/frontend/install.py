"""install(): torch's own flex_attention and varlen_attn, served by this library where it can."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
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
# The name by which torch's varlen_attn, served, finds a copy of what it was.
_OWN = "_flexattn_own"


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
    torch keeps what flexattn refuses. So it is with torch's varlen_attn. A second call changes
    nothing; as a context manager it ends what it began.

    Args:
        eager: also calls outside of torch.compile.

    Returns:
        An object whose `served` has how many calls ran here or in torch, and why.

    Raises:
        UnsupportedError: if torch's function has other arguments than those known here.

    Example::

        flexattn.install()
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
    theirs.__globals__[_NAME] = partial(_serve, eager)
    theirs.__code__ = _in_its_place.__code__
    varlen = _varlen_attn()
    varlen.__globals__[_OWN] = _copied(varlen)
    varlen.__globals__[_NAME] = partial(_serve_varlen, eager)
    varlen.__code__ = _in_place_of_varlen.__code__
    return Installed(True)


def uninstall() -> None:
    """Give torch's functions back; nothing where they are not replaced."""
    if installed():
        varlen = _varlen_attn()
        varlen.__code__ = varlen.__globals__.pop(_OWN).__code__
        del varlen.__globals__[_NAME]
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


def _serve(eager: bool, *given: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return _traced(given)
    aux = {"return_aux": given[-1]}
    return _counted(eager, ours, torch_own, given[:-1], aux, aux)


def _counted(
    eager: bool, here: Any, there: Any, given: Any, own: dict[str, Any], theirs: dict[str, Any]
) -> Any:
    """The results of our function, or of torch's if ours refuses; own, theirs: named arguments."""
    if not eager:
        return there(*given, **theirs)
    try:
        found = here(*given, **own)
    except CaptureError:  # which the caller asked for, and torch would read where nothing is
        raise
    except FlexAttnError as error:
        served[f"torch: {error}"] += 1
        return there(*given, **theirs)
    served["flexattn"] += 1
    return found


def _traced(given: tuple[Any, ...]) -> Any:
    from flexattn.frontend.compiled.node import node_of

    make: Any = Call
    found = node_of(make(*given, options=None), True)
    return torch_own(*given[:-1], return_aux=given[-1]) if found is None else found


def _varlen_attn() -> Any:
    return import_module("torch.nn.attention.varlen").varlen_attn


def _in_place_of_varlen(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any,
    **rest: Any,
) -> Any:  # fmt: skip
    given = query, key, value, cu_seq_q, cu_seq_k, max_q, max_k
    return _flexattn_serve(_flexattn_own, given, rest)  # type: ignore[name-defined] # noqa: F821


def _serve_varlen(eager: bool, own: Any, given: tuple[Any, ...], rest: dict[str, Any]) -> Any:
    from flexattn.frontend.varlen import varlen_attn

    asked = rest.get("return_aux")
    ours_too = {name: each for name, each in rest.items() if name != "return_aux"}
    ours_too["return_lse"] = asked is not None and asked.lse
    if torch.compiler.is_dynamo_compiling():
        # Caches in pages, and the lengths that come with them, are torch's.
        paged = any(rest.get(name) is not None for name in ("block_table", "seqused_k"))
        return own(*given, **rest) if paged else varlen_attn(*given, **ours_too)
    return _counted(eager, varlen_attn, own, given, ours_too, rest)


def _copied(fn: Any) -> Any:
    copy = FunctionType(
        fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )  # fmt: skip
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


# Its type is torch's, but for keys of kernel_options that are others'.
torch_own: Any = _copied(flex_attention)
# Who served calls of torch's function, and nodes of graphs as they were compiled.
served: Counter[str] = Counter()


@lru_cache(maxsize=1)
def torch_flex_attention() -> Callable[..., Any]:
    """torch's flex_attention, compiled, for calls that it differentiates; shapes may change."""
    return torch.compile(torch_own)
