"""A call like one before: its launch, found without looking at everything again.

The long way walks through the mods, checks the arguments and builds the Problem's key. Here a
call is compared with the last one of its shapes, name by name, which takes a few microseconds;
whatever differs, or cannot be compared, goes the long way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from flexattn.frontend.plan import Plan, bind_on
from flexattn.frontend.transforms import in_forward_mode
from flexattn.mods import Bound, Witness, watch
from flexattn.problem import checks
from flexattn.problem.descales import NO_DESCALES, Descales
from flexattn.problem.mask_class import UNKNOWN, known_class
from flexattn.problem.read_checks import check_reads
from flexattn.problem.runs import known_runs, unwritten, versions
from flexattn.records.store import generation
from flexattn.runtime.launch import Launch, Outputs
from flexattn.settings import Settings, current
from flexattn.util.lru import Lru

__all__ = ["Arguments", "recall", "remember"]


class Arguments(NamedTuple):
    """flex_attention's arguments, as they were given."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Callable[..., Tensor] | None
    block_mask: BlockMask | None
    scale: float | None
    enable_gqa: bool
    return_lse: bool
    kernel_options: Mapping[str, Any] | None
    return_aux: AuxRequest | None
    sinks: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None

    @property
    def descales(self) -> Descales:
        """The factors of fp8 inputs."""
        if self.q_descale is self.k_descale is self.v_descale is None:
            return NO_DESCALES
        return Descales(self.q_descale, self.k_descale, self.v_descale)


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
    """One call and what served it; where: the type of its device.

    checked: in checked mode, what its mods are bound to.
    """

    launch: Launch
    where: str
    rest: tuple[Any, ...]
    scale: float
    settings: Settings
    generation: int
    score: _Score | None
    mask: _Mask | None
    checked: tuple[Bound | None, Bound | None] | None = None


_seen: Lru[tuple[Any, ...], _Seen] = Lru(1024)


def recall(given: Arguments) -> Outputs | None:
    """Serve a call as the same one was served before; None where that cannot be known."""
    try:
        key = _key(given)
    # Tensors without strides: the long way says what is wrong.
    except (RuntimeError, TypeError, ValueError):
        return None
    found = None if key is None else _seen.get(key)
    if found is None or not _holds(found, given):
        return None
    if found.checked is not None:
        score, mask = found.checked
        q, k, _, score_mod, block_mask, *_ = given
        check_reads(q, k, found.scale, given.descales, score_mod, score, block_mask, mask)
    return found.launch.run(*given[:3], found.scale, found.rest, given.sinks, given.descales)


def _holds(found: _Seen, given: Arguments) -> bool:
    if found.settings is not current() or found.generation != generation():
        return False
    # Within torch.func.jvp a tensor may have a tangent, which a launch would drop.
    if torch.is_autocast_enabled(found.where) or in_forward_mode():
        return False
    if torch.is_grad_enabled() and _wants_grad(found, given):
        return False
    return (found.score is None or found.score.holds(given.score_mod)) and (
        found.mask is None or found.mask.holds(given.block_mask)
    )


def remember(given: Arguments, plan: Plan) -> None:
    """Keep how a call was served, if a later one can be told to be the same."""
    key, block_mask = _key(given), given.block_mask
    call = plan.call
    # Autocast makes other tensors, and sinks with gaps are copied.
    taken = (call.q, call.k, call.v, call.sinks)
    if key is None or not all(map(is_, taken, (*given[:3], given.sinks))):
        return
    score = mask = None
    if given.score_mod is not None:
        assert call.score is not None
        watched = watch(given.score_mod, "score", call.score)
        if watched is None:
            return
        score = _Score(weakref.ref(given.score_mod, _forgetting(key)), watched)
    if block_mask is not None:
        mask = _mask_of(block_mask, plan, key)
        if mask is None:
            return
    launch = plan.launch
    where, rest = launch.device.type, plan.rest()
    settings = current()
    checked = (call.score, plan.mask) if settings.check else None
    found = _Seen(launch, where, rest, call.scale, settings, generation(), score, mask, checked)
    _seen.put(key, found)


def _mask_of(block_mask: BlockMask, plan: Plan, key: tuple[Any, ...]) -> _Mask | None:
    """What tells that a mask still is what a plan was made for; None where nothing can."""
    parts, bound = _parts(block_mask), plan.mask
    lists = [each for each in parts[1:5] if each is not None]
    if plan.call.block_mask is None:
        # It keeps everything: what its lists say was read, and the launch has none of them.
        bound, by_version = bind_on(parts[0], "mask", plan.call.q), True
        fixed = not any(each.is_inference() for each in lists)
    else:
        by_version = known_runs(block_mask) is not None
        fixed = known_class(block_mask) not in (None, UNKNOWN)
        fixed = fixed and all(map(is_, (plan.lists or ())[:4], parts[1:5]))
    assert bound is not None
    watched = watch(parts[0], "mask", bound)
    if watched is None or not fixed:
        return None
    reference = weakref.ref(block_mask, _forgetting(key))
    if by_version:
        return _Mask(reference, parts, versions(lists), unwritten, watched)
    return _Mask(reference, parts, _shapes(lists), _as_large, watched)


def _forgetting(key: tuple[Any, ...]) -> Callable[[object], None]:
    """What a mod or mask does when it dies: its entry holds tensors that it captured."""
    return lambda _: _seen.discard(key)


def _parts(mask: BlockMask) -> tuple[Any, ...]:
    return (
        mask.mask_mod, mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks,
        mask.full_kv_indices, mask.BLOCK_SIZE, mask.seq_lengths,
    )  # fmt: skip


def _shapes(lists: list[Tensor]) -> list[Any]:
    """A mask's lists with their shapes and strides: `.data = …` changes them in place."""
    return [(each, each.shape, each.stride()) for each in lists]


def _as_large(seen: list[Any]) -> bool:
    for each, shape, strides in seen:
        if each.shape != shape or each.stride() != strides:
            return False
    return True


def _key(given: Arguments) -> tuple[Any, ...] | None:
    """What two calls have in common that the same launch may serve; None for no plain tensors."""
    (
        q, k, v, score_mod, block_mask, scale, enable_gqa, return_lse, options, return_aux, sinks,
        q_descale, k_descale, v_descale,
    ) = given  # fmt: skip
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        return None
    if q.is_neg() or k.is_neg() or v.is_neg():  # read from copies, which no other call has
        return None
    if scale is not None and type(scale) is not float:
        scale = checks.number(scale)
        if scale is None:
            return None
    factors = None
    if sinks is not None and (type(sinks) not in (Tensor, Parameter) or sinks.is_neg()):
        return None
    if not q_descale is k_descale is v_descale is None:
        descales = given.descales
        if any(x is not None and (type(x) is not Tensor or x.is_neg()) for x in descales):
            return None
        factors = descales.facts()
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16,
        id(score_mod), id(block_mask), scale, enable_gqa, return_lse, return_aux,
        repr(options) if options else None,
        None if sinks is None else (sinks.shape, sinks.stride(), sinks.dtype, sinks.get_device()),
        q.dtype == torch.float32 and checks.tf32_allowed(q),
        factors,
    )  # fmt: skip


def _wants_grad(found: _Seen, given: Arguments) -> bool:
    q, k, v, sinks, descales = *given[:3], given.sinks, given.descales
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    if sinks is not None and sinks.requires_grad:
        return True
    if descales is not NO_DESCALES and descales.requires_grad():
        return True
    return found.score is not None and found.score.witness.requires_grad()
