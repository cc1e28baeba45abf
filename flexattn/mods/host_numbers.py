"""Captured numbers that note what Python computes of them, so that the host computes it again.

While a mod is traced, a captured number that may become an argument is a HostNumber: Python
computes with it by its own rules, and what follows from such numbers alone is a HostNumber too,
with the text of its computation. Where one meets a tensor, its text becomes an argument. Where
Python asks for its value (a branch, a length, a C function), the captured number is a constant.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map

from flexattn.mods.expr import Expr
from flexattn.mods.refusal import Refusal

HostProgram = Callable[[Sequence[int | float]], tuple[Any, ...]]

# What is computed at greater length is a constant: a text may double at every step of a loop.
_LONGEST = 400
_PLAIN = (int, float, bool)
PROMOTION = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
_UNDEFINED = (ArithmeticError, ValueError, TypeError)
_NAMES = {
    "abs": abs,
    "bool": bool,
    "float": float,
    "pow": pow,
    "round": round,
    "inf": math.inf,
    "nan": math.nan,
}
_NAMES |= {"min": min, "max": max, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc}
# Functions of `math` that Dynamo computes of numbers that may change.
MATHS = "acos", "asin", "atan", "cos", "cosh", "log2", "sin", "sinh", "sqrt", "tan", "tanh"
_NAMES |= {name: getattr(math, name) for name in MATHS}
_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "lshift": "<<", "rshift": ">>", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_PREFIXED = {"neg": "-", "pos": "+", "invert": "~"}
# Of each of Python's operators, by its method: its text, and the function that computes it.
_OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    **{
        name: (f"({{}} {sign} {{}})", getattr(operator, f"__{name}__"))
        for name, sign in (_BINARY | _COMPARISONS).items()
    },
    **{name: (f"({sign}{{}})", getattr(operator, name)) for name, sign in _PREFIXED.items()},
    **{
        fn.__name__: (f"{fn.__name__}({{}})", fn)
        for fn in (abs, math.floor, math.ceil, math.trunc)
    },
}
_ASKING: dict[str, Callable[..., Any]] = {
    "index": operator.index, "int": int, "float": float, "complex": complex, "str": str,
    "repr": repr, "format": format, "reduce_ex": lambda value, *how: value.__reduce_ex__(*how),
}  # fmt: skip
# Texts of operations on numbers, by the function that computes each.
TEXTS: dict[Callable[..., Any], str] = {
    **{fn: text for text, fn in _OPERATORS.values()},
    operator.abs: "abs({})",
    round: "round({})",
}
# Functions of torch that compute alike of a Python number and of a tensor without dimensions.
_ALIKE = set(
    (
        "add sub subtract mul multiply div divide true_divide truediv floor_divide floordiv "
        "remainder mod fmod pow lshift rshift and or xor eq ne lt le gt ge bitwise_and "
        "bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift where clamp clip "
        "clamp_min clamp_max masked_fill"
    ).split()
)
# Of these functions, what is no operand.
_OPTIONS = ("alpha", "rounding_mode")
_ALIKE |= {f"{side}{name}" for side in "ri" for name in _ALIKE}


@lru_cache(maxsize=1024)
def program(texts: tuple[str, ...]) -> HostProgram:
    """A function of a callable's scalars, `s` in these texts, that computes them."""
    found: HostProgram = eval(
        f"lambda s: ({''.join(f'{text}, ' for text in texts)})", dict(_NAMES)
    )
    return found


def scalars_of(text: str) -> frozenset[int]:
    """Indices of the captured scalars that a text reads."""
    return frozenset(map(int, re.findall(r"s\[(\d+)\]", text)))


def scalar_of(text: str) -> int | None:
    """The scalar that a text is, if it computes nothing."""
    found = re.fullmatch(r"s\[(\d+)\]", text)
    return None if found is None else int(found[1])


def host_values(
    texts: tuple[str, ...], kinds: tuple[type, ...], scalars: Sequence[int | float]
) -> tuple[int | float, ...] | None:
    """The numbers that texts of these types compute now.

    None where Python raises, or gives another type, or where torch would not take one.
    """
    try:
        found: tuple[int | float, ...] = program(texts)(scalars)
    except _UNDEFINED:
        return None
    if tuple(map(type, found)) != kinds:
        return None
    for each in found:
        if type(each) is int and not -(2**63) <= each < 2**63:
            return None
    return found


