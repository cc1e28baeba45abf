"""Site: what is known of the callables of one structure, and how their mods are found in it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from flexattn.lru import Lru
from flexattn.mods.expr import Buffer, Expr, Mod, fingerprint
from flexattn.mods.identity import Identity

__all__ = ["Bound", "Layout", "Site", "Variant", "interned"]

_VARIANTS = 64
_mods: weakref.WeakValueDictionary[str, Mod] = weakref.WeakValueDictionary()


class Bound(NamedTuple):
    """A mod and the values it captures at this moment, in the order of its slots."""

    mod: Mod
    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[int | float | bool, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """A Mod and where its slots are found among an identity's tensors and scalars."""

    mod: Mod
    tensors: tuple[int, ...]
    scalars: tuple[int, ...]
    # What is bound where there is no slot to fill.
    empty: Bound = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "empty", Bound(self.mod, (), ()))

    def bound(self, tensors: Any, scalars: Any) -> Bound:
        """The Mod with the values of its slots."""
        if not self.tensors and not self.scalars:
            return self.empty
        return Bound(
            self.mod,
            tuple([tensors[i] for i in self.tensors]),
            tuple([scalars[i] for i in self.scalars]),
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Which scalars of a site are arguments, which belong to a variant's key, and its variants.

    A site swaps its layout as a whole, so that another thread never sees half of a change.
    earlier: the layout before. Its variants still hold for the values that they were traced with,
    and are found first: a call that comes back gets the Mod it had, whose kernels are compiled.
    """

    arguments: frozenset[int]
    constants: tuple[int, ...]
    sized: bool
    variants: Lru[tuple[Any, ...], Variant]
    earlier: Layout | None = None

    @classmethod
    def empty(
        cls, count: int, arguments: frozenset[int], sized: bool, earlier: Layout | None = None
    ) -> Layout:
        """No variants yet of callables that capture this many scalars."""
        constants = tuple(i for i in range(count) if i not in arguments)
        return cls(arguments, constants, sized, Lru(_VARIANTS), earlier)

    def key(self, identity: Identity) -> tuple[Any, ...]:
        """What tells this call's variant from the others."""
        if not self.constants and not self.sized:
            return ()
        scalars = identity.scalars
        # Zero by its text, which tells 0.0 from -0.0.
        values = tuple([scalars[i] or repr(scalars[i]) for i in self.constants])
        return (*values, *(t.shape for t in identity.tensors)) if self.sized else values

    def find(self, identity: Identity) -> Bound | None:
        """This call's variant with what it captures now; the earliest, where several hold."""
        if self.earlier is not None:
            found = self.earlier.find(identity)
            if found is not None:
                return found
        variant = self.variants.get(self.key(identity))
        return None if variant is None else variant.bound(identity.tensors, identity.scalars)


@dataclass(slots=True)
class Site:
    """What is known of the callables of one structure: same code, same kinds of captures.

    `first` are the scalars of the first call; one that is seen to differ becomes an argument,
    or is `fixed` if it cannot: then each of its values is a variant.
    """

    layout: Layout
    first: tuple[int | float, ...]
    fixed: set[int] = field(default_factory=set)


def interned(kind: str, expr: Expr, buffers: tuple[Buffer, ...], scalars: tuple[str, ...]) -> Mod:
    """The one Mod object of these parts."""
    digest = fingerprint(kind, expr, buffers, scalars)
    mod = _mods.get(digest)
    if mod is None:
        mod = _mods[digest] = Mod(kind, expr, buffers, scalars, digest)
    return mod
