"""Objects and classes in an Identity: attributes, slots, items, and what nobody can see."""

from __future__ import annotations

import collections
import enum
import functools
import types
import weakref
from typing import TYPE_CHECKING, Any

from flexattn.mods.reads import is_library

if TYPE_CHECKING:
    from flexattn.mods.identity import Identity, Path

DESCRIPTORS = (
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.ClassMethodDescriptorType,
)
_CONTAINERS = (dict, list, tuple)
# Kept by CPython in front of an instance, which its size then leaves out.
_MANAGED_WEAKREF, _MANAGED_DICT = 1 << 3, 1 << 4
_POINTER = tuple.__itemsize__
# What Python keeps in a class, and adds to when it copies an instance.
_PYTHONS = frozenset((
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__",
    "__annotate__", "__annotate_func__", "__annotations_cache__", "__slots__", "__slotnames__",
    "__hash__", "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__",
    "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__firstlineno__",
    "__static_attributes__", "__new__", "__protocol_attrs__", "__non_callable_proto_members__",
    "__attrs_attrs__", "__attrs_props__",
))  # fmt: skip


def visit_object(self: Identity, value: Any, cls: type, path: Path) -> None:
    """Add an instance of any class: what it is, and everything it holds."""
    state = getattr(value, "__dict__", None)
    slots = [name for base in cls.__mro__ for name in _slots(base)]
    if state is None and not slots and not isinstance(value, _CONTAINERS):
        self.key.append(weakref.ref(cls))
        if cls is not object:
            self.opaque(f"it reads a {cls.__qualname__}, whose state nobody can see")
        return
    if _hides(cls, len(slots)):
        self.opaque(f"it reads a {cls.__qualname__}, which keeps state in C")
    visit_class(self, cls, (path, "type"))
    if isinstance(value, dict):
        self.key.append(len(value))
        for name, item in value.items():
            self.visit(name, (path, "key"))
            self.visit(item, (path, "item", name))
        if isinstance(value, collections.defaultdict):
            self.visit(value.default_factory, (path, "attr", "default_factory"))
    elif isinstance(value, (list, tuple)):
        self.key.append(len(value))
        for i, item in enumerate(value):
            self.visit(item, (path, "item", i))
    set_slots = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    for name, item in {**(state or {}), **set_slots}.items():
        self.key.append(name)
        self.visit(item, (path, "attr", name))


def visit_class(self: Identity, cls: type, path: Path) -> None:
    """Add a class: what its users gave it and its ancestors."""
    self.key.append(weakref.ref(cls))
    if is_library(cls.__module__) or self.again(cls, path):
        return
    if type(cls) is not type:  # of which a class has attributes, too
        visit_class(self, type(cls), (path, "type"))
    for base in cls.__mro__:
        if is_library(base.__module__):
            continue
        for name, value in vars(base).items():
            if name in _PYTHONS:
                continue
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            elif isinstance(value, property):
                value = value.fget
            if not isinstance(value, (*DESCRIPTORS, types.MemberDescriptorType)):
                self.key.append(name)
                self.visit(value, (path, "attr", name))


def visit_attributes(self: Identity) -> None:
    """Add what was set as an attribute on tensors, functions and the like, where code names it.

    They carry attributes that no mod reads (a loader's notes on a parameter, a decorator's on a
    function), and code reads attributes of what it was handed: so it is told by the names.
    """
    done: set[tuple[int, str]] = set()
    before = -1
    while before != len(done):
        before = len(done)
        codes = self.codes()
        names = frozenset[str]().union(*(each.names for each in codes))
        dynamic = any(each.dynamic for each in codes)
        for owner, path in list(self.bearers):
            for name, value in list(vars(owner).items()):
                if (dynamic or name in names) and (id(owner), name) not in done:
                    done.add((id(owner), name))
                    self.held = None
                    self.key.append(name)
                    self.visit(value, (path, "attr", name))


def _slots(cls: type) -> list[str]:
    """The attributes of a class's own slots, as instances know them."""
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    private = f"_{cls.__name__.lstrip('_')}"
    return [
        private + name if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]


def _hides(cls: type, slots: int) -> bool:
    """Whether instances hold more than attributes and items, in C, as a random.Random does.

    A cache of results does, too, but is not asked: what is left in it is what its user wants.
    """
    if issubclass(cls, (*_CONTAINERS, enum.Enum, functools._lru_cache_wrapper)):
        return False
    size = object.__basicsize__ + slots * _POINTER
    for offset, flag in (
        (cls.__dictoffset__, _MANAGED_DICT),
        (cls.__weakrefoffset__, _MANAGED_WEAKREF),
    ):
        if offset and not cls.__flags__ & flag:
            size += _POINTER
    return cls.__basicsize__ > size
