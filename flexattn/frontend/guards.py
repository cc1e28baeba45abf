"""A call like one before: its launch, found without looking at everything again.

The long way walks through the mods, checks the arguments and builds the Problem's key. Here a
call is compared with the last one of its shapes, name by name, which takes a few microseconds;
whatever differs, or cannot be compared, goes the long way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import is_
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention.flex_attention import BlockMask

from flexattn.frontend.admission import bind_on
from flexattn.frontend.autograd import attend
from flexattn.frontend.call import Call
from flexattn.frontend.plan import Plan
from flexattn.frontend.trained import Trained
from flexattn.frontend.transforms import in_forward_mode
from flexattn.kernels.choose.options import NONE, Options
from flexattn.mods import Bound, Witness, watch
from flexattn.problem import checks
from flexattn.problem.descales import NO_DESCALES
from flexattn.problem.facts import TensorFacts
from flexattn.problem.kind import FEW_ROWS
from flexattn.problem.mask_class import UNKNOWN, known_class
from flexattn.problem.runs import known_runs, unwritten, versions
from flexattn.records.key import rounded
from flexattn.records.store import generation
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.launch import Launch, Outputs, prepare_launch
from flexattn.settings import Settings, current
from flexattn.util.lru import Lru

# A tensor of another class may mean more than its memory: its calls are not remembered.
_PLAIN = frozenset((Tensor, Parameter, NoneType))
# One question for all devices, cheaper than asking about one.
_any_autocast = torch._C._is_any_autocast_enabled


class _Score(NamedTuple):
    """A score_mod, and what tells that it still is what it was."""

    mod: weakref.ref[Any]
    witness: Witness

    def holds(self, mod: Any) -> bool:
        same = self.mod() is mod
        return same and self.witness.holds(mod)


class _Mask(NamedTuple):
    """A BlockMask, its parts that a launch reads, and the same of its mask_mod.

    seen: its lists, each with what it was like when the launch was made: how often it had been
    written to where the launch reads runs. unchanged: whether they are so still.
    """

    mask: weakref.ref[Any]
    parts: tuple[Any, ...]
    seen: list[Any]
    unchanged: Callable[[list[Any]], bool]
    witness: Witness

    def holds(self, mask: Any) -> bool:
        same = self.mask() is mask
        parts = _parts(mask)
        same = same and all(map(is_, parts, self.parts)) and self.unchanged(self.seen)
        return same and self.witness.holds(parts[0])


@dataclass(frozen=True, slots=True)
class _Seen:
    """One call and what served it. where: its device's type. descaled: whether it has descales.

    checked: in checked mode, what its mods are bound to. trained: of a call with gradients.
    """

    launch: Launch
    where: str
    rest: tuple[Any, ...]
    scale: float
    settings: Settings
    generation: int
    score: _Score | None
    mask: _Mask | None
    descaled: bool
    checked: tuple[Bound | None, Bound | None] | None = None
    trained: Trained | None = None
    options: Options = NONE


# Of a key, the last call without gradients and the last one with them.
_seen: Lru[tuple[Any, ...], tuple[_Seen | None, _Seen | None]] = Lru(1024)
# Of a key without its number of keys, the last decode, of those without a mask or gradients.
_decoded: Lru[tuple[Any, ...], _Seen] = Lru(256)


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
    try:
        pair = None if key is None else _seen.get(key)
    except TypeError:  # an argument that no key can hold: the long way says what is wrong
        return None
    if pair is None:
        return _recall_grown(key, given)
    found = pair[torch.is_grad_enabled() and _wants_grad(pair, given)]
    return None if found is None or not _holds(found, given) else _served(found, given)


def _served(found: _Seen, given: Call) -> Outputs:
    if found.checked is not None:
        score, mask = found.checked
        given._replace(scale=found.scale, score=score, mask=mask).check_reads()
    if found.trained is not None:
        return attend(found.trained, given.block_mask, given.q, given.k, given.v, given.sinks)
    descales = given.descales if found.descaled else NO_DESCALES
    return found.launch.run(
        given.q, given.k, given.v, found.scale, found.rest, given.sinks, descales
    )


def _recall_grown(key: tuple[Any, ...] | None, given: Call) -> Outputs | None:
    """Serve a decode as the same one over fewer keys was: a cache grows with every token.

    The launch is made anew, which asks nothing of the mods.
    """
    if key is None or given.block_mask is not None or type(given.k) not in _PLAIN:
        return None
    found = _decoded.get(_without_length(key))
    if found is None or (torch.is_grad_enabled() and _wants_grad((found, None), given)):
        return None
    keys, (launch, k, v) = given.k.shape[2], (found.launch, given.k, given.v)
    # Of another power of two records may tell something else.
    alike = keys == v.shape[2] and rounded(keys) == rounded(launch.problem.kv_len)
    if not alike or not _holds(found, given):
        return None
    problem = replace(launch.problem, kv_len=keys)
    grown = prepare_launch(
        problem, launch.choice.device, launch.device, dispatcher(), found.options, given.q, k, v,
        None,
    )  # fmt: skip
    found = replace(found, launch=grown, score=_watching(found.score, _seen, key))
    _seen.put(key, (found, None))
    return _served(found, given)


def _without_length(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key of a call without a mask, but for how many keys it has and where they lie."""
    (q, k, v, *others), score, _, scale = key
    return (q, *map(_each_key, (k, v)), *others, score, scale)


