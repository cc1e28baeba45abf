"""A mod's value: what a callable reads, as a key that is equal for as long as its trace holds.

The walk goes from code to the cells, defaults and globals that it names, and on through
functions, partials, methods, objects and containers to numbers, texts and tensors. What it cannot
follow has a reason, and such a callable is traced at every call.
"""

from __future__ import annotations

import collections
import copyreg
import datetime
import enum
import functools
import random
import types
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch

from flexattn.mods.reads import SWITCHES, Attributes, Reads, is_library, reads_of

# (path of the owner, how the owner holds it): substitute.py walks the same steps back.
Path = tuple[Any, ...]

_CAP = 2048
# What a name holds that holds nothing.
MISSING = object()
_PLAIN = (torch.dtype, torch.device, torch.Size, torch.layout, range, complex, bytes)
_CLOCKS = frozenset(("time", "datetime", "secrets", "urandom"))


class Identity:
    """The values that one walk through a callable found.

    `key`: structure, torch's default dtype, dtypes, ranks, devices and every value that is no int
    or float.
    `tensors`, `scalars`: the captured values, in the order they were met; `paths` tells where
    each scalar lives. `shared`: paths of what was reached twice, which cannot be replaced in
    one place. `reason`: why the callable has to be traced at every call; None where its key says
    all. `cells`, `names`, `functions`: what was looked up, each with what it held; `watchable`:
    nothing was met that may change behind its name. `bearers`: tensors, functions and
    values with attributes of their own. `generators`: of random numbers. `clocks`: names of
    functions that tell the time, or draw by chance without a seed. `grad`: the grad mode that the
    code sees, on where it does not ask for it.
    """

    def __init__(self, kind: str) -> None:
        self.key: list[Any] = [kind, torch.get_default_dtype()]
        self.bearers: list[tuple[Any, Path]] = []
        self.generators: list[Any] = []
        self.clocks: list[str] = []
        self.grad = True
        self.tensors: list[torch.Tensor] = []
        self.scalars: list[int | float] = []
        self.paths: list[Path] = []
        self.shared: list[Path] = []
        self.reason: str | None = None
        self.watchable = True
        self.cells: list[tuple[Any, Any]] = []
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        self.functions: list[tuple[FunctionType, types.CodeType, Any]] = []
        self._seen: dict[Any, tuple[int, Path]] = {}

    def visit(self, value: Any, path: Path) -> None:
        """Add a value and what it reaches."""
        _HANDLERS.get(type(value), _other)(self, value, path)

    def again(self, value: Any, path: Path, method: Any = None) -> bool:
        """True if this object (as the owner of this method) was met before, or no room is left."""
        what = id(value) if method is None else (id(value), id(method))
        seen = self._seen.get(what)
        if seen is not None:
            self.key.append(seen[0])
            self.shared.append(seen[1])
            return True
        self._seen[what] = (len(self._seen), path)
        if len(self.key) > _CAP:
            self.opaque(f"it reaches more than {_CAP:,} values")
            return True
        return False

    def path_of(self, value: Any) -> Path | None:
        """The path by which a tensor or a container was met first; None where it was not."""
        seen = self._seen.get(id(value))
        return None if seen is None else seen[1]

    def opaque(self, reason: str) -> None:
        """Note something that cannot be followed."""
        self.reason = self.reason or reason

    def codes(self) -> list[Reads]:
        """The reads of all code that was met."""
        return [each for each in self.key if type(each) is Reads]

    def ask(self, switch: str) -> None:
        """Note how a switch of torch stands."""
        self.watchable = False
        found = getattr(torch, switch)()
        self.key += (switch, found)
        self.grad &= switch != "is_grad_enabled" or found


def identify(fn: Callable[..., Any], kind: str) -> Identity:
    """Walk through a callable: the values it would read if it were called now."""
    identity = Identity(kind)
    if isinstance(fn, (FunctionType, types.MethodType, functools.partial)):
        identity.visit(fn, ())
    else:
        _callable(identity, fn)
    if identity.bearers:
        visit_attributes(identity)
    return identity


def _tensor(self: Identity, value: torch.Tensor, path: Path) -> None:
    seen = self._seen.get(id(value))
    if seen is None:
        self._seen[id(value)] = (len(self._seen), path)
        self.tensors.append(value)
        # The class announces a tensor to `digest`, which reads the key.
        self.key += (torch.Tensor, value.dtype, value.ndim, value.device.type)
        if value.__dict__:
            self.bearers.append((value, path))
    else:
        self.key.append(seen[0])


def _scalar(self: Identity, value: int | float, path: Path) -> None:
    self.key.append(type(value))
    self.scalars.append(value)
    self.paths.append(path)


def _constant(self: Identity, value: Any, path: Path) -> None:
    self.key += (type(value), value)


