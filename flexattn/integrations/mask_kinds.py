"""mask_kind(): the kind of mask that a model of transformers reads.

transformers asks the models whether they support its own implementations, and no other one. So
what a model's class says decides here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal

import torch

MaskKind = Literal["block", "sdpa", "eager"]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def mask_kind(config_class: type) -> MaskKind:
    """The kind of mask for models whose configs are of a class.

    "block", a BlockMask, where the model declares that it supports flex_attention, has its
    attention replaced, and handles no BlockMask in its own code. Else a tensor: "sdpa", bool, or
    "eager", added to scores, where the model has no sdpa, or always runs its own attention.
    Where no loaded model has such configs: "block".
    """
    return _kind(config_class)


@lru_cache(maxsize=256)
def _kind(config_class: Any) -> MaskKind:
    models: list[Any] = next(filter(None, map(_models_of, config_class.__mro__)), [])
    replaced = all(each._can_set_attn_implementation() for each in models)
    own = any(hasattr(sys.modules.get(each.__module__), "BlockMask") for each in models)
    if replaced and not own and all(each._supports_flex_attn for each in models):
        return "block"
    return "sdpa" if replaced and all(each._supports_sdpa for each in models) else "eager"


def _models_of(config_class: type) -> list[Any]:
    from transformers import PreTrainedModel

    return [each for each in _below(PreTrainedModel) if each.config_class is config_class]


def _below(base: Any) -> Iterator[Any]:
    for each in base.__subclasses__():
        yield each
        yield from _below(each)
