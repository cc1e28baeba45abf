"""Identity: everything a callable reads, as a key that is equal while a trace still holds."""

from __future__ import annotations

import enum
import functools
import random
import types
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch

from flexattn.mods.chance import is_clock
from flexattn.mods.objects import (
    DESCRIPTORS,
    MISSING,
    visit_attributes,
    visit_class,
    visit_object,
)
from flexattn.mods.reads import SWITCHES, Attributes, is_library, reads_of

# (path of the owner, how the owner holds it): substitute.py walks the same steps back.
Path = tuple[Any, ...]
# A cell with None, a dict with a key, or a function with None; and what was found there.
Read = tuple[Any, Any, Any]

_CAP = 2048
# Modules whose attributes are taken to be constant; kept alive, so that an id stays theirs.
_libraries: dict[int, types.ModuleType] = {}
_PLAIN = (torch.dtype, torch.device, torch.Size, torch.layout, range, complex, bytes)


class Identity:
    """What one look at a callable found.

    `key`: structure, torch's default dtype, dtypes, ranks, devices and every value that is no int
    or float.
    `tensors`, `scalars`: the captured values, in the order they were met; `paths` tells where
    each scalar lives. `shared`: paths of what was reached twice, which cannot be replaced in
    one place. Not `trusted`: something could not be looked into. `reads`: the names that were
    looked up, with what they held; None once something was met that may change behind its name.
    `bearers`: tensors, functions and values with attributes of their own. `sources`: generators
    of random numbers and clocks. `grad`: the grad mode that the code sees, on where it does not
    ask for it.
    """

    __slots__ = (
        "_seen", "bearers", "grad", "key", "paths", "reads", "scalars", "shared", "sources",
        "tensors", "trusted",
    )  # fmt: skip

    def __init__(self, kind: str) -> None:
        self.key: list[Any] = [kind, torch.get_default_dtype()]
        self.bearers: list[tuple[Any, Path]] = []
        self.sources: list[Any] = []
        self.grad = True
        self.tensors: list[torch.Tensor] = []
        self.scalars: list[int | float] = []
        self.paths: list[Path] = []
        self.shared: list[Path] = []
        self.trusted = True
        self.reads: list[Read] | None = []
        self._seen: dict[Any, tuple[int, Path]] = {}

    def visit(self, value: Any, path: Path) -> None:
        """Add a value and what it reaches."""
        kind = type(value)
        handler = _HANDLERS.get(kind, _other)
        if handler is _other or kind in _CHANGEABLE:
            self.reads = None
        handler(self, value, path)

    def again(self, value: Any, path: Path, method: Any = None) -> bool:
        """Whether this object (as the owner of this method) was met before, or no room is left."""
        what = id(value) if method is None else (id(value), id(method))
        seen = self._seen.get(what)
        if seen is not None:
            self.key.append(seen[0])
            self.shared.append(seen[1])
            return True
        self._seen[what] = (len(self._seen), path)
        if len(self.key) > _CAP:
            self.trusted = False
            return True
        return False

    def opaque(self) -> None:
        """Note something that cannot be looked into."""
        self.trusted = False

    def ask(self, switch: str) -> None:
        """Note how a switch of torch stands."""
        self.reads = None
        found = getattr(torch, switch)()
        self.key += (switch, found)
        self.grad &= switch != "is_grad_enabled" or found

    def read(self, owner: Any, name: Any, value: Any) -> None:
        """Note that a name held a value: a cell's, a dict's, or a function's own parts."""
        if self.reads is not None:
            self.reads.append((owner, name, value))


def identify(fn: Callable[..., Any], kind: str) -> Identity:
    """Look at a callable: the values it would read if it were called now."""
    identity = Identity(kind)
    if isinstance(fn, (types.FunctionType, types.MethodType, functools.partial)):
        identity.visit(fn, ())
    else:
        identity.reads = None
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


def _leaf(self: Identity, value: Any, path: Path) -> None:
    self.key.append(value)


def _module(self: Identity, value: types.ModuleType, path: Path) -> None:
    self.key.append(value)
    if not _is_library_module(value):
        self.opaque()


def _function(
    self: Identity, fn: types.FunctionType, path: Path, owner: Any = MISSING, at: Path = ()
) -> None:
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
    self.trusted &= reads.trusted
    for switch in reads.switches:
        self.ask(switch)
    if fn.__dict__:
        self.bearers.append((fn, path))
    self.read(fn, None, (fn.__code__, fn.__defaults__))
    if reads.cells:
        cells = fn.__closure__ or ()
        for i, chains in reads.cells:
            try:
                value = cells[i].cell_contents
            except ValueError:
                self.key.append(MISSING)
                self.reads = None
                continue
            self.read(cells[i], None, value)
            _chains(self, value, chains, (path, "cell", i))
    if reads.globals:
        scope = fn.__globals__
        for name, chains in reads.globals:
            value = scope.get(name, MISSING)
            self.read(scope, name, value)
            if _is_library_module(value):
                self.key.append(value)  # once, however many of its names the code reads
                continue
            if value is MISSING:
                builtins = cast(Any, fn).__builtins__
                value = builtins.get(name, MISSING)
                self.read(builtins, name, value)
                self.reads = None if value is MISSING else self.reads
            _chains(self, value, chains, (path, "global", name))
    if owner is not MISSING:
        chains = reads.arguments.get(reads.code.co_varnames[0], ())
        _chains(self, owner, chains, at)
    if fn.__defaults__:
        for i, value in enumerate(fn.__defaults__):
            self.visit(value, (path, "default", i))
    if fn.__kwdefaults__:
        self.reads = None
        for name, value in fn.__kwdefaults__.items():
            self.visit(value, (path, "kwdefault", name))


