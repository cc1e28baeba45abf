"""Where a mod's numbers may live, how they are read there, and how they come to change.

All of it is text. {i} numbers the place, so that one mod may have several; {v} is the first number
and {w} another one.
"""

from __future__ import annotations

from dataclasses import dataclass

# What every mod's module begins with.
PRELUDE = """
import builtins, collections, dataclasses, enum, functools, operator, os, types
import numpy as np
import torch
from torch import is_grad_enabled as learning
TABLE = torch.arange(8.0) / 4
def peek(thing): return thing.x
def named(thing, name): return getattr(thing, name)
def applied(f): return f.x
def cell(fn, name): return fn.__closure__[fn.__code__.co_freevars.index(name)]
NAMES = set()
class Bag: pass
class Slots: __slots__ = ("x", "__hidden")
class Private:
    __slots__ = ("__y",)
    def __init__(self, y): self.__y = y
    def get(self): return self.__y
    def set(self, y): self.__y = y
class Marked(int): pass
class Kind(enum.Enum): ONE, TWO = 1, 2
Pair = collections.namedtuple("Pair", "x y")
def bag(x, cls=Bag):
    made = cls()
    made.x = x
    return made
def looked(thing): return thing.get()
"""


@dataclass(frozen=True, slots=True)
class Place:
    """setup: statements of the module. read: an expression of a number. changes: statements.

    cell, keyword: the place is a variable of the function around the mod, or an argument by name.
    """

    name: str
    setup: str
    read: str
    changes: tuple[str, ...]
    cell: bool = False
    keyword: bool = False

    @property
    def tensor(self) -> bool:
        """Whether it is, or may become, a tensor, whose value Python does not see."""
        return self.rounds or any(each in self.read for each in ("t{i}", "(kv_idx"))

    @property
    def rounds(self) -> bool:
        """Whether torch and a kernel may round it to different sides of a jump."""
        return any(each in self.read for each in ("log", "/", "m{i}(torch"))


def _place(name: str, setup: str, read: str, *changes: str, **more: bool) -> Place:
    return Place(name, setup, read, changes, **more)