def _module(self: Identity, value: types.ModuleType, path: Path) -> None:
    self.key.append(value)
    if not _is_library_module(value):
        self.opaque(f"it hands on the module {value.__name__}")


def _function(
    self: Identity, fn: FunctionType, path: Path, owner: Any = MISSING, at: Path = ()
) -> None:
    """Add a function, or the method of an owner, which is found at another path."""
    reads = reads_of(fn)
    if owner is MISSING:
        if reads.library and fn.__closure__ is None:
            self.key.append(fn)
            if fn.__name__ in SWITCHES:
                self.ask(fn.__name__)
            return
        if self.again(fn, path):
            return
    self.key.append(reads)
    if reads.reason:
        self.opaque(reads.reason)
        # It may import them.
        self.clocks += [*reads.names & _CLOCKS]
    for switch in reads.switches:
        self.ask(switch)
    if fn.__dict__:
        self.bearers.append((fn, path))
    self.functions.append((fn, fn.__code__, fn.__defaults__))
    if reads.cells:
        cells = fn.__closure__ or ()
        for i, name, chains in reads.cells:
            try:
                value = cells[i].cell_contents
            except ValueError:
                self.key.append(MISSING)
                self.watchable = False
                continue
            self.cells.append((cells[i], value))
            _chains(self, value, chains, (path, "cell", name))
    if reads.globals:
        scope = fn.__globals__
        for name, chains in reads.globals:
            value = scope.get(name, MISSING)
            self.names.append((scope, name, value))
            if _is_library_module(value):
                self.key.append(value)  # once, however many of its names the code reads
                continue
            if value is MISSING:
                builtins = cast(Any, fn).__builtins__
                value = builtins.get(name, MISSING)
                self.watchable &= value is not MISSING
                self.names.append((builtins, name, value))
            _chains(self, value, chains, (path, "global", name))
    if owner is not MISSING:
        _chains(self, owner, reads.owner, at)
    if fn.__defaults__:
        names = reads.positional[-len(fn.__defaults__) :]
        for name, value in zip(names, fn.__defaults__, strict=False):
            self.visit(value, (path, "default", name))
    if fn.__kwdefaults__:
        self.watchable = False
        for name, value in fn.__kwdefaults__.items():
            self.visit(value, (path, "kwdefault", name))


def _chains(self: Identity, root: Any, chains: Attributes, path: Path) -> None:
    """Add a value, or, where code reads but its attributes, these."""
    for chain in chains:
        value, here = root, path
        for name in chain:
            if type(value) in _CLOSED or _is_library_module(value):
                break
            self.watchable = False
            value = getattr(value, name, MISSING)
            if value is MISSING:
                break
            here = (here, "attr", name)
        if value is MISSING:
            self.key.append(MISSING)
        else:
            self.visit(value, here)


def _is_library_module(value: Any) -> bool:
    return type(value) is types.ModuleType and is_library(value.__name__)


def _method(self: Identity, method: types.MethodType, path: Path) -> None:
    self.watchable = False
    function, owner = method.__func__, method.__self__
    at = (path, "attr", "__self__")
    if not isinstance(function, FunctionType):
        self.opaque("it calls a method that is no Python function")
        self.visit(owner, at)
    elif not self.again(owner, at, function):
        _function(self, function, (path, "attr", "__func__"), owner, at)


def _partial(self: Identity, fn: functools.partial[Any], path: Path) -> None:
    self.watchable = False
    self.key += (functools.partial, len(fn.args), tuple(fn.keywords))
    self.visit(fn.func, (path, "attr", "func"))
    for i, value in enumerate(fn.args):
        self.visit(value, ((path, "attr", "args"), "item", i))
    for name, value in fn.keywords.items():
        self.visit(value, ((path, "attr", "keywords"), "item", name))


def _callable(self: Identity, fn: Any) -> None:
    """The object that is called itself: what its code reads, not all it holds."""
    self.watchable = False
    self.key.append(weakref.ref(type(fn)))
    hooked = isinstance(fn, torch.nn.Module) and (fn._forward_hooks or fn._forward_pre_hooks)
    called = fn.forward if isinstance(fn, torch.nn.Module) else type(fn).__call__
    if isinstance(called, types.MethodType):
        called = called.__func__ if called.__self__ is fn else called
    if hooked or not isinstance(called, FunctionType):
        self.visit(fn, ())
    else:
        _function(self, called, ((), "class"), fn, ())


def _container(self: Identity, values: Any, path: Path) -> None:
    if type(values) is not tuple:
        self.watchable = False
    if not self.again(values, path):
        self.key.append(type(values))
        _items(self, values, path)


def _items(self: Identity, values: Any, path: Path) -> None:
    """Add the items of a dict, a list or a tuple, or of an instance of a class of such."""
    self.key.append(len(values))
    if len(values) > _CAP:
        self.opaque(f"it reads a {type(values).__name__} of more than {_CAP:,} values")
    keyed = isinstance(values, dict)
    for name, value in values.items() if keyed else enumerate(values):
        if self.reason:
            return
        if keyed:
            self.visit(name, (path, "key"))
        self.visit(value, (path, "item", name))


