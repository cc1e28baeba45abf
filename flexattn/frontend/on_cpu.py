"""Repeated eager calls on CPU tensors: Inductor's C++ kernel, which a thread compiles meanwhile.

Dynamo traces each pair of mods in a function of its own, and guards all that it read. A call runs
what is compiled where the guards hold, and never compiles; else plain torch computes it.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from dataclasses import dataclass
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from flexattn.frontend.call import PLAIN, Call, functorch, in_forward_mode
from flexattn.runtime.launch import Outputs
from flexattn.settings import current, say_once
from flexattn.util.locks import Lru, renewed

# The call with the same mods on which a compile begins.
FIRST = 3
# The dtypes of queries that Inductor's C++ kernel supports.
CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
THREAD = "flexattn-compile"
# Compiles of one pair of mods, for other shapes and captures: as many as Dynamo keeps.
_MOST = 8


@dataclass(slots=True)
class _Mods:
    """The state of one pair of mods: how often they came, and what was compiled for them."""

    calls: int = 0
    compiles: int = 0
    fn: Any = None
    run: Any = None


_known: Lru[tuple[Any, ...], _Mods] = Lru(128)
_numbers = count()
# Held by the thread that compiles; nobody waits for it.
_compiling = renewed(threading.Lock())


def run_compiled(given: Call) -> Outputs | None:
    """The outputs of compiled code for a call, as it was given; None where there is none."""
    known = _known.get(_key(given)) if _plain(given) else None
    if known is None or known.run is None:
        return None
    try:
        out = known.run(*_arguments(given))
    # As for an index outside of a captured tensor, in a lane that the mask removes.
    except Exception as error:
        _give_up(known, error)
        return None
    return None if out is None else Outputs(out, None, None)


def count_call(given: Call) -> None:
    """Begin a compile for a call that plain torch has answered, where its mods came often."""
    if not _plain(given):
        return
    key = _key(given)
    known = _known.get(key)
    if known is None:
        known = _Mods()
        _known.put(key, known)
    known.calls += 1
    if known.calls < FIRST or known.compiles >= _MOST or not _compiling.acquire(blocking=False):
        return
    known.compiles += 1
    modes = (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
    )  # fmt: skip
    # Settings of a block of code are the caller's.
    run = contextvars.copy_context().run
    given_to = (_compile, known, given, *modes)
    thread = threading.Thread(target=run, args=given_to, name=THREAD, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python is ending, or has threads enough
        _compiling.release()


def forget() -> None:
    """Forget all mods, and what was compiled for them."""
    _known.clear()


def _plain(given: Call) -> bool:
    """True if a call is one of those that the kernel computes, and no mode watches it."""
    settings, q = current(), given.q
    if not settings.cpu_compile or settings.check or settings.interpret:
        return False
    if type(q) not in PLAIN or q.device.type != "cpu" or q.dtype not in CPU_DTYPES:
        return False
    if given.return_lse or given.return_aux is not None or given.dropout_p != 0.0:
        return False
    if any(x is not None for x in given.tensors[3:]) or given.k.dtype != q.dtype:
        return False
    tensors = q, given.k, given.v
    if not PLAIN.issuperset(map(type, tensors)) or 0 in (q.numel(), given.k.numel()):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    # A transform of torch.func, a trace, a default device: guards of Dynamo's would know of none.
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    return not modes and not in_forward_mode() and functorch.maybe_current_level() is None


def _key(given: Call) -> tuple[Any, ...]:
    """The key of a pair of mods: their code, whoever made them anew."""
    mask_mod = getattr(given.block_mask, "mask_mod", None)
    mods = (given.score_mod, mask_mod)
    return (given.q.dtype, *(getattr(mod, "__code__", type(mod)) for mod in mods))


def _arguments(given: Call) -> tuple[Any, ...]:
    return given[:7] + given[8:9]


def _attention(*given: Any) -> Tensor | None:
    """The call's node for Dynamo; for a call whose guards hold nowhere it says so."""
    if not torch.compiler.is_dynamo_compiling():
        return None
    from flexattn.frontend.compiled.node import node_of

    make: Any = Call
    found = node_of(make(*given[:7], False, given[7], options=None))
    if found is None:
        raise RuntimeError("the call is no node of a graph")
    return found  # type: ignore[no-any-return]


def _compile(
    known: _Mods, given: Call, grad: bool, inference: bool, autocast: bool, dtype: torch.dtype
) -> None:
    """Compile a call, by running it once, under the modes that it came with."""
    try:
        import flexattn.frontend.compiled.node  # noqa: F401

        dynamo: Any = torch._dynamo
        if known.fn is None:
            code = _attention.__code__.replace(co_name=f"attention_{next(_numbers)}")
            known.fn = FunctionType(code, _attention.__globals__)
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            torch.autocast("cpu", dtype, autocast),
        ):
            compiled: Any = torch.compile(known.fn, fullgraph=True)
            compiled(*_arguments(given))
        known.run = known.run or dynamo.run(known.fn)
    except Exception as error:
        _give_up(known, error)
    finally:
        _compiling.release()


def _give_up(known: _Mods, error: Exception) -> None:
    """Leave a pair of mods to plain torch."""
    known.run, known.compiles = None, _MOST
    why = f"{type(error).__name__}: {error}".partition("\n")[0]
    say_once(f"CPU calls of a mod stay with plain torch: {why}", logging.INFO)
