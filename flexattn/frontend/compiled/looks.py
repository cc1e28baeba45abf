"""What was found in the lists of a mask, for the calls of an op that are given the same lists."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.frontend.compiled.spec import Spec
from flexattn.problem.mask_class import keep_class, known_class, mask_class
from flexattn.problem.runs import keep_runs, known_runs
from flexattn.runtime.key_lists import BothLists, has_more_rows, keep_by_key, made_by_key
from flexattn.runtime.launch import Lists


@dataclass(slots=True)
class _Look:
    """What was found in lists, and how often they had been written to.

    by_key: the same lists by key, once a backward asked for them, and what they were made for.
    """

    lists: tuple[weakref.ref[Tensor], ...]
    written: tuple[tuple[int, int], ...]
    name: str
    runs: Tensor | None
    by_key: tuple[Any, Lists] | None = None


_looks: dict[int, _Look] = {}


def remember_look(mask: BlockMask, lists: Sequence[Tensor], said: Spec) -> None:
    """Give a mask the class and the runs of its lists, which reading them would take a wait.

    As with an eager call's mask one look serves for as long as the lists live, and what is written
    into them later leaves them without runs. Code that Inductor generates writes into memory that
    no version counts, and a captured CUDA graph into its inputs: such lists are not looked at. A
    backward cannot tell who made what it was saved: it takes what its forward saw, or nothing.
    """
    found = _known(lists) if said.looks else None
    if found is not None:
        keep_class(mask, found.name)
        if found.runs is not None and found.written == _written(lists):
            keep_runs(mask, found.runs)
    elif not said.looks or said.backward:
        keep_class(mask)
    else:
        mask_class(mask)
        name = known_class(mask)
        if name is not None:
            key = id(lists[0])
            first = weakref.ref(lists[0], lambda _: _looks.pop(key, None))
            rest = tuple(map(weakref.ref, lists[1:]))
            _looks[key] = _Look((first, *rest), _written(lists), name, known_runs(mask))


def remember_by_key(mask: BlockMask, lists: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Give a mask its lists by key: those that a graph has, or those kept with its look.

    given: nothing where nobody has made them. Kept are those of masks with runs, which given lists
    do not say, and those that nobody has made: once for all calls with the same lists by query.
    Given lists of a mask that was made shorter name rows that there are not: others are made.
    """
    found = _known(lists)
    if given and not has_more_rows(mask) and (known_runs(mask) is None or found is None):
        num, idx, *full = given
        keep_by_key(mask, Lists.made((num, idx, *(full or (None, None)))))
        return
    if found is None or any(x.is_inference() for x in lists):
        # Of lists that live as long as this call nothing is kept, and nobody waits for them.
        keep_by_key(mask, made_by_key(mask, Lists.of(mask)))
        return
    made_for = _written(lists), tuple(mask.seq_lengths), tuple(mask.BLOCK_SIZE)
    if found.by_key is not None and found.by_key[0] == made_for:
        keep_by_key(mask, found.by_key[1])
        return
    by_key = BothLists.of(mask).by_key
    # A captured graph writes its own each time it is replayed, into memory of its own.
    if not (lists[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        found.by_key = made_for, by_key


def _known(lists: Sequence[Tensor]) -> _Look | None:
    found = _looks.get(id(lists[0]))
    if found is None or len(found.lists) != len(lists):
        return None
    same = all(there() is x for there, x in zip(found.lists, lists, strict=True))
    return found if same else None


def _written(lists: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    # Tensors of inference mode do not count, and have no runs.
    return tuple((0 if x.is_inference() else x._version, x.data_ptr()) for x in lists)
