"""bind(): a callable's Mod and what it captures now; traced once, then found in microseconds."""

from __future__ import annotations

import logging
import operator
import pickle
import random
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from flexattn.errors import NoKernelError, UnsupportedError
from flexattn.mods import recorded
from flexattn.mods.derivative import without_stops
from flexattn.mods.expr import Buffer
from flexattn.mods.host_numbers import program, scalar_of, scalars_of
from flexattn.mods.identity import Identity, identify
from flexattn.mods.numbers import derived, reaching_divisors
from flexattn.mods.ops import name_of
from flexattn.mods.refusal import Refusal, captured, named_mod
from flexattn.mods.simplify import plug, renumber
from flexattn.mods.site import (
    Bound,
    Guards,
    Site,
    SiteLayout,
    Variant,
    guards,
    interned,
)
from flexattn.mods.trace import ARGUMENTS, Trace, check_arity, lift, replaceable, trace
from flexattn.settings import current, say_once
from flexattn.util.locks import Lru, Turns

_SITES = 512


@dataclass(slots=True)
class Stats:
    """Counts of bind(): callables that it ran to read them."""

    traces: int = 0


_sites: Lru[tuple[Any, ...], Site] = Lru(_SITES)
# What a site learns is one thread's at a time; threads with other callables go on.
_turns = Turns()
# A callable that is looked up while this thread traces another waits for nobody.
_tracing: ContextVar[bool] = ContextVar("flexattn_tracing", default=False)
_stats = Stats()


def bind(
    fn: Callable[..., Any] | Bound | None, kind: str, device: torch.device | str | None = None
) -> Bound | None:
    """The callable's Mod with the tensors and scalars it captures now; None for None.

    What is bound already, maybe by another process, is given back as it is.
    `kind` is "score" or "mask". The Mod is the same object for as long as nothing changes but
    tensors' contents and lengths, and numbers that proved to be arguments. With a `device`,
    captured tensors must be there; 0-d tensors may stay on the CPU. Raises ModError or
    UnsupportedError, which name the line of the user's function.
    """
    return None if fn is None else without_stops(look(fn, kind, device)[0])


def look(
    fn: Callable[..., Any] | Bound, kind: str, device: torch.device | str | None = None
) -> tuple[Bound, Identity | None]:
    """The result of bind(), and the identity it was found by, for `watch`.

    None for the identity where the callable was bound before. The Mod of a score_mod still has
    its stops, which a backward goes by. Raises as `bind` does.
    """
    if isinstance(fn, Bound):
        return fn, None
    identity = identify(fn, kind)
    found = None
    if identity.reason or _tracing.get():
        found = _trace_once(fn, kind, identity)
    else:
        key = tuple(identity.key)
        site = _sites.get(key)
        found = site.find(identity) if site else None
        if found is None:
            with _turns.of(key):
                found = _trace_site(fn, kind, identity, key)
    if device is not None:
        _check_device(fn, kind, found, torch.device(device))
    return found, identity


def watch(
    fn: Callable[..., Any], kind: str, bound: Bound, identity: Identity | None = None
) -> Guards | None:
    """Guards that tell in a microsecond if bind() would give `bound` again; None where none can.

    identity: the one by which `bound` was found, where the caller has it still.
    """
    if type(fn) is not FunctionType:
        return None
    identity = identity or identify(fn, kind)
    site = None if identity.reason else _sites.get(tuple(identity.key))
    found = site.find(identity) if site else None
    if site is None or found is None or found.mod is not bound.mod:
        return None
    same = all(map(operator.is_, found.tensors, bound.tensors))
    same = same and [*map(repr, found.scalars)] == [*map(repr, bound.scalars)]
    return guards(fn, identity) if same else None


def stats() -> Stats:
    """The counters since the last clear()."""
    return replace(_stats)


def clear() -> None:
    """Forget every trace, and count anew."""
    _sites.clear()
    _stats.traces = 0


def record(fn: Callable[..., Any], kind: str, root: Path) -> bool:
    """Trace a callable as a fresh process would, and write what it learnt below a directory.

    Its numbers are constants, as on the first call of a process: other values have other files.
    False where nothing can vouch for the callable in another process. Raises as `bind` does.
    """
    identity = identify(fn, kind)
    plain = _run(fn, kind, identity)
    if plain.volatile or identity.reason:
        return False
    return recorded.write_variant(root, identity, variant_of(kind, plain), plain.sized)


