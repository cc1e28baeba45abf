"""The binding of values to a kernel's arguments: by name, made when a launch is prepared."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flexattn.errors import ArgumentError
from flexattn.kernels.base.arguments import Argument
from flexattn.util.locks import Lru


class Binding(NamedTuple):
    """The arguments of a kernel in its order, and what a launch needs to fill them.

    fixed: a value for each, None where a launch gives it. given: (argument, place) of those, where
    the value at `place` of what a launch passes is for the argument with this number. passed: how
    many values a launch passes. boxes: of the arguments that are tensor descriptors, in order.
    """

    types: tuple[str, ...]
    fixed: tuple[Any, ...]
    given: tuple[tuple[int, int], ...]
    passed: int
    boxes: tuple[Any, ...] = ()


def bind_arguments(
    arguments: Sequence[Argument],
    fixed: Mapping[str, Any],
    given: Sequence[str],
    boxes: Mapping[str, Any] | None = None,
    spare: Collection[str] = (),
) -> Binding:
    """Find a value for every argument of a kernel.

    fixed: values that do not change, by name. given: the names of what each launch passes, in
    order. boxes: how the tensors of descriptors lie, by name. spare: names that this kernel may
    lack, since its call passes them for other kernels, or fixes here what it passes.
    Raises ArgumentError for an argument without a value, a value without an argument, and a name
    that two values have.
    """
    boxes, arguments = boxes or {}, tuple(arguments)
    key = (id(arguments), tuple(fixed), tuple(given), tuple(boxes), tuple(spare))
    known = _known.get(key)
    if known is None:
        # The arguments are kept, so that no others get their id while it is in a key.
        known = arguments, _match(arguments, *key[1:])
        _known.put(key, known)
    found = known[1]
    return Binding(
        found.types,
        tuple([fixed.get(name) for name in found.names]),
        found.given,
        len(given),
        tuple([boxes[name] for name in found.described]),
    )


class _Names(NamedTuple):
    """The part of a binding that names decide. described: the names of tensor descriptors."""

    names: tuple[str, ...]
    types: tuple[str, ...]
    given: tuple[tuple[int, int], ...]
    described: tuple[str, ...]


def _match(
    arguments: tuple[Argument, ...],
    fixed: tuple[str, ...],
    given: tuple[str, ...],
    boxes: tuple[str, ...],
    spare: tuple[str, ...],
) -> _Names:
    """The place of each argument's value, by name; raises as bind_arguments does."""
    names = [argument.name for argument in arguments]
    described = [argument.name for argument in arguments if argument.type[0] == "t"]
    _unique("the kernel's arguments", names)
    _unique("what a launch passes", given)
    missing = [name for name in names if name not in fixed and name not in given]
    missing += [f"the box of {name}" for name in described if name not in boxes]
    if missing:
        raise ArgumentError(
            f"nothing is given for {', '.join(missing)} of a kernel that takes {', '.join(names)}",
            "every argument of a kernel has a value of its name",
        )
    twice = [name for name in given if name in fixed]
    unknown = [name for name in (*fixed, *given) if name not in names] + twice
    unknown = [name for name in unknown if name not in spare]
    unknown += [f"the box of {name}" for name in boxes if name not in described]
    if unknown:
        raise ArgumentError(
            f"{', '.join(unknown)} for a kernel that takes {', '.join(names)}",
            "every value is that of one argument, which a launch gives or which is fixed",
        )
    places = {name: place for place, name in enumerate(given)}
    return _Names(
        tuple(names),
        tuple(argument.type for argument in arguments),
        tuple((i, places[name]) for i, name in enumerate(names) if name not in fixed),
        tuple(described),
    )


# By the arguments' id and the other names: each bucket of a growing cache binds them anew.
_known: Lru[tuple[Any, ...], tuple[tuple[Argument, ...], _Names]] = Lru(1024)


def strides(prefix: str, axes: str, tensor: Tensor) -> dict[str, int]:
    """A tensor's first strides, by the prefix with a letter of `axes` for each.

    They are 0 where a dimension has one element, whatever torch keeps there.
    """
    steps = zip(axes, tensor.shape, tensor.stride(), strict=False)
    return {f"{prefix}{axis}": 0 if n == 1 else step for axis, n, step in steps}


def _unique(what: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ArgumentError(
            f"{', '.join(twice)} twice among {what}", "a name is that of one value"
        )
