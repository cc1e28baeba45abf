"""Tensors that come again: what a launch depends on beside their contents, read once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexattn.problem.facts import facts_of

# Pairs that are known at once: the caches of a model's layers, lengths and tables of its batches.
_KNOWN = 256


@dataclass(frozen=True, slots=True)
class Seen:
    """Two tensors, not kept alive, and their facts."""

    first: Callable[[], Tensor | None]
    second: Callable[[], Tensor | None]
    facts: tuple[Any, ...]


def _nothing() -> None:
    """In the place of a weak reference to a tensor that was not given."""


NOTHING = Seen(_nothing, _nothing, ())


def see(known: dict[int, Seen], first: Tensor, second: Tensor | None) -> Seen:
    """What is known of two tensors, by the first one's id; read now where it is nothing."""
    found = known.get(id(first))
    if found is None or found.first() is not first or found.second() is not second:
        if len(known) >= _KNOWN:
            known.clear()
        if second is None:
            found = Seen(weakref.ref(first), _nothing, facts(first))
        else:
            both = facts(first) + facts(second)
            found = Seen(weakref.ref(first), weakref.ref(second), both)
        known[id(first)] = found
    return found


def facts(tensor: Tensor) -> tuple[Any, ...]:
    """All that admission looks at."""
    learned = tensor.requires_grad and torch.is_grad_enabled()
    return (*facts_of(tensor), tensor.device, learned)