def _trace_once(
    fn: Callable[..., Any], kind: str, identity: Identity, plain: Trace | None = None
) -> Bound:
    """The result of a trace that holds for this call alone; the reason is logged once."""
    plain = plain or _run(fn, kind, identity)
    if reason := identity.reason or plain.volatile:
        say_once(f"{named_mod(fn, kind)} is traced at every call: {reason}", logging.INFO)
    return variant_of(kind, plain).of(plain.tensors)


def _trace_site(
    fn: Callable[..., Any], kind: str, identity: Identity, key: tuple[Any, ...]
) -> Bound:
    site = _sites.get(key) or Site(tuple(identity.scalars))
    found = site.find(identity)
    if found is not None:  # another thread was faster
        return found
    root = current().binaries
    known = None if root is None else recorded.read_variant(root, kind, identity)
    if known is not None:
        variant, sized = known
        site.layout(frozenset(), sized).add(identity, variant)
        _sites.put(key, site)
        return variant.of(identity.tensors)
    values = (*identity.scalars, *((t.shape, t.dtype) for t in identity.tensors))
    if why := site.beyond.get(values):
        raise type(why)(why.got, why.rule, why.do)
    try:
        plain = _run(fn, kind, identity)
    except NoKernelError as why:
        site.beyond.put(values, why.with_traceback(None))
        _sites.put(key, site)
        raise
    if plain.volatile:
        return _trace_once(fn, kind, identity, plain)
    result, arguments = _lifted(fn, kind, identity, plain, site)
    layout, result = _chosen(site, identity, result, arguments)
    variant = variant_of(kind, result, identity.scalars, layout.alike(identity))
    layout.add(identity, variant)
    _sites.put(key, site)
    found = variant.bound(identity.tensors, identity.scalars)
    assert found is not None
    return found


def _chosen(
    site: Site, identity: Identity, result: Trace, arguments: frozenset[int]
) -> tuple[SiteLayout, Trace]:
    """The layout of a site that a trace belongs to, and the trace as it belongs there."""
    reaching = [result.texts[slot] for slot in reaching_divisors(result.expr)]
    divisors = frozenset[int]().union(*map(scalars_of, reaching))
    values = tuple(identity.scalars[i] for i in sorted(divisors))
    if divisors and site.specialises(values):
        site.divisors.add(values)
        found = enumerate(zip(result.texts, program(result.texts)(identity.scalars), strict=True))
        now = {slot: value for slot, (text, value) in found if scalars_of(text) <= divisors}
        result, arguments = replace(result, expr=plug(result.expr, now)), arguments - divisors
    site.arguments |= arguments
    general = not divisors.isdisjoint(arguments)
    return site.layout(arguments, result.sized, general), result


def _lifted(
    fn: Callable[..., Any], kind: str, identity: Identity, plain: Trace, site: Site
) -> tuple[Trace, frozenset[int]]:
    """The trace with as many scalars as arguments as can be, of those that were seen to differ."""

    def attempt(chosen: frozenset[int]) -> tuple[Trace, frozenset[int]] | None:
        if not chosen:
            return plain, chosen
        found = lift(fn, kind, identity, plain, chosen)
        if found is None:
            return None
        result, asked = found
        site.fixed |= asked
        return attempt(chosen - asked) if asked & chosen else (result, chosen)

    known = frozenset(site.arguments - site.fixed)
    new = frozenset(
        i
        for i, (now, then) in enumerate(zip(identity.scalars, site.first, strict=True))
        if now != then and i not in site.fixed | known and replaceable(identity, i)
    )
    wanted = known | new
    found = attempt(wanted)
    if found is None:
        found = plain, frozenset()
        for i in sorted(wanted):
            found = attempt(found[1] | {i}) or found
        site.fixed |= wanted - found[1]
    return found


def _run(fn: Callable[..., Any], kind: str, identity: Identity) -> Trace:
    if kind not in ARGUMENTS:
        raise ValueError(f"kind is 'score' or 'mask', not {kind!r}")
    check_arity(fn, kind)
    _check_captures(fn, kind, identity.tensors)
    _stats.traces += 1
    token = _tracing.set(True)
    try:
        return _steady(fn, kind, identity)
    finally:
        _tracing.reset(token)


