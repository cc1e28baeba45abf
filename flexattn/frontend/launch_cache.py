"""The launch cache: launches by the calls that they served, and by what decides them.

A call is found by its key: its facts, and which objects its mods and its mask are. Of few query
rows the number of keys counts to the next power of two, as a cache grows by a token a step. An
entry has guards: names that the mods read, compared one by one, which takes a few microseconds.
What differs from all entries, or cannot be compared, is admitted and planned. A plan, of either
direction, then finds its launch by the facts and by what the mods and the mask mean.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import BlockMask

from flexattn.frontend.call import PLAIN, Call, bind_on, is_traced
from flexattn.kernels.choose.options import Options
from flexattn.mods import Bound, Guards, watch
from flexattn.problem import checks
from flexattn.problem.facts import TensorFacts, facts_of
from flexattn.problem.inputs import NO_DESCALES
from flexattn.problem.mask_lists import (
    UNKNOWN,
    known_class,
    known_runs,
    list_form,
    query_lists,
    unwritten,
    versions,
)
from flexattn.records.store import generation
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.launch import ForwardLaunch, Launch, Lists, Outputs, launches, prepare_launch
from flexattn.settings import Settings, current
from flexattn.util.locks import Lru

if TYPE_CHECKING:
    from flexattn.frontend.autograd import GradCall

# What calls have in common that one entry may serve; and what tells their launches apart.
CallKey = tuple[tuple[Any, ...], tuple[Any, ...]]
_L = TypeVar("_L")
# Entries of one key: with gradients and without, and where no launch serves another length.
_ENTRIES = 16
# Launches of one entry, one for each number of keys.
_LENGTHS = 1024
# One question for all devices, cheaper than asking about one.
_any_autocast = torch._C._is_any_autocast_enabled
# What a launch depends on in a BlockMask.
parts_of: Callable[[Any], tuple[Any, ...]] = attrgetter(
    "mask_mod", "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "BLOCK_SIZE", "seq_lengths",
)  # fmt: skip


class LaunchCache:
    """Launches by key of their calls, with guards, and by all that decides them, without."""

    def __init__(self) -> None:
        self._calls: Lru[tuple[Any, ...], tuple[CachedCall, ...]] = Lru(1024)

    def find(self, key: CallKey | None, given: Call) -> tuple[CachedCall, ForwardLaunch] | None:
        """The entry and the launch of a call; None if none is known."""
        if key is None:
            return None
        call, length = key
        try:
            entries = self._calls.get(call)
        except TypeError:  # an argument that no key can hold: the long way says what is wrong
            return None
        if entries is None:
            return None
        wants_grad = torch.is_grad_enabled() and _requires_grad(entries[0], given)
        for entry in entries:
            known, launch = entry.last
            if known != length:
                launch = entry.launches.get(length)
            if launch is None and not entry.grows:
                continue
            if (entry.grads is not None) == wants_grad and entry.holds(given):
                launch = launch or entry.grown(length, given)
                return None if launch is None else (entry, launch)
        return None

    def keep(self, key: CallKey, entry: CachedCall, mod: Any) -> None:
        """Add an entry, in place of those that no longer serve its call."""
        call, length = key
        others = [
            each
            for each in self._calls.get(call) or ()
            # Whether gradients are wanted is asked of one: none may watch what is no longer read.
            if not each.replaced_by(entry, length)
            and (each.score is None or each.score.holds(mod))
        ]
        self._calls.put(call, (entry, *others)[:_ENTRIES])

    def expiring(self, key: CallKey, used: Any) -> weakref.ref[Any]:
        """A reference to a mod or a mask, whose end drops the entries that hold its tensors."""
        call, _ = key
        return weakref.ref(used, lambda _: self._calls.discard(call))

    def prepared(self, key: tuple[Any, ...], make: Callable[[], _L]) -> _L:
        """The value of a key, made if there is none. Settings and records are part of the key."""
        settings = current()
        places = settings.mode, settings.cache, settings.cache_dir, settings.batch_invariant
        key = (*key, places, generation())
        found = launches.get(key)
        if found is None:
            found = make()
            launches.put(key, found)
        return found

    def launches(self) -> list[Any]:
        """All launches of calls and of gradients that are held."""
        return [found for _, found in launches.items() if isinstance(found, Launch)]

    def clear(self) -> None:
        """Forget all launches; kernels stay built."""
        self._calls.clear()
        launches.clear()


launch_cache = LaunchCache()


def call_key(given: Call) -> CallKey | None:
    """The key of a call as it was given; None where nothing tells it from others."""
    scale, mask = given.scale, given.block_mask
    try:
        if scale is not None and type(scale) is not float:
            scale = checks.number(scale)
            if scale is None:
                return None
        shared, length = given.facts()
        masked: Any = list_form(mask) or id(mask)
        if length and mask is not None and type(masked) is int:
            # Each length has a mask of its own, of the same lists.
            masked = type(mask), id(mask.mask_mod), id(mask.kv_indices)
        return (shared, id(given.score_mod), masked, scale), length
    # Tensors without strides, sizes of torch.jit: the long way says what is wrong.
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None


def as_given(given: Call, call: Call) -> bool:
    """True if an admitted call has the tensors and dropout as given, to which its key belongs.

    Autocast makes other tensors, sinks with gaps are copied, and a dropout_p may round to 0.
    """
    same = given.dropout_p == call.dropout_p
    return same and all(map(is_, call.tensors, given.tensors))


def remember(
    key: CallKey | None,
    given: Call,
    call: Call,
    launch: ForwardLaunch,
    lists: Lists | None,
    rest: tuple[Any, ...],
    grads: GradCall | None = None,
) -> None:
    """Keep how a call was served, if a later one can be told to be the same.

    call: as it was admitted. lists: of its mask. rest: the launch's. grads: of one with gradients.
    """
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
        score = ModGuard(launch_cache.expiring(key, given.score_mod), guard)
    if given.block_mask is not None:
        mask = _guard_of_mask(given.block_mask, call, lists, key)
        if mask is None:
            return
    structure, settings = launch.problem.structure, current()
    # So few rows decode whatever the number of keys is. Runs are another mask's at each length.
    listed = (given.block_mask is None) == (structure.sparsity is None) and not launch.runs
    descaled = call.descales is not NO_DESCALES
    decodes = bool(key[1]) and structure.kind == "decode" and listed
    decodes = decodes and not isinstance(mask, ModGuard)
    entry = CachedCall(
        {key[1]: launch}, (key[1], launch), launch, decodes and grads is None and not descaled,
        rest, call.scale, settings, generation(), score, mask, descaled,
        (call.score, call.mask) if settings.check else None, grads, call.options,
    )  # fmt: skip
    launch_cache.keep(key, entry, given.score_mod)


class ModGuard(NamedTuple):
    """A score_mod, or the mask_mod of masks of a form, and what tells that it is as it was."""

    mod: weakref.ref[Any]
    guards: Guards

    def holds(self, mod: Any) -> bool:
        """True if a mod is the one that was seen, and reads what it read."""
        same = self.mod() is mod
        return same and self.guards.hold(mod)


class MaskGuard(NamedTuple):
    """A BlockMask, its parts that a launch reads, and the same of its mask_mod.

    seen: its lists, each with what it was like when the launch was made: how often it had been
    written to where the launch reads runs. unchanged: whether they are so still.
    """

    mask: weakref.ref[Any]
    parts: tuple[Any, ...]
    seen: list[Any]
    unchanged: Callable[[list[Any]], bool]
    guards: Guards

    def holds(self, mask: Any) -> bool:
        """True if a mask is the one that was seen, and has what it had."""
        same = self.mask() is mask
        parts = parts_of(mask)
        same = same and all(map(is_, parts, self.parts)) and self.unchanged(self.seen)
        return same and self.guards.hold(parts[0])

    def grew(self, mask: Any, lengths: tuple[int, int]) -> bool:
        """True if a mask has the same lists and mask_mod, not copies, and is of these lengths."""
        *parts, block, sizes = parts_of(mask)
        same = all(map(is_, parts, self.parts)) and (block, sizes) == (self.parts[5], lengths)
        return same and self.unchanged(self.seen) and self.guards.hold(parts[0])


@dataclass(slots=True, eq=False)
class CachedCall:
    """The launches of a call, and the guards that decide whether another call is the same.

    launches: by the second part of keys; last: the last of them, with that part, which is compared
    in less time than it is looked up; latest: the one that was prepared last. grows: it
    decodes, and its launch goes on with other numbers of keys. rest: the launch's arguments after
    the scale. descaled: whether it has descales. checked: in checked mode, what its mods are
    bound to. grads: of a call with gradients.
    """

    launches: dict[tuple[Any, ...], ForwardLaunch]
    last: tuple[tuple[Any, ...] | None, ForwardLaunch | None]
    latest: ForwardLaunch
    grows: bool
    rest: tuple[Any, ...]
    scale: float
    settings: Settings
    generation: int
    score: ModGuard | None
    mask: MaskGuard | ModGuard | None
    descaled: bool
    checked: tuple[Bound | None, Bound | None] | None
    grads: GradCall | None
    options: Options

    def holds(self, given: Call) -> bool:
        """True if a call of the entry's key is served as the one that was seen."""
        if self.settings is not current() or self.generation != generation():
            return False
        # Within torch.func.jvp a tensor may have a tangent, which a launch would drop; what traces
        # a call, as make_fx does, sees no launch.
        if forward_ad._current_level >= 0 or is_traced():
            return False
        if _any_autocast() and _converts(self.latest.device.type, given):
            return False
        if self.grads is not None and not self.grads.holds():
            return False
        if self.score is not None and not self.score.holds(given.score_mod):
            return False
        if self.mask is None:
            return True
        if isinstance(self.mask, ModGuard):
            return self.mask.holds(given.block_mask.mask_mod)  # type: ignore[union-attr]
        if not self.grows:
            return self.mask.holds(given.block_mask)
        return self.mask.grew(given.block_mask, (given.q.shape[2], given.k.shape[2]))

    def grown(self, length: tuple[Any, ...], given: Call) -> ForwardLaunch | None:
        """The launch of a call that differs in its number of keys; None where it is another call.

        In most of a bucket the kernel and the grid are those of before, with other arguments.
        """
        keys, latest, mask = given.k.shape[2], self.latest, given.block_mask
        where, problem = latest.device.type, latest.problem
        if keys != given.v.shape[2] or not given.k.device.type == given.v.device.type == where:
            return None
        if mask is not None and known_class(mask) != problem.mask_class:
            return None
        both = [TensorFacts(*facts_of(x)) for x in (given.k, given.v)]
        layout = problem.structure.layout
        if layout.aligned and not all(each.aligned for each in both):
            return None
        if layout.near and not all(each.near for each in both):
            return None
        launch = latest.with_kv_len(keys, given.k, given.v)
        if launch is None:
            launch = self.latest = prepare_launch(
                replace(problem, kv_len=keys), latest.choice.device, latest.device, dispatcher(),
                self.options, given.q, given.k, given.v, None if mask is None else Lists.of(mask),
            )  # fmt: skip
        if len(self.launches) >= _LENGTHS:
            self.launches.clear()
        self.launches[length], self.last = launch, (length, launch)
        return launch

    def run(self, launch: ForwardLaunch, given: Call) -> Outputs:
        """The outputs of a call by one of the launches."""
        if self.checked is not None:
            score, mask = self.checked
            given._replace(score=score, mask=mask).check_reads()
        if self.grads is not None:
            return self.grads.attend(given.block_mask, given.q, given.k, given.v, given.sinks)
        descales = given.descales if self.descaled else NO_DESCALES
        rest = self.rest
        if isinstance(self.mask, ModGuard):
            rest = with_lists_of(given.block_mask, rest)
        return launch.run(given.q, given.k, given.v, self.scale, rest, given.sinks, descales)

    def replaced_by(self, other: CachedCall, length: tuple[Any, ...]) -> bool:
        """True if another entry, of a call of this length, serves in its place."""
        alike = (self.grads is None) == (other.grads is None)
        return alike and (length in self.launches or (self.grows and other.grows))