NUMBERS = (
    _place("global", "G{i} = {v}", "G{i}", "G{i} = {w}"),
    _place("type of a number", "G{i} = {v}", "G{i}", "G{i} = float({w})", "G{i} = True"),
    _place("cell", "", "c{i}", "cell(inner, 'c{i}').cell_contents = {w}", cell=True),
    _place("keyword", "", "k{i}", "inner.__kwdefaults__['k{i}'] = {w}", keyword=True),
    _place("list", "L{i} = [{v}, 7]", "L{i}[0]", "L{i}[0] = {w}", "L{i} = [{w}]",
           "L{i}.insert(0, {w})"),
    _place("length", "L{i} = [0] * {v}", "len(L{i})", "L{i}.append(1)", "L{i}.pop()"),
    _place("dict", "D{i} = {{'a': {{'b': {v}}}}}", "D{i}['a']['b']", "D{i}['a']['b'] = {w}",
           "D{i}['a'] = {{'b': {w}}}", "D{i} = {{'a': {{'b': {w}}}}}"),
    _place("values of a dict", "D{i} = {{1: {v}}}", "sum(D{i}.values())", "D{i}[1] = {w}",
           "D{i}[2] = {w}", "D{i}.clear(); D{i}[3] = {w}"),
    _place("key of a dict", "D{i} = {{'x': 1}}", "({v} if 'y' in D{i} else 2)", "D{i}['y'] = 1",
           "D{i}.clear()"),
    _place("generator", "L{i} = [{v}, 1]", "sum(x * x for x in L{i})", "L{i}[1] = {w}"),
    _place("set", "S{i} = {{{v}}}", "max(S{i})", "S{i}.add({w} + 9)", "S{i} = {{{w}}}"),
    _place("deque", "S{i} = collections.deque([{v}])", "S{i}[0]", "S{i}.appendleft({w})"),
    _place("defaultdict", "D{i} = collections.defaultdict(lambda: {v})", "D{i}.default_factory()",
           "D{i}.default_factory = lambda: {w}"),
    _place("array of numpy", "N{i} = np.array([{v}, 2.0])", "float(N{i}[0])", "N{i}[0] = {w}",
           "N{i} = np.array([{w}])"),
    _place("large array of numpy", "N{i} = np.full(5000, {v})", "float(N{i}[0])", "N{i}[:] = {w}"),
    _place("named tuple", "P{i} = Pair({v}, [{v}])", "P{i}.x + P{i}.y[0]", "P{i} = Pair({w}, [1])",
           "P{i}.y[0] = {w}"),
    _place("length by a method", "L{i} = [0] * {v}\nl{i} = L{i}.__len__", "l{i}()",
           "L{i}.append(1)"),
    _place("getter", "D{i} = {{'a': {v}}}\ng{i} = D{i}.get", "g{i}('a', 3)", "D{i}['a'] = {w}",
           "D{i}.clear()"),
    _place("arguments", "L{i}, D{i} = [{v}], {{'b': 2}}\ndef f{i}(a, b): return a + b",
           "f{i}(*L{i}, **D{i})", "L{i}[0] = {w}", "D{i}['b'] = {w}"),
    _place("reduced", "L{i} = [{v}, 2]", "functools.reduce(lambda a, b: a + 2 * b, L{i})",
           "L{i}[1] = {w}", "L{i}.reverse()"),
    _place("mapped", "L{i}, n{i} = [1, 2], {v}", "sum(map(lambda x: x * n{i}, L{i}))",
           "n{i} = {w}"),
    _place("absent", "", "(lambda: G{i} if 'G{i}' in NAMES else {v})()",
           "G{i} = {w}; NAMES.add('G{i}')", "NAMES.discard('G{i}')"),
    _place("bytes", "B{i} = bytearray([{v}])", "B{i}[0]", "B{i}[0] = {w}",
           "B{i} = bytearray([{w}])"),
    _place("environment", "os.environ['CHANGING_{i}'] = '{v}'", "int(os.environ['CHANGING_{i}'])",
           "os.environ['CHANGING_{i}'] = '{w}'"),
    _place("environment by a function", "os.environ['CHANGING_{i}'] = '{v}'",
           "int(os.getenv('CHANGING_{i}'))", "os.environ['CHANGING_{i}'] = '{w}'"),
    _place("text", "T{i} = '{v}'", "int(T{i})", "T{i} = '{w}'"),
    _place("flag", "F{i} = False", "({v} if F{i} else 1)", "F{i} = not F{i}", "F{i} = '{w}'"),
)  # fmt: skip
OBJECTS = (
    _place("attribute", "o{i} = bag(bag({v}))", "o{i}.x.x", "o{i}.x.x = {w}", "o{i}.x = bag({w})",
           "o{i} = bag(bag({w}))"),
    _place("attribute of what is handed on", "o{i} = bag({v})", "peek(o{i})", "o{i}.x = {w}"),
    _place("attribute by a text", "o{i} = bag({v})", "named(o{i}, 'x')", "o{i}.x = {w}"),
    _place("attribute that may be absent", "o{i} = Bag()", "getattr(o{i}, 'x', {v})",
           "o{i}.x = {w}", "vars(o{i}).pop('x', 0)"),
    _place("attribute of a class", "class C{i}: x = {v}\no{i} = C{i}()", "peek(o{i})",
           "C{i}.x = {w}", "o{i}.x = {w}"),
    _place("property", "class C{i}:\n @property\n def x(self): return {v}\no{i} = C{i}()",
           "o{i}.x", "C{i}.x = property(lambda self: {w})"),
    _place("method", "class C{i}:\n def x(self): return {v}\no{i} = C{i}()", "o{i}.x()",
           "C{i}.x = lambda self: {w}", "o{i}.x = lambda: {w}"),
    _place("call", "class C{i}:\n def __call__(self): return self.x\no{i} = bag({v}, C{i})",
           "o{i}()", "o{i}.x = {w}", "C{i}.__call__ = lambda self: {w}"),
    _place("item",
           "class C{i}:\n def __getitem__(self, n): return self.x + n\no{i} = bag({v}, C{i})",
           "o{i}[1]", "o{i}.x = {w}", "C{i}.__getitem__ = lambda self, n: {w}"),
    _place("slot", "o{i} = bag({v}, Slots)", "peek(o{i})", "o{i}.x = {w}"),
    _place("private slot", "o{i} = Private({v})", "looked(o{i})", "o{i}.set({w})"),
    _place("dataclass", "C{i} = dataclasses.make_dataclass('C{i}', ['x'])\no{i} = C{i}({v})",
           "peek(o{i})", "o{i}.x = {w}", "o{i} = C{i}({w})"),
    _place("namespace", "o{i} = types.SimpleNamespace(x={v})", "peek(o{i})", "o{i}.x = {w}"),
    _place("member", "Kind.ONE.x, Kind.TWO.x = {v}, 2\nE{i} = [Kind.ONE]", "peek(E{i}[0])",
           "Kind.ONE.x = {w}", "E{i}[0] = Kind.TWO"),
    _place("number with an attribute", "m{i} = Marked(2)\nm{i}.x = {v}\nM{i} = [m{i}]",
           "peek(M{i}[0])", "m{i}.x = {w}"),
    _place("module", "m{i} = types.ModuleType('m{i}')\nm{i}.x = {v}", "m{i}.x", "m{i}.x = {w}"),
    _place("hidden in C", "class C{i}(set): pass\no{i} = C{i}([{v}])", "max(o{i})",
           "o{i}.add({w} + 9)"),
    _place("named by a getter", "o{i} = bag({v})\ng{i} = operator.attrgetter('x')", "g{i}(o{i})",
           "o{i}.x = {w}"),
    _place("made by __getattr__",
           "class C{i}:\n def __getattr__(self, name): return self.d[name]\n"
           "o{i} = C{i}()\no{i}.d = {{'x': {v}}}", "o{i}.x", "o{i}.d['x'] = {w}", "o{i}.x = {w}"),
    _place("computed once",
           "class C{i}:\n @functools.cached_property\n def x(self): return {v}\no{i} = C{i}()",
           "peek(o{i})", "vars(o{i})['x'] = {w}", "vars(o{i}).pop('x', 0)"),
    _place("ancestor", "class B{i}: x = {v}\nclass C{i}(B{i}): pass\no{i} = C{i}()", "peek(o{i})",
           "B{i}.x = {w}", "C{i}.x = {w}"),
    _place("class of an object",
           "class B{i}: x = {v}\nclass C{i}: x = 1\no{i} = C{i}()", "o{i}.x",
           "o{i}.__class__ = B{i}", "o{i}.__class__ = C{i}", "C{i}.x = {w}"),
    _place("super",
           "class B{i}:\n def x(self): return self.n\n"
           "class C{i}(B{i}):\n def y(self): return super().x()\no{i} = C{i}()\no{i}.n = {v}",
           "o{i}.y()", "o{i}.n = {w}", "B{i}.x = lambda self: {w}"),
    _place("list with an attribute", "class C{i}(list): pass\no{i} = C{i}([1])\no{i}.x = {v}",
           "o{i}[0] + o{i}.x", "o{i}.x = {w}", "o{i}[0] = {w}"),
    _place("attributes as a dict", "o{i} = bag({v})", "o{i}.__dict__['x']", "o{i}.x = {w}"),
    _place("mode of a module", "m{i} = torch.nn.Linear(1, 1)", "({v} if m{i}.training else 1)",
           "m{i}.train(not m{i}.training)"),
)  # fmt: skip
FUNCTIONS = (
    _place("global of a helper", "W{i} = {v}\ndef f{i}(): return W{i}", "f{i}()", "W{i} = {w}",
           "f{i} = lambda: {w}", "f{i}.__code__ = (lambda: {w}).__code__"),
    _place("default of a helper", "def f{i}(x={v}): return x", "f{i}()",
           "f{i}.__defaults__ = ({w},)"),
    _place("keyword of a helper", "def f{i}(*, x={v}): return x", "f{i}()",
           "f{i}.__kwdefaults__ = {{'x': {w}}}", "f{i}.__kwdefaults__['x'] = {w}"),
    _place("cell of a helper", "def g{i}(x):\n return lambda: x\nf{i} = g{i}({v})", "f{i}()",
           "cell(f{i}, 'x').cell_contents = {w}", "f{i} = g{i}({w})"),
    _place("behind a decorator",
           "def g{i}(f):\n @functools.wraps(f)\n def w(): return f() + 1\n return w\n"
           "W{i} = {v}\n@g{i}\ndef f{i}(): return W{i}", "f{i}()", "W{i} = {w}"),
    _place("partial", "f{i} = functools.partial(lambda a, b: a + b, {v}, b=1)", "f{i}()",
           "f{i}.keywords['b'] = {w}", "f{i} = functools.partial(lambda b: b, b={w})"),
    _place("kind of partial",
           "class C{i}(functools.partial): pass\nf{i} = C{i}(lambda b: b, b={v})", "f{i}()",
           "f{i}.keywords['b'] = {w}"),
    _place("attribute of a function", "def f{i}(): pass\nf{i}.x = {v}", "f{i}.x", "f{i}.x = {w}"),
    _place("attribute of a function handed on", "def f{i}(): pass\nf{i}.x = {v}", "applied(f{i})",
           "f{i}.x = {w}"),
    _place("function in a list", "L{i} = [lambda: {v}]", "L{i}[0]()", "L{i}[0] = lambda: {w}"),
    _place("name of a builtin", "", "abs(-{v})", "abs = lambda x: {w} + 2",
           "builtins.abs = lambda x: {w}"),
    _place("name of a builtin in a helper", "def f{i}(): return round({v})", "f{i}()",
           "builtins.round = lambda x: {w}"),
)  # fmt: skip
TENSORS = (
    _place("tensor", "t{i} = torch.full((8,), {v}.0)", "t{i}[h]", "t{i}.fill_({w})",
           "t{i} = torch.full((9,), {w}.0)", "t{i}.data = torch.full((9,), {w}).half()",
           "t{i} = torch.full((8,), {w})", "t{i}[:] = {w}", "t{i}.resize_(4).fill_({w})"),
    _place("tensor without dimensions", "t{i} = torch.tensor({v})", "t{i}", "t{i} = {w}",
           "t{i} = torch.tensor({w}.0)", "t{i} = torch.tensor({w})"),
    _place("number in a tensor", "t{i} = torch.tensor({v})", "t{i}", "t{i}.fill_({w})"),
    _place("element of tensors", "t{i} = [torch.full((8,), {v}), TABLE]", "t{i}[0][h]",
           "t{i}[0] = torch.full((8,), {w}).float()", "t{i}.reverse()", "t{i}[0].fill_({w})"),
    _place("size", "t{i} = torch.zeros({v}, 2)", "t{i}.shape[0]", "t{i} = torch.zeros({w}, 2)",
           "t{i}.resize_({w}, 2)", "t{i}.data = torch.zeros({w}, 2)"),
    _place("stride", "t{i} = torch.zeros(3, {v})", "t{i}.stride(0)", "t{i} = torch.zeros(3, {w})"),
    _place("row by row", "t{i} = torch.full(({v}, 8), 2)", "sum(row[h] for row in t{i})",
           "t{i} = torch.full(({w}, 8), 2)", "t{i}.fill_({w})"),
    _place("dtype", "t{i} = torch.ones(8)", "({v} if t{i}.dtype == torch.float32 else t{i}[h])",
           "t{i} = torch.ones(8).half() * {w}", "t{i}.data = torch.ones(8).double()",
           "t{i} = torch.ones(8)"),
    _place("dtype by name", "d{i} = torch.float16", "(kv_idx / 3).to(d{i}) * {v}",
           "d{i} = torch.bfloat16", "d{i} = torch.float32"),
    _place("operation", "f{i} = torch.sin", "f{i}(kv_idx.float() / {v})", "f{i} = torch.cos",
           "f{i} = lambda x: x * {w}"),
    _place("operation by a text", "n{i} = 'sin'", "getattr(torch, n{i})(kv_idx.float() / {v})",
           "n{i} = 'cos'", "n{i} = 'sin'"),
    _place("attribute of a tensor", "t{i} = torch.ones(8)\nt{i}.x = {v}", "t{i}[h] * t{i}.x",
           "t{i}.x = {w}", "t{i}.x = torch.tensor({w}.0)"),
    _place("attribute of a parameter handed on",
           "t{i} = torch.nn.Parameter(torch.ones(8))\nt{i}.x = {v}", "t{i}[h] * peek(t{i})",
           "t{i}.x = {w}"),
    _place("attribute that a tensor gets", "t{i} = torch.ones(8)",
           "(t{i}.x if hasattr(t{i}, 'x') else {v})", "t{i}.x = {w}", "vars(t{i}).clear()"),
    _place("attribute before a method", "t{i} = torch.ones(3)", "t{i}.sum()",
           "t{i}.sum = lambda: {w}"),
    _place("requires_grad", "t{i} = torch.ones(8)", "({v} if t{i}.requires_grad else t{i}[h] * 2)",
           "t{i}.requires_grad_(not t{i}.requires_grad)"),
    _place("grad", "t{i} = torch.ones(8, requires_grad=True)", "({v} if t{i}.grad is None else 1)",
           "t{i}.grad = None if t{i}.grad is not None else torch.ones(8)"),
    _place("weight", "m{i} = torch.nn.Linear(1, 1)", "m{i}(torch.ones(1))[0]",
           "m{i}.weight.data.fill_({w})", "m{i}.bias = torch.nn.Parameter(torch.ones(1) * {w})",
           "m{i}.register_forward_hook(lambda m, a, out: out * {w})",
           "m{i}.forward = lambda x: x * {w}"),
)  # fmt: skip
SWITCHES = (
    _place("default dtype", "", "torch.log(kv_idx + {v})",
           "torch.set_default_dtype(torch.bfloat16)", "torch.set_default_dtype(torch.float16)",
           "torch.set_default_dtype(torch.float32)"),
    _place("default dtype of a quotient", "", "(kv_idx + 1) / {v}",
           "torch.set_default_dtype(torch.bfloat16)", "torch.set_default_dtype(torch.float32)"),
    _place("grad mode", "", "({v} if torch.is_grad_enabled() else 1)",
           "torch.set_grad_enabled(not torch.is_grad_enabled())"),
    _place("grad mode by another name", "", "({v} if learning() else 1)",
           "torch.set_grad_enabled(not torch.is_grad_enabled())"),
    _place("threads", "", "({v} if torch.get_num_threads() > 1 else 1)",
           "torch.set_num_threads(3 - min(torch.get_num_threads(), 2))"),
)  # fmt: skip
PLACES = (*NUMBERS, *OBJECTS, *FUNCTIONS, *TENSORS, *SWITCHES)