def _steady(fn: Callable[..., Any], kind: str, identity: Identity) -> Trace:
    """A trace; raises UnsupportedError where another one would be of other numbers."""

    def traced() -> Trace:
        return trace(fn, kind, identity.tensors, grad=identity.grad)

    before = [(each, _state(each)) for each in _generators(identity)]
    found, got = traced(), ""
    drawn = [type(each) for each, state in before if _state(each) != state]
    if drawn:
        got = f"draws random numbers ({drawn[0].__module__}.{drawn[0].__name__})"
    elif identity.clocks:
        one, other = ((each.expr, each.graph and each.graph.code) for each in (found, traced()))
        if one != other:
            got = f"asks for another number each time ({', '.join(identity.clocks)})"
    if got:
        rule = "a mod gives the same score for the same position each time"
        do = "ask for them outside of the mod, and capture a tensor of them"
        raise Refusal(got, rule, do, raises=UnsupportedError).error(fn, kind)
    return found


def _generators(identity: Identity) -> list[Any]:
    """The generators of random numbers that a callable may draw from.

    Python's and numpy's own are among them where its code names them. Others are not looked at:
    another thread may draw at any time.
    """
    found = list(identity.generators)
    named = any("random" in each.names for each in identity.codes() if not each.library)
    named = named or any(
        type(each) is ModuleType and each.__name__.startswith("numpy.random")
        for each in identity.key
    )
    if found or named:
        numpys = getattr(sys.modules.get("numpy"), "random", None)  # which loads it
        draws: list[Any] = [random.random, getattr(numpys, "random_sample", None)]
        found += [draw.__self__ for draw in draws if draw is not None]
    return found


def _state(generator: Any) -> Any:
    """The state of Python's or numpy's generator."""
    if isinstance(generator, random.Random):
        return random.Random.getstate(generator)
    return pickle.dumps(generator)


def variant_of(
    kind: str,
    result: Trace,
    scalars: Sequence[int | float] = (),
    earlier: Sequence[Variant] = (),
) -> Variant:
    """A trace as a Mod of numbers near the present ones; earlier: those that do not hold them."""
    texts, kinds = result.texts, tuple[type, ...]()
    places = [place for text in texts if (place := scalar_of(text)) is not None]
    if len(places) == len(texts):  # each text is a scalar: nothing is computed
        texts = ()
    else:
        scalars, places = program(texts)(scalars), []
        kinds = tuple(map(type, scalars))
    alike = [each for each in earlier if each.texts == texts]
    expr, found = derived(result.expr, scalars, alike[-1].numbers if alike else (), places)
    expr, tensors, slots = renumber(expr)
    buffers = tuple(
        Buffer(name_of(t.dtype), t.dim()) for t in (result.tensors[i] for i in tensors)
    )
    numbers = tuple(found[slot] for slot in slots)
    names = tuple(number.dtype for number in numbers)
    mod = interned(kind, expr, buffers, names)
    return Variant(mod, tensors, numbers, texts, kinds)


def _check_device(fn: Callable[..., Any], kind: str, bound: Bound, device: torch.device) -> None:
    for tensor in bound.tensors:
        here = tensor.device
        same = here.type == device.type and (device.index in (None, here.index))
        if same or (tensor.dim() == 0 and here.type == "cpu"):
            continue
        raise _elsewhere(fn, kind, tensor, f"is called on {device}", device)


def _elsewhere(
    fn: Callable[..., Any], kind: str, tensor: torch.Tensor, other: str, device: torch.device
) -> Exception:
    return Refusal(
        f"captures {captured(fn, tensor)}, and {other}",
        "captured tensors are on the device of the query; 0-d ones may be on the CPU",
        f"move what is elsewhere: tensor.to('{device}')",
    ).error(fn, kind)


def _check_captures(fn: Callable[..., Any], kind: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse captured tensors that no trace can read: mapped by torch.func, or on two devices."""
    rows = [tensor for tensor in tensors if tensor.dim()]
    apart = [tensor for tensor in rows if tensor.device != rows[0].device]
    if apart:
        raise _elsewhere(fn, kind, rows[0], captured(fn, apart[0]), rows[0].device)
    for tensor in tensors:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise Refusal(
                f"captures {captured(fn, tensor)}, which torch.func maps or differentiates",
                "a mod is traced with tensors that have values, one for each position",
                "give a mapped tensor a dimension that is indexed by b; torch.autograd.grad "
                "differentiates in what a score_mod captures",
                raises=UnsupportedError,
            ).error(fn, kind)
