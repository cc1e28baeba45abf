"""Remembered: a call and what served it, and whether another call is the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter, is_
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import Parameter

from flexattn.frontend.autograd import attend
from flexattn.frontend.call import Call
from flexattn.frontend.trained import Trained
from flexattn.frontend.transforms import in_forward_mode
from flexattn.kernels.choose.options import NONE, Options
from flexattn.mods import Bound, Witness
from flexattn.problem.descales import NO_DESCALES
from flexattn.records.store import generation
from flexattn.runtime.launch import Launch, Outputs
from flexattn.settings import Settings, current
from flexattn.util.lru import Lru

# A tensor of another class may mean more than its memory: its calls are not remembered.
PLAIN = frozenset((Tensor, Parameter, NoneType))
# One question for all devices, cheaper than asking about one.
_any_autocast = torch._C._is_any_autocast_enabled


class RememberedScore(NamedTuple):
    """A score_mod, and what tells that it still is what it was."""

    mod: weakref.ref[Any]
    witness: Witness

    def holds(self, mod: Any) -> bool:
        same = self.mod() is mod
        return same and self.witness.holds(mod)


class RememberedMask(NamedTuple):
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
        parts = parts_of(mask)
        same = same and all(map(is_, parts, self.parts)) and self.unchanged(self.seen)
        return same and self.witness.holds(parts[0])

    def grew(self, mask: Any, lengths: tuple[int, int]) -> bool:
        """Whether a mask has the same lists and mask_mod, and is of these lengths."""
        *parts, block, sizes = parts_of(mask)
        same = all(map(is_, parts, self.parts)) and (block, sizes) == (self.parts[5], lengths)
        return same and self.unchanged(self.seen) and self.witness.holds(parts[0])


@dataclass(frozen=True, slots=True)
class Remembered:
    """One call and what served it. where: its device's type. descaled: whether it has descales.

    checked: in checked mode, what its mods are bound to. trained: of a call with gradients.
    """

    launch: Launch
    where: str
    rest: tuple[Any, ...]
    scale: float
    settings: Settings
    generation: int
    score: RememberedScore | None
    mask: RememberedMask | None
    descaled: bool
    checked: tuple[Bound | None, Bound | None] | None = None
    trained: Trained | None = None
    options: Options = NONE

    def expiring(
        self, memory: Lru[tuple[Any, ...], Any], key: tuple[Any, ...], mod: Any, mask: Any
    ) -> Remembered:
        """The same for a memory that drops its entry when the score_mod or the mask is freed."""
        score, its = self.score, self.mask
        if score is None and its is None:
            return self
        gone = forgetting(memory, key)
        if score is not None:
            score = score._replace(mod=weakref.ref(mod, gone))
        if its is not None:
            its = its._replace(mask=weakref.ref(mask, gone))
        return replace(self, score=score, mask=its)


def rerun(found: Remembered, given: Call) -> Outputs:
    """What a call gives by what served the same one before."""
    if found.checked is not None:
        score, mask = found.checked
        given._replace(scale=found.scale, score=score, mask=mask).check_reads()
    if found.trained is not None:
        return attend(found.trained, given.block_mask, given.q, given.k, given.v, given.sinks)
    descales = given.descales if found.descaled else NO_DESCALES
    return found.launch.run(
        given.q, given.k, given.v, found.scale, found.rest, given.sinks, descales
    )


def holds(found: Remembered, given: Call, keys: int | None = None) -> bool:
    """Whether a call is the one that was seen; keys: how many it has, where it may have more."""
    if found.settings is not current() or found.generation != generation():
        return False
    # Within torch.func.jvp a tensor may have a tangent, which a launch would drop; what traces a
    # call, as make_fx does, sees no launch.
    if in_forward_mode() or get_proxy_mode() is not None:
        return False
    if _any_autocast() and _converts(found.where, given):
        return False
    if found.trained is not None and not found.trained.holds():
        return False
    if found.score is not None and not found.score.holds(given.score_mod):
        return False
    if found.mask is None or keys is None:
        return found.mask is None or found.mask.holds(given.block_mask)
    return found.mask.grew(given.block_mask, (given.q.shape[2], keys))


def _converts(where: str, given: Call) -> bool:
    """Whether autocast is on, and would convert an input."""
    if not torch.is_autocast_enabled(where):
        return False
    dtype = torch.get_autocast_dtype(where)
    return not given.q.dtype is given.k.dtype is given.v.dtype is dtype


def any_requires_grad(pair: tuple[Remembered | None, Remembered | None], given: Call) -> bool:
    """Whether an input of a call, or a tensor that its score_mod was seen to capture, does."""
    for tensor in given.tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    for found in pair:
        if found is not None and found.score is not None:
            return found.score.witness.requires_grad()
    return False


def forgetting(
    memory: Lru[tuple[Any, ...], Any], key: tuple[Any, ...]
) -> Callable[[object], None]:
    """A weakref callback that drops a dead mod's or mask's entry, which holds captured tensors."""
    return lambda _: memory.discard(key)


# What a launch depends on in a BlockMask.
parts_of: Callable[[Any], tuple[Any, ...]] = attrgetter(
    "mask_mod", "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "BLOCK_SIZE", "seq_lengths",
)  # fmt: skip
