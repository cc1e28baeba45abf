"""bind(): a callable's Mod and what it captures now; traced once, then found in microseconds."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from flexattn.lru import Lru
from flexattn.mods.expr import Buffer, Mod, fingerprint, walk
from flexattn.mods.identity import Identity, identify
from flexattn.mods.lift import lift, replaceable
from flexattn.mods.refusal import Refusal
from flexattn.mods.simplify import renumber
from flexattn.mods.trace import ARGUMENTS, Trace, check_arity, trace

__all__ = ["Bound", "Stats", "bind", "clear", "stats"]

_SITES = 512
_VARIANTS = 64


class Bound(NamedTuple):
    """A mod and the values it captures at this moment, in the order of its slots."""

    mod: Mod
    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[int | float | bool, ...]


@dataclass(slots=True)
class Stats:
    """How often bind() ran a callable to read it, and how often it tried to lift scalars."""

    traces: int = 0
    lifts: int = 0


@dataclass(frozen=True, slots=True)
class _Variant:
    """A Mod and where its slots are found among an identity's tensors and scalars."""

    mod: Mod
    tensors: tuple[int, ...]
    scalars: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which scalars of a site are arguments, which belong to a variant's key, and its variants.

    A site swaps its layout as a whole, so that another thread never sees half of a change.
    """

    arguments: frozenset[int]
    constants: tuple[int, ...]
    sized: bool
    variants: Lru[tuple[Any, ...], _Variant]

    def key(self, identity: Identity) -> tuple[Any, ...]:
        """What tells this call's variant from the others."""
        scalars = identity.scalars
        # Zero by its text, which tells 0.0 from -0.0.
        values = tuple([scalars[i] or repr(scalars[i]) for i in self.constants])
        return (*values, *(t.shape for t in identity.tensors)) if self.sized else values


@dataclass(slots=True)
class _Site:
    """What is known of the callables of one structure: same code, same kinds of captures.

    `first` are the scalars of the first call; one that is seen to differ becomes an argument,
    or is `fixed` if it cannot: then each of its values is a variant.
    """

    layout: _Layout
    first: tuple[int | float, ...]
    fixed: set[int] = field(default_factory=set)


_sites: Lru[tuple[Any, ...], _Site] = Lru(_SITES)
_mods: weakref.WeakValueDictionary[str, Mod] = weakref.WeakValueDictionary()
# One trace at a time: torch's tracer patches what all threads share.
_tracing = threading.RLock()
_stats = Stats()


def bind(
    fn: Callable[..., Any] | None, kind: str, device: torch.device | str | None = None
) -> Bound | None:
    """The callable's Mod with the tensors and scalars it captures now; None for None.

    `kind` is "score" or "mask". The Mod is the same object for as long as nothing changes but
    tensors' contents and lengths, and numbers that proved to be arguments. With a `device`,
    captured tensors must be there; 0-d tensors may stay on the CPU. Raises ModError or
    UnsupportedError, which name the line of the user's function.
    """
    if fn is None:
        return None
    identity = identify(fn, kind)
    if identity.trusted:
        key = tuple(identity.key)
        site = _sites.get(key)
        found = _find(site, identity) if site else None
        if found is None:
            with _tracing:
                found = _trace_site(fn, kind, identity, key)
    else:
        with _tracing:
            found = _trace_once(fn, kind, identity)
    if device is not None:
        _check_device(fn, kind, found, torch.device(device))
    return found


def stats() -> Stats:
    """The counters since the last clear()."""
    return Stats(_stats.traces, _stats.lifts)


def clear() -> None:
    """Forget every trace, and count anew."""
    _sites.clear()
    _stats.traces = _stats.lifts = 0


def _find(site: _Site, identity: Identity) -> Bound | None:
    layout = site.layout
    variant = layout.variants.get(layout.key(identity))
    return None if variant is None else _bound(variant, identity.tensors, identity)


def _bound(variant: _Variant, tensors: Any, identity: Identity) -> Bound:
    scalars = identity.scalars
    return Bound(
        variant.mod,
        tuple([tensors[i] for i in variant.tensors]),
        tuple([scalars[i] for i in variant.scalars]),
    )


