"""A call like one before: its launch, found without looking at everything again.

The long way walks through the mods, checks the arguments and builds the Problem's key. Here a
call is compared with the last one of its shapes, name by name, which takes a few microseconds;
whatever differs, or cannot be compared, goes the long way.
"""

from __future__ import annotations

import weakref
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.frontend.admission import bind_on
from flexattn.frontend.call import Call
from flexattn.frontend.growing import grown, remember_decode
from flexattn.frontend.plan import Plan
from flexattn.frontend.remembered import (
    PLAIN,
    Remembered,
    RememberedMask,
    RememberedScore,
    any_requires_grad,
    forgetting,
    holds,
    parts_of,
    rerun,
)
from flexattn.frontend.trained import Trained
from flexattn.mods import watch
from flexattn.problem import checks
from flexattn.problem.descales import NO_DESCALES
from flexattn.problem.mask_class import UNKNOWN, known_class
from flexattn.problem.runs import known_runs, unwritten, versions
from flexattn.records.store import generation
from flexattn.runtime.launch import Outputs
from flexattn.settings import current
from flexattn.util.lru import Lru

# Of a key, the last call without gradients and the last one with them.
_seen: Lru[tuple[Any, ...], tuple[Remembered | None, Remembered | None]] = Lru(1024)


def guard_key(given: Call) -> tuple[Any, ...] | None:
    """What two calls have in common that the same launch may serve; None where nothing tells."""
    scale = given.scale
    try:
        if scale is not None and type(scale) is not float:
            scale = checks.number(scale)
            if scale is None:
                return None
        return given.facts(), id(given.score_mod), id(given.block_mask), scale
    # Tensors without strides: the long way says what is wrong.
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def recall(key: tuple[Any, ...] | None, given: Call) -> Outputs | None:
    """Serve a call as the same one was served before; None where that cannot be known."""
    if key is None:
        return None
    try:
        pair = _seen.get(key)
    except TypeError:  # an argument that no key can hold: the long way says what is wrong
        return None
    if pair is None:
        # torch.jit's sizes are tensors: the long way says so.
        longer = None if torch._C._is_tracing() else grown(key, given)
        if longer is None:
            return None
        _seen.put(key, (longer.expiring(_seen, key, given.score_mod, given.block_mask), None))
        return rerun(longer, given)
    found = pair[torch.is_grad_enabled() and any_requires_grad(pair, given)]
    return None if found is None or not holds(found, given) else rerun(found, given)


def as_given(given: Call, call: Call) -> bool:
    """Whether a call that was admitted has what was given, to which its key belongs.

    Autocast makes other tensors, sinks with gaps are copied, and a dropout_p may round to 0.
    """
    same = given.dropout_p == call.dropout_p
    return same and all(map(is_, call.tensors, given.tensors))


def remember(
    key: tuple[Any, ...] | None,
    given: Call,
    plan: Plan,
    rest: tuple[Any, ...],
    trained: Trained | None = None,
) -> None:
    """Keep how a call was served, if a later one can be told to be the same.

    rest: the launch's. trained: of a call with gradients.
    """
    call, block_mask = plan.call, given.block_mask
    # Of dropout every call has a seed of its own.
    if (
        key is None
        or call.dropout is not None
        or current().verify == "always"
        or not PLAIN.issuperset(map(type, call.tensors))
    ):
        return
    score = mask = None
    if given.score_mod is not None:
        assert call.score is not None
        guard = watch(given.score_mod, "score", call.score, call.looks[0])
        if guard is None:
            return
        score = RememberedScore(weakref.ref(given.score_mod, forgetting(_seen, key)), guard)
    if block_mask is not None:
        mask = _mask_of(block_mask, plan, key)
        if mask is None:
            return
    launch = plan.launch
    where = launch.device.type
    settings = current()
    checked = (call.score, call.mask) if settings.check else None
    descaled = call.descales is not NO_DESCALES
    found = Remembered(
        launch, where, rest, call.scale, settings, generation(), score, mask, descaled, checked,
        trained, call.options,
    )  # fmt: skip
    remember_decode(key, given, found)
    # Whether gradients are wanted is asked of either, so neither may watch what is no longer read.
    other = (_seen.get(key) or (None, None))[trained is None]
    if other is not None and other.score is not None and not other.score.holds(given.score_mod):
        other = None
    _seen.put(key, (found, other) if trained is None else (other, found))


def _mask_of(block_mask: BlockMask, plan: Plan, key: tuple[Any, ...]) -> RememberedMask | None:
    """What tells that a mask still is what a plan was made for; None where nothing can."""
    parts, bound, look = parts_of(block_mask), plan.call.mask, plan.call.looks[1]
    lists = [each for each in parts[1:5] if each is not None]
    if plan.call.block_mask is None:
        # It keeps everything: what its lists say was read, and the launch has none of them.
        bound, look = bind_on(parts[0], "mask", plan.call.q)
        by_version = True
        fixed = not any(each.is_inference() for each in lists)
    else:
        by_version = known_runs(block_mask) is not None
        fixed = known_class(block_mask) not in (None, UNKNOWN)
        fixed = fixed and all(map(is_, (plan.lists or ())[:4], parts[1:5]))
    assert bound is not None
    guard = watch(parts[0], "mask", bound, look)
    if guard is None or not fixed:
        return None
    reference = weakref.ref(block_mask, forgetting(_seen, key))
    if by_version:
        return RememberedMask(reference, parts, versions(lists), unwritten, guard)
    return RememberedMask(reference, parts, _shapes(lists), _as_large, guard)


def _shapes(lists: list[Tensor]) -> list[Any]:
    """A mask's lists with their shapes and strides: `.data = …` changes them in place."""
    return [(each, each.shape, each.stride()) for each in lists]


def _as_large(seen: list[Any]) -> bool:
    return all([x.shape == shape and x.stride() == strides for x, shape, strides in seen])
