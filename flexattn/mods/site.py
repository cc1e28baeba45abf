"""Site: what is known of the callables of one structure, and how their mods are found in it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple

import torch

from flexattn.errors import NoKernelError
from flexattn.mods.expr import Buffer, Expr, Mod, fingerprint
from flexattn.mods.host_numbers import host_values
from flexattn.mods.identity import MISSING, Identity
from flexattn.mods.numbers import Number
from flexattn.util.locks import Lru, renewed

# How many values of a site's divisors are constants, each of a kernel. Canvases, tiles, blocks of
# a program are few, and what a compiler knows of a divisor saves instructions and registers for
# each key; a kernel more costs a compile of a second, which is remembered.
MAX_CONSTANT_DIVISORS = 8
_VARIANTS = 64
_mods: weakref.WeakValueDictionary[str, Mod] = weakref.WeakValueDictionary()
_interning = renewed(threading.Lock())


class Bound(NamedTuple):
    """A mod and the values it captures at this moment, in the order of its slots."""

    mod: Mod
    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[int | float | bool, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """A Mod and where its slots are found among an identity's tensors and scalars.

    texts, kinds: what the host computes of the scalars for its numbers, and of which types; none
    where they are its scalars.
    """

    mod: Mod
    tensors: tuple[int, ...]
    numbers: tuple[Number, ...]
    texts: tuple[str, ...] = ()
    kinds: tuple[type, ...] = ()

    def of(self, tensors: Sequence[torch.Tensor], numbers: tuple[Any, ...] = ()) -> Bound:
        """The Mod with these values of its slots."""
        return Bound(self.mod, tuple([tensors[i] for i in self.tensors]), numbers)

    def bound(self, tensors: Any, scalars: Any) -> Bound | None:
        """The Mod with the values of its slots; None where it was made for other numbers."""
        if not self.numbers:
            return self.of(tensors)
        if self.texts:
            scalars = host_values(self.texts, self.kinds, scalars)
            if scalars is None:
                return None
        values = tuple([number.value(scalars) for number in self.numbers])
        return None if None in values else self.of(tensors, values)


@dataclass(frozen=True, slots=True)
class SiteLayout:
    """The constants among a site's scalars, and the variants by their values.

    sized: sizes of the captured tensors belong to the key, too, for a trace read them.
    general: a divisor is an argument. Variants of one key differ by the range of their
    numbers; the first that holds them serves.
    """

    constants: tuple[int, ...]
    sized: bool
    general: bool = False
    variants: Lru[tuple[Any, ...], tuple[Variant, ...]] = field(
        default_factory=lambda: Lru(_VARIANTS), compare=False
    )

    def key(self, identity: Identity) -> tuple[Any, ...]:
        """The part of a variant's key that tells this call from others of the layout."""
        if not self.constants and not self.sized:
            return ()
        scalars = identity.scalars
        # Zero by its text, which tells 0.0 from -0.0.
        values = tuple([scalars[i] or repr(scalars[i]) for i in self.constants])
        return (*values, *(t.shape for t in identity.tensors)) if self.sized else values

    def alike(self, identity: Identity) -> tuple[Variant, ...]:
        """The variants that have this call's constants, in the order in which they are tried."""
        return self.variants.get(self.key(identity)) or ()

    def add(self, identity: Identity, variant: Variant) -> None:
        """Keep a variant for calls like this one."""
        self.variants.put(self.key(identity), (*self.alike(identity), variant))