class Recording:
    """The uses that a trace makes of the host numbers that were given to it.

    arguments: the texts that met a tensor, with their present values. asked: the captured scalars
    whose values Python asked for. failed: a number was kept by its hash, as a cache of results
    does.
    """

    def __init__(self) -> None:
        self.arguments: dict[str, int | float] = {}
        self.asked: set[int] = set()
        self.failed = False
        self.device = torch.device("cpu")
        self._read: list[tuple[str, torch.Tensor]] = []

    def of(self, tensor: torch.Tensor) -> Expr | None:
        """The argument that a tensor in a graph is read for."""
        slots = list(self.arguments)
        for text, each in self._read:
            if each is tensor:
                dtype = "int64" if isinstance(self.arguments[text], int) else "float64"
                return Expr("scalar", dtype, (), slots.index(text))
        return None

    def tensor(self, number: HostNumber, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in place of a number, for operations with other tensors."""
        self.arguments[number.text] = number.value
        with no_dispatch():
            found = torch.zeros((), dtype=dtype, device=self.device)
        self._read.append((number.text, found))
        return found


class HostNumber:
    """An int or a float, as isinstance tells, that notes what is computed of it.

    It is none by its type: C code that would read its value unseen has to ask for it.
    """

    __slots__ = ("recording", "text", "value")
    __array_ufunc__ = None  # numpy leaves arithmetic to it
    __class__: Any = property(lambda self: type(self.value))

    def __init__(self, recording: Recording, text: str, value: int | float) -> None:
        self.recording, self.text, self.value = recording, text, value

    def asked(self) -> int | float:
        """Its value, which Python now knows."""
        self.recording.asked |= scalars_of(self.text)
        return self.value

    def __bool__(self) -> bool:
        return bool(self.asked())

    def __hash__(self) -> int:
        self.recording.failed = True
        raise Refusal("keeps a captured number by its hash")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.value, name)
        self.asked()
        return found

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        if modulo is None:
            return _computed("({} ** {})", pow, self, other)
        return _computed("pow({}, {}, {})", pow, self, other, modulo)

    def __round__(self, digits: int | None = None) -> Any:
        if digits is None:
            return _computed("round({})", round, self)
        return _computed("round({}, {})", round, self, digits)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*tree_map(_asked, args), **tree_map(_asked, kwargs or {}))


def _computed(pattern: str, compute: Callable[..., Any], *operands: Any) -> Any:
    """Python's result for host numbers and others; NotImplemented where one is no number."""
    numbers = [each for each in operands if type(each) is HostNumber]
    values = [each.value if type(each) is HostNumber else each for each in operands]
    if not all(isinstance(each, (*_PLAIN, complex)) for each in values):
        return NotImplemented
    value = compute(*values)
    text = ""
    if all(type(each) in _PLAIN for each in values):
        shown = [x.text if type(x) is HostNumber else f"({_shown(x)})" for x in operands]
        text = pattern.format(*shown)
    if text and len(text) <= _LONGEST and type(value) in (int, float):
        return HostNumber(numbers[0].recording, text, value)
    for number in numbers:
        number.asked()
    return value


def _shown(number: int | float) -> str:
    huge = isinstance(number, int) and number.bit_length() > _LONGEST
    return " " * _LONGEST if huge else repr(number)  # too long, before Python refuses its digits


def _asked(value: Any) -> Any:
    return value.asked() if type(value) is HostNumber else value


def _method(text: str, compute: Callable[..., Any], reflected: bool = False) -> Any:
    def method(self: HostNumber, *others: Any) -> Any:
        operands = (*others, self) if reflected else (self, *others)
        return _computed(text, compute, *operands)

    return method


def _asking(convert: Callable[..., Any]) -> Any:
    return lambda self, *given: convert(self.asked(), *given)


for _name, _operator in _OPERATORS.items():
    if _name != "pow":  # which may have a modulus
        setattr(HostNumber, f"__{_name}__", _method(*_operator))
    if _name in _BINARY:
        setattr(HostNumber, f"__r{_name}__", _method(*_operator, reflected=True))
for _name, _convert in _ASKING.items():
    setattr(HostNumber, f"__{_name}__", _asking(_convert))


def meets(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a function of torch is given a host number."""
    return any(map(_holds, args)) or any(map(_holds, kwargs.values()))


def _holds(value: Any) -> bool:
    kind = type(value)
    return kind is HostNumber or (kind in (list, tuple) and any(map(_holds, value)))


def given(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function of torch with tensors, or values, in place of host numbers."""
    name = str(getattr(func, "__name__", "")).strip("_")
    if name == "getitem":
        return (args[0], _indices(args[0], args[1])), {}
    operands = [*args, *(value for key, value in kwargs.items() if key not in _OPTIONS)]
    tensors = [each for each in operands if isinstance(each, torch.Tensor)]
    numbers = [each for each in operands if type(each) is HostNumber]
    power = name in ("pow", "ipow") and not any(each.is_floating_point() for each in tensors)
    if name not in _ALIKE or not tensors or not numbers or power:
        return tree_map(_asked, tuple(args)), tree_map(_asked, dict(kwargs))
    known = [x.value if type(x) is HostNumber else x for x in operands]
    weighed = [each for each in known if isinstance(each, (torch.Tensor, int, float))]
    _, dtype = elementwise_dtypes(*weighed, type_promotion_kind=PROMOTION)
    clamps = "cla" in name or "clip" in name

    def place(value: Any) -> Any:
        # torch.clamp takes two numbers or two tensors.
        if clamps and type(value) in (int, float):
            value = HostNumber(numbers[0].recording, f"({_shown(value)})", value)
        if type(value) is HostNumber:
            return value.recording.tensor(value, dtype)
        return value

    named = {k: (_asked if k in _OPTIONS else place)(value) for k, value in kwargs.items()}
    return tuple(map(place, args)), named


def _indices(x: torch.Tensor, position: Any) -> Any:
    """An index in which a host number reads a captured tensor where the kernel runs."""
    items = position if isinstance(position, tuple) else (position,)
    found: list[Any] = []
    for dim, item in enumerate(items):
        plain = all(
            type(each) in (int, slice, HostNumber)
            or (isinstance(each, torch.Tensor) and not each.dim() and each.dtype != torch.bool)
            for each in items[:dim]
        )
        if type(item) is HostNumber and isinstance(item.value, int) and plain and dim < x.dim():
            size = x.shape[dim]
            if -size <= item.value < size:
                item = item.recording.tensor(item, torch.int64)
        found.append(tree_map(_asked, item))
    return tuple(found) if isinstance(position, tuple) else found[0]