def _builtin(self: Identity, fn: types.BuiltinFunctionType, path: Path) -> None:
    owner: Any = fn.__self__
    self.key.append(fn.__name__)
    if fn.__name__ in SWITCHES:
        self.ask(fn.__name__)
    if _is_clock(fn):
        self.clocks.append(f"{owner.__name__}.{fn.__name__}")
        self.opaque(f"it may call {self.clocks[-1]}")
    if owner is None or isinstance(owner, types.ModuleType):
        self.key.append(fn)
    else:
        self.visit(owner, (path, "self"))


def _is_clock(fn: Any) -> bool:
    """True if a function of C tells the time, or what the system draws by chance."""
    owner = fn.__self__
    if isinstance(owner, type):
        return issubclass(owner, datetime.date)
    return getattr(owner, "__name__", "") == "time" or fn.__name__ == "urandom"


def _other(self: Identity, value: Any, path: Path) -> None:
    """Add a value of a type without a handler: of a subclass, of a user's class, or opaque."""
    self.watchable = False
    cls = type(value)
    if isinstance(value, torch.Tensor):
        self.key.append(weakref.ref(cls))
        _tensor(self, value, path)
    elif isinstance(value, enum.Enum):
        self.key += (weakref.ref(cls), value.name)
        self.bearers.append((value, path))
    elif cls.__module__ == "numpy" and hasattr(value, "tobytes") and value.size <= _CAP:
        self.key += (cls, str(value.dtype), value.shape, value.tobytes())
    elif isinstance(value, type):
        visit_class(self, value, path)
    elif isinstance(value, _PLAIN):
        _constant(self, value, path)
    elif isinstance(value, DESCRIPTORS) or cls.__module__.startswith("torch._ops"):
        self.key.append(value)
    elif not self.again(value, path):
        libraries = cls.__module__ == "random" or cls.__module__.startswith("numpy.random")
        if isinstance(value, random.SystemRandom):
            self.clocks.append(cls.__qualname__)
            self.opaque("it may draw what the system gives by chance")
        elif libraries or isinstance(value, random.Random):
            self.generators.append(value)
        if libraries:  # where it stands is no part of the key: a mod that draws is refused
            self.key.append(weakref.ref(cls))
            if getattr(value, "__dict__", None):
                self.bearers.append((value, path))
        else:
            visit_object(self, value, cls, path)


# Attributes of these are theirs alone; the value as a whole says it all.
_CLOSED = frozenset(
    (torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), list, tuple, dict)
)

_HANDLERS: dict[type, Callable[[Identity, Any, Path], None]] = {
    torch.Tensor: _tensor,
    torch.nn.Parameter: _tensor,
    int: _scalar,
    float: _scalar,
    **dict.fromkeys((bool, str, type(None), type(Ellipsis), *_PLAIN), _constant),
    types.ModuleType: _module,
    FunctionType: _function,
    types.MethodType: _method,
    types.BuiltinFunctionType: _builtin,
    functools.partial: _partial,
    list: _container,
    tuple: _container,
    dict: _container,
}


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
_PYTHONS = frozenset(
    (
        "__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __annotate__ "
        "__annotate_func__ __annotations_cache__ __slots__ __slotnames__ __hash__ "
        "__abstractmethods__ _abc_impl __parameters__ __orig_bases__ __dataclass_fields__ "
        "__dataclass_params__ __match_args__ __firstlineno__ __static_attributes__ __new__ "
        "__protocol_attrs__ __non_callable_proto_members__ __attrs_attrs__ __attrs_props__"
    ).split()
)


def visit_object(self: Identity, value: Any, cls: type, path: Path) -> None:
    """Add an instance of any class: what it is, and everything it holds."""
    state = getattr(value, "__dict__", None)
    slots: list[str] = copyreg._slotnames(cls)  # type: ignore[attr-defined]
    if state is None and not slots and not isinstance(value, _CONTAINERS):
        self.key.append(weakref.ref(cls))
        if cls is not object:
            self.opaque(f"it reads a {cls.__qualname__}, whose state nobody can see")
        return
    if _hides(cls, len(slots)):
        self.opaque(f"it reads a {cls.__qualname__}, which keeps state in C")
    visit_class(self, cls, (path, "type"))
    if isinstance(value, _CONTAINERS):
        _items(self, value, path)
    if isinstance(value, collections.defaultdict):
        self.visit(value.default_factory, (path, "attr", "default_factory"))
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
                    self.watchable = False
                    self.key.append(name)
                    self.visit(value, (path, "attr", name))


def _hides(cls: type, slots: int) -> bool:
    """True if instances hold more than attributes and items, in C, as a random.Random does.

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