def with_lists_of(mask: Any, rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """A launch's arguments after the scale with the lists of another mask of one form."""
    lists = query_lists(mask)
    return lists + rest[len(lists) :]


def _guard_of_mask(
    block_mask: BlockMask, call: Call, listed: Lists | None, key: CallKey
) -> MaskGuard | ModGuard | None:
    """The guards of a plan's mask; None if it cannot be guarded."""
    parts, bound, look = parts_of(block_mask), call.mask, call.looks[1]
    if list_form(block_mask) is not None:
        assert bound is not None
        guard = watch(parts[0], "mask", bound, look)
        return ModGuard(launch_cache.expiring(key, parts[0]), guard) if guard else None
    lists = [each for each in parts[1:5] if each is not None]
    if call.block_mask is None:
        # It keeps everything: what its lists say was read, and the launch has none of them.
        bound, look = bind_on(parts[0], "mask", call.q)
        by_version = True
        fixed = not any(each.is_inference() for each in lists)
    else:
        by_version = known_runs(block_mask) is not None
        fixed = known_class(block_mask) not in (None, UNKNOWN)
        fixed = fixed and all(map(is_, (listed or ())[:4], parts[1:5]))
    assert bound is not None
    guard = watch(parts[0], "mask", bound, look)
    if guard is None or not fixed:
        return None
    reference = launch_cache.expiring(key, block_mask)
    if by_version:
        return MaskGuard(reference, parts, versions(lists), unwritten, guard)
    # Of lists that are read as they are only sizes count, which `.data = …` changes in place.
    shapes = [(each, each.shape, each.stride()) for each in lists]
    return MaskGuard(reference, parts, shapes, _as_large, guard)


def _as_large(seen: list[Any]) -> bool:
    return all([x.shape == shape and x.stride() == strides for x, shape, strides in seen])


def _converts(where: str, given: Call) -> bool:
    """True if autocast is on, and would convert an input."""
    if not torch.is_autocast_enabled(where):
        return False
    dtype = torch.get_autocast_dtype(where)
    return not given.q.dtype is given.k.dtype is given.v.dtype is dtype


def _requires_grad(entry: CachedCall, given: Call) -> bool:
    """True if an input, or a tensor that the score_mod captures, requires a gradient."""
    for tensor in given.tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return entry.score is not None and entry.score.guards.requires_grad()