def _trace_once(fn: Callable[..., Any], kind: str, identity: Identity) -> Bound:
    """For a callable that could not be looked into: right for this call, and not remembered."""
    plain = _run(fn, kind, identity)
    return _bound(_variant(kind, plain), plain.tensors, identity)


def _trace_site(
    fn: Callable[..., Any], kind: str, identity: Identity, key: tuple[Any, ...]
) -> Bound:
    site = _sites.get(key)
    found = _find(site, identity) if site else None
    if found is not None:  # another thread was faster
        return found
    plain = _run(fn, kind, identity)
    if plain.volatile:
        return _bound(_variant(kind, plain), plain.tensors, identity)
    if site is None:
        site = _Site(_layout(identity, frozenset(), plain.sized), tuple(identity.scalars))
    result, arguments = _lifted(fn, kind, identity, plain, site)
    sized = site.layout.sized or result.sized
    if (arguments, sized) != (site.layout.arguments, site.layout.sized):
        site.layout = _layout(identity, arguments, sized)
    variant = _variant(kind, result)
    site.layout.variants.put(site.layout.key(identity), variant)
    _sites.put(key, site)
    return _bound(variant, identity.tensors, identity)


def _lifted(
    fn: Callable[..., Any], kind: str, identity: Identity, plain: Trace, site: _Site
) -> tuple[Trace, frozenset[int]]:
    """The trace with as many scalars as arguments as can be, of those that were seen to differ."""

    def attempt(chosen: frozenset[int]) -> Trace | None:
        _stats.lifts += 1
        return lift(fn, kind, identity, plain, chosen, site.first)

    known = site.layout.arguments
    new = frozenset(
        i
        for i, (now, then) in enumerate(zip(identity.scalars, site.first, strict=True))
        if now != then and i not in site.fixed | known and replaceable(identity, i)
    )
    if not known | new:
        return plain, known
    together = attempt(known | new)
    if together:
        return together, known | new
    best = attempt(known) if known and new else None
    if best is None:
        # What was an argument elsewhere is none beside these constants, so it never is again.
        site.fixed |= known
        known, best = frozenset(), plain
    for i in sorted(new) if len(new) > 1 else ():
        better = attempt(known | {i})
        if better:
            known, best = known | {i}, better
    site.fixed |= new - known
    return best, known


def _run(fn: Callable[..., Any], kind: str, identity: Identity) -> Trace:
    if kind not in ARGUMENTS:
        raise ValueError(f"kind is 'score' or 'mask', not {kind!r}")
    check_arity(fn, kind)
    _stats.traces += 1
    return trace(fn, kind, identity.tensors)


def _layout(identity: Identity, arguments: frozenset[int], sized: bool) -> _Layout:
    constants = tuple(i for i in range(len(identity.scalars)) if i not in arguments)
    return _Layout(arguments, constants, sized, Lru(_VARIANTS))


def _variant(kind: str, result: Trace) -> _Variant:
    expr, tensors, scalars = renumber(result.expr)
    buffers = tuple(
        Buffer(str(t.dtype).removeprefix("torch."), t.dim())
        for t in (result.tensors[i] for i in tensors)
    )
    dtypes = {node.value: node.dtype for node in walk(expr) if node.op == "scalar"}
    names = tuple(dtypes[slot] for slot in range(len(scalars)))
    digest = fingerprint(kind, expr, buffers, names)
    mod = _mods.get(digest)
    if mod is None:
        mod = _mods[digest] = Mod(kind, expr, buffers, names, digest)
    return _Variant(mod, tensors, scalars)


def _check_device(fn: Callable[..., Any], kind: str, bound: Bound, device: torch.device) -> None:
    for slot, tensor in enumerate(bound.tensors):
        here = tensor.device
        same = here.type == device.type and (device.index in (None, here.index))
        if same or (tensor.dim() == 0 and here.type == "cpu"):
            continue
        shape = list(tensor.shape)
        raise Refusal(
            f"captures a tensor of shape {shape} on {here} (buffer {slot}), called on {device}",
            "captured tensors are on the device of the query; 0-d ones may be on the CPU",
            f"move it there: tensor.to('{device}')",
        ).error(fn, kind, None)