@dataclass(slots=True)
class Site:
    """The traces of the callables of one structure: same code, same kinds of captures.

    `first` are the scalars of the first call; one that is seen to differ becomes one of the
    `arguments`, or is `fixed` if it cannot: then each of its values is a variant. What a divisor
    is computed from stays a constant for a few values, which `divisors` keeps beside the first
    one; with others it is an argument.

    layouts: from the oldest on, general ones last. The variants of each hold for the values that
    they were traced with, and the oldest is found first: a call that comes back gets the Mod it
    had, whose kernels are compiled. sized: whether a trace read sizes. beyond: by numbers
    and sizes, why no kernel computes it. Plain torch does so each time, and no call is traced
    again.
    """

    first: tuple[int | float, ...]
    layouts: list[SiteLayout] = field(default_factory=list)
    sized: bool = False
    arguments: set[int] = field(default_factory=set)
    fixed: set[int] = field(default_factory=set)
    divisors: set[tuple[int | float, ...]] = field(default_factory=set)
    beyond: Lru[tuple[Any, ...], NoKernelError] = field(default_factory=lambda: Lru(_VARIANTS))

    def layout(
        self,
        arguments: frozenset[int],
        sized: bool,
        general: bool = False,
    ) -> SiteLayout:
        """The layout in which these scalars are arguments; it is sized if an earlier one is."""
        self.sized |= sized
        constants = tuple(i for i in range(len(self.first)) if i not in arguments)
        found = SiteLayout(constants, self.sized, general)
        if found in self.layouts:
            return self.layouts[self.layouts.index(found)]
        # In one step: other threads read them.
        self.layouts = sorted([*self.layouts, found], key=attrgetter("general"))
        return found

    def specialises(self, values: tuple[int | float, ...]) -> bool:
        """True if these values of its divisors may be constants: the first ones seen are."""
        return values in self.divisors or 1 + len(self.divisors) < MAX_CONSTANT_DIVISORS

    def find(self, identity: Identity) -> Bound | None:
        """This call's variant with what it captures now; the earliest, where several hold."""
        for layout in self.layouts:
            for variant in layout.alike(identity):
                found = variant.bound(identity.tensors, identity.scalars)
                if found is not None:
                    return found
        return None


def interned(kind: str, expr: Expr, buffers: tuple[Buffer, ...], scalars: tuple[str, ...]) -> Mod:
    """The one Mod object of these parts."""
    digest = fingerprint(kind, expr, buffers, scalars)
    with _interning:
        mod = _mods.get(digest)
        if mod is None:
            mod = _mods[digest] = Mod(kind, expr, buffers, scalars, digest)
    return mod


class Guards:
    """Every name that a function looks up with what it held, and what its tensors were like.

    They hold only if nothing that the function reads has changed but tensors' contents, so that
    its Mod, its numbers and its tensors are those of before. The function itself is not kept
    alive.
    """

    def __init__(self, fn: FunctionType, identity: Identity) -> None:
        self._itself = fn.__code__, fn.__defaults__
        self._default = torch.get_default_dtype()
        self._cells, self._names = identity.cells, identity.names
        # Without the function itself, which is not kept alive.
        self._functions = [each for each in identity.functions if each[0] is not fn]
        self._tensors = [(t, t.shape, t.stride(), t.dtype, t.device) for t in identity.tensors]
        # Those that the code names would have left nothing held: others may hide a method.
        self._attributes = [(vars(t), frozenset(vars(t))) for t in identity.tensors]

    def hold(self, fn: FunctionType) -> bool:
        """True if `fn`, the function they were made for, reads now what it read then."""
        code, defaults = self._itself
        if fn.__code__ is not code or fn.__defaults__ is not defaults:
            return False
        if torch.get_default_dtype() is not self._default:
            return False
        try:
            for cell, value in self._cells:
                if cell.cell_contents is not value:
                    return False
        except ValueError:  # a cell that was emptied
            return False
        for scope, name, value in self._names:
            if scope.get(name, MISSING) is not value:
                return False
        for function, code, defaults in self._functions:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return False
        # A tensor is given other data in place by `.data = …`, as Module.to() does.
        for tensor, shape, strides, dtype, device in self._tensors:
            same = tensor.shape == shape and tensor.stride() == strides
            if not same or tensor.dtype != dtype or tensor.device != device:
                return False
        for attributes, names in self._attributes:
            if (attributes or names) and attributes.keys() != names:
                return False
        return True

    def requires_grad(self) -> bool:
        """True if a tensor that the function captures requires grad."""
        return any([each[0].requires_grad for each in self._tensors])


def guards(fn: FunctionType, identity: Identity) -> Guards | None:
    """The guards of what a walk found, None where it met what may change unseen."""
    if not identity.watchable or identity.reason:
        return None
    return None if any(each.forgiving for each in identity.codes()) else Guards(fn, identity)