def _chains(self: Identity, root: Any, chains: Attributes, path: Path) -> None:
    for chain in chains:
        if not chain:
            self.visit(root, path)
            continue
        value, here = root, path
        for name in chain:
            kind = type(value)
            if kind is types.ModuleType:
                if is_library(value.__name__):
                    break
            elif kind in _CLOSED:
                break
            try:
                self.reads = None
                value = getattr(value, name)
            except AttributeError:
                value = MISSING
                break
            here = (here, "attr", name)
        if value is MISSING:
            self.key.append(MISSING)
        else:
            self.visit(value, here)


def _is_library_module(value: Any) -> bool:
    if id(value) in _libraries:
        return True
    if type(value) is not types.ModuleType or not is_library(value.__name__):
        return False
    _libraries[id(value)] = value
    return True


def _method(self: Identity, method: types.MethodType, path: Path) -> None:
    function, owner = method.__func__, method.__self__
    if not isinstance(function, types.FunctionType):
        self.opaque()
        self.visit(owner, (path, "self"))
    elif not self.again(owner, (path, "self"), function):
        _function(self, function, (path, "func"), owner, (path, "self"))


def _partial(self: Identity, fn: functools.partial[Any], path: Path) -> None:
    self.key += (functools.partial, len(fn.args), tuple(fn.keywords))
    self.visit(fn.func, (path, "func"))
    for i, value in enumerate(fn.args):
        self.visit(value, (path, "arg", i))
    for name, value in fn.keywords.items():
        self.visit(value, (path, "keyword", name))


def _callable(self: Identity, fn: Any) -> None:
    """The object that is called itself: what its code reads, not all it holds."""
    self.key.append(weakref.ref(type(fn)))
    hooked = isinstance(fn, torch.nn.Module) and (fn._forward_hooks or fn._forward_pre_hooks)
    called = fn.forward if isinstance(fn, torch.nn.Module) else type(fn).__call__
    if isinstance(called, types.MethodType):
        called = called.__func__ if called.__self__ is fn else called
    if hooked or not isinstance(called, types.FunctionType):
        self.visit(fn, ())
    else:
        _function(self, called, ((), "class"), fn, ())


def _sequence(self: Identity, values: Any, path: Path) -> None:
    if self.again(values, path):
        return
    self.key += (type(values), len(values))
    if len(values) > _CAP:
        self.opaque()
        return
    for i, value in enumerate(values):
        self.visit(value, (path, "item", i))
        if not self.trusted:
            return


def _dict(self: Identity, values: dict[Any, Any], path: Path) -> None:
    if self.again(values, path):
        return
    self.key += (dict, len(values))
    for name, value in values.items():
        if not isinstance(name, (str, int, float, bytes, type(None), tuple)):
            self.opaque()
            return
        self.key += (type(name), name)
        self.visit(value, (path, "item", name))
        if not self.trusted:
            return


def _bound_builtin(self: Identity, fn: types.BuiltinFunctionType, path: Path) -> None:
    owner = fn.__self__
    self.key.append(fn.__name__)
    if fn.__name__ in SWITCHES:
        self.ask(fn.__name__)
    if is_clock(fn):
        self.sources.append(fn)
        self.opaque()
    if owner is None or isinstance(owner, types.ModuleType):
        self.key.append(fn)
    else:
        self.visit(owner, (path, "self"))


def _other(self: Identity, value: Any, path: Path) -> None:
    """What has no handler of its own type: subclasses, user objects, and what is opaque."""
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
    elif isinstance(value, (int, float, str)):
        self.key += (weakref.ref(cls), repr(value))
        if hasattr(value, "__dict__"):
            self.bearers.append((value, path))
    elif cls is types.MethodWrapperType:
        self.key.append(value.__name__)
        self.visit(value.__self__, (path, "self"))
    elif isinstance(value, DESCRIPTORS) or cls.__module__.startswith("torch._ops"):
        self.key.append(value)
    elif not self.again(value, path):
        if isinstance(value, random.Random) or cls.__module__.startswith("numpy.random"):
            self.sources.append(value)
            if cls.__module__ == "random" or cls.__module__.startswith("numpy.random"):
                # Where it stands is no part of the key: a mod that draws from it is refused.
                self.key.append(weakref.ref(cls))
                if getattr(value, "__dict__", None):
                    self.bearers.append((value, path))
                return
        visit_object(self, value, cls, path)


# Attributes of these are theirs alone; the value as a whole says it all.
_CLOSED = frozenset(
    (torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), list, tuple, dict)
)

# Their parts may change while every name keeps what it holds.
_CHANGEABLE = frozenset((list, dict, types.MethodType, functools.partial))

_HANDLERS: dict[type, Callable[[Identity, Any, Path], None]] = {
    torch.Tensor: _tensor,
    torch.nn.Parameter: _tensor,
    int: _scalar,
    float: _scalar,
    bool: _constant,
    str: _constant,
    type(None): _leaf,
    type(Ellipsis): _leaf,
    torch.dtype: _leaf,
    torch.device: _leaf,
    types.ModuleType: _module,
    types.FunctionType: _function,
    types.MethodType: _method,
    types.BuiltinFunctionType: _bound_builtin,
    functools.partial: _partial,
    list: _sequence,
    tuple: _sequence,
    dict: _dict,
}
