"""Types of what a plan is made of and of what its runs are given, each with words."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flexattn.errors import InputError, InputTypeError
from flexattn.kernels.paged_decode.config import check_config

_LENGTHS = ("", "uniform", "ragged")


def whole(name: str, value: Any) -> int:
    """An integer argument; raises InputTypeError for what is none."""
    try:
        return operator.index(value)
    except TypeError:
        do = f"pass {name} as an int"
        raise InputTypeError(f"{name} is {value!r:.80}", f"{name} is an integer", do) from None


def pair(name: str, value: Any, meaning: str) -> tuple[int, int]:
    """Two integers; raises InputTypeError for what is something else."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        do = f"pass {name} as a tuple"
        raise InputTypeError(f"{name} is {value!r:.80}", f"{name} is {meaning}", do)
    return whole(name, value[0]), whole(name, value[1])


def check_choices(lengths: str, config: object, flags: Mapping[str, object]) -> None:
    """That what a plan is asked for are choices and not tensors; raises InputError."""
    for name, flag in flags.items():
        if not isinstance(flag, (bool, int)):
            raise InputTypeError(
                f"{name} is a {type(flag).__name__}",
                f"{name} says whether the plan's kernels have it: True or False",
                "give the tensors to run()" if isinstance(flag, Tensor) else "",
            )
    if config is not None:
        check_config(config)
    if lengths not in _LENGTHS:
        raise InputError(
            f"lengths={lengths!r}", f"it is one of {_LENGTHS}", "leave it out for the best record"
        )


def refuse_types(q: object, kv_cache: object, **named: object) -> None:
    """Raise InputTypeError for the first of a run's arguments that is no tensor."""
    cache = kv_cache if isinstance(kv_cache, tuple) else (kv_cache,)
    two = not isinstance(kv_cache, tuple) or len(kv_cache) == 2
    if not two or not all(isinstance(each, Tensor) for each in cache):
        kinds = ", ".join(type(each).__name__ for each in cache)
        raise InputTypeError(
            f"kv_cache is a {type(kv_cache).__name__}"
            + (f" of {kinds}" if isinstance(kv_cache, tuple) else ""),
            "it is a tuple (K, V) of tensors, or one tensor",
            "pass (K, V)",
        )
    for name, each in {"q": q, **named}.items():
        needed = name in ("q", "seq_lens")
        if not isinstance(each, Tensor) and (needed or each is not None):
            raise InputTypeError(
                f"{name} is a {type(each).__name__}",
                "it is a torch.Tensor on the plan's device",
                f"make it once with torch.tensor({name}, device=...), and change it in place",
            )