def _each_key(facts: tuple[Any, ...]) -> tuple[Any, ...]:
    of = TensorFacts(*facts)
    sizes = (*of.shape[:2], *of.shape[3:])
    return of.kind, sizes, of.strides[3:], of.dtype, of.device, of.negated, of.aligned


def _holds(found: _Seen, given: Call) -> bool:
    if found.settings is not current() or found.generation != generation():
        return False
    # Within torch.func.jvp a tensor may have a tangent, which a launch would drop.
    if in_forward_mode() or (_any_autocast() and _converts(found.where, given)):
        return False
    if found.trained is not None and not found.trained.holds():
        return False
    return (found.score is None or found.score.holds(given.score_mod)) and (
        found.mask is None or found.mask.holds(given.block_mask)
    )


def _converts(where: str, given: Call) -> bool:
    """Whether autocast is on, and would convert an input."""
    if not torch.is_autocast_enabled(where):
        return False
    dtype = torch.get_autocast_dtype(where)
    return not given.q.dtype is given.k.dtype is given.v.dtype is dtype


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
    if key is None or call.dropout is not None or not _PLAIN.issuperset(map(type, call.tensors)):
        return
    score = mask = None
    if given.score_mod is not None:
        assert call.score is not None
        guard = watch(given.score_mod, "score", call.score, call.looks[0])
        if guard is None:
            return
        score = _Score(weakref.ref(given.score_mod, _forgetting(_seen, key)), guard)
    if block_mask is not None:
        mask = _mask_of(block_mask, plan, key)
        if mask is None:
            return
    launch = plan.launch
    where = launch.device.type
    settings = current()
    checked = (call.score, call.mask) if settings.check else None
    descaled = call.descales is not NO_DESCALES
    found = _Seen(
        launch, where, rest, call.scale, settings, generation(), score, mask, descaled, checked,
        trained, call.options,
    )  # fmt: skip
    plain = trained is None and mask is None and not descaled
    # So few rows decode whatever the number of keys is.
    if plain and launch.problem.structure.kind == "decode" and launch.problem.q_len <= FEW_ROWS:
        short = _without_length(key)
        _decoded.put(short, replace(found, score=_watching(score, _decoded, short)))
    # Whether gradients are wanted is asked of either, so neither may watch what is no longer read.
    other = (_seen.get(key) or (None, None))[trained is None]
    if other is not None and other.score is not None and not other.score.holds(given.score_mod):
        other = None
    _seen.put(key, (found, other) if trained is None else (other, found))


def _mask_of(block_mask: BlockMask, plan: Plan, key: tuple[Any, ...]) -> _Mask | None:
    """What tells that a mask still is what a plan was made for; None where nothing can."""
    parts, bound, look = _parts(block_mask), plan.call.mask, plan.call.looks[1]
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
    reference = weakref.ref(block_mask, _forgetting(_seen, key))
    if by_version:
        return _Mask(reference, parts, versions(lists), unwritten, guard)
    return _Mask(reference, parts, _shapes(lists), _as_large, guard)


def _watching(
    score: _Score | None, memory: Lru[tuple[Any, ...], Any], key: tuple[Any, ...]
) -> _Score | None:
    """The same score_mod, whose end drops another entry."""
    mod = None if score is None else score.mod()
    if score is None or mod is None:
        return score
    return score._replace(mod=weakref.ref(mod, _forgetting(memory, key)))


def _forgetting(
    memory: Lru[tuple[Any, ...], Any], key: tuple[Any, ...]
) -> Callable[[object], None]:
    """A weakref callback that drops a dead mod's or mask's entry, which holds captured tensors."""
    return lambda _: memory.discard(key)


def _parts(mask: BlockMask) -> tuple[Any, ...]:
    return (
        mask.mask_mod, mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks,
        mask.full_kv_indices, mask.BLOCK_SIZE, mask.seq_lengths,
    )  # fmt: skip


def _shapes(lists: list[Tensor]) -> list[Any]:
    """A mask's lists with their shapes and strides: `.data = …` changes them in place."""
    return [(each, each.shape, each.stride()) for each in lists]


def _as_large(seen: list[Any]) -> bool:
    return all([x.shape == shape and x.stride() == strides for x, shape, strides in seen])


def _wants_grad(pair: tuple[_Seen | None, _Seen | None], given: Call) -> bool:
    for tensor in given.tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    for found in pair:
        if found is not None and found.score is not None:
            return found.score.witness.requires_grad()
    return False
