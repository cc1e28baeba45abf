"""A decode over a cache that grew: served from the same call over another number of keys.

Each token brings another kv_len. Mods, checks and the structure of the kernel are those of the
call before. Where its kernel and its grid serve this kv_len as well, as in most of a bucket, its
launch does, with other arguments; else a launch is prepared.
"""

from __future__ import annotations

from dataclasses import replace
from types import NoneType
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from flexattn.frontend.call import Call
from flexattn.frontend.remembered import PLAIN, Remembered, any_requires_grad, holds, parts_of
from flexattn.problem.facts import TensorFacts
from flexattn.problem.kind import FEW_ROWS
from flexattn.problem.mask_class import known_class
from flexattn.records.key import rounded
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.launch import Lists, prepare_launch
from flexattn.util.lru import Lru

# The last decode by all of its guard_key but kv_len, which counts to the next power of two. Calls
# with gradients, and masks whose blocks are read as runs, are left out.
_decoded: Lru[tuple[Any, ...], Remembered] = Lru(256)


def grown(key: tuple[Any, ...], given: Call) -> Remembered | None:
    """What serves a call that differs in kv_len alone from one before; None for all others.

    Its BlockMask has the same lists and mask_mod, not copies, as the one before.
    """
    mask: Any = given.block_mask
    if not PLAIN.issuperset((type(given.k), type(given.v), type(given.q))):
        return None
    if not isinstance(mask, (BlockMask, NoneType)):
        return None
    any_length = _without_length(key, mask)
    found = _decoded.get(any_length)
    if found is None or (torch.is_grad_enabled() and any_requires_grad((found, None), given)):
        return None
    keys, problem = given.k.shape[2], found.launch.problem
    alike = keys == given.v.shape[2] and given.k.device.type == given.v.device.type == found.where
    alike = alike and (mask is None or known_class(mask) == problem.mask_class)
    if not alike or not holds(found, given, keys):
        return None
    reused = found.launch.with_kv_len(keys, given.k, given.v)
    launch = reused or prepare_launch(
        replace(problem, kv_len=keys), found.launch.choice.device, found.launch.device,
        dispatcher(), found.options, given.q, given.k, given.v,
        None if mask is None else Lists.of(mask),
    )  # fmt: skip
    its = found.mask
    if its is not None:
        its = its._replace(parts=parts_of(mask))
    remembered = replace(found, launch=launch, mask=its)
    if reused is None:
        # The next calls go on from it. One is kept, so caches of two buckets in turn prepare each.
        mod = given.score_mod
        _decoded.put(any_length, remembered.expiring(_decoded, any_length, mod, mask))
    return remembered


def remember_decode(key: tuple[Any, ...], given: Call, found: Remembered) -> None:
    """Keep a call for those of another kv_len, if it is a decode that `grown` can go on from."""
    launch, mask = found.launch, given.block_mask
    structure = launch.problem.structure
    # So few rows decode whatever the number of keys is.
    decodes = structure.kind == "decode" and launch.problem.q_len <= FEW_ROWS
    listed = (mask is None) == (structure.sparsity is None) and not launch.runs
    if decodes and listed and found.trained is None and not found.descaled:
        any_length, mod = _without_length(key, mask), given.score_mod
        _decoded.put(any_length, found.expiring(_decoded, any_length, mod, mask))


def _without_length(key: tuple[Any, ...], mask: BlockMask | None) -> tuple[Any, ...]:
    """A guard_key without what kv_len changes: it and strides of K and V, and which BlockMask."""
    (q, k, v, *others), score, _, scale = key
    mask_mod = None if mask is None else id(mask.mask_mod)
    return (q, *map(_facts_without_length, (k, v)), *others, score, mask_mod, scale)


def _facts_without_length(facts: tuple[Any, ...]) -> tuple[Any, ...]:
    of = TensorFacts(*facts)
    # Of another power of two records may tell something else.
    sizes = (*of.shape[:2], *map(rounded, of.shape[2:3]), *of.shape[3:])
    return of.kind, sizes, of.strides[3:], of.dtype, of.device, of.negated, of.aligned
