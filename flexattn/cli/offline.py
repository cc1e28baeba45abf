"""A Problem from numbers instead of tensors, its configs, and kernels compiled with no device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import torch

from flexattn.device import Device, named
from flexattn.errors import InputError, UnsupportedError
from flexattn.kernels.base.config import Config
from flexattn.kernels.choose.defaults import space
from flexattn.kernels.choose.options import Options, parse
from flexattn.kernels.choose.registry import family_of
from flexattn.problem import ITEMSIZE, MAX_HEADS, MAX_LENGTH, Kind, Problem, Shape
from flexattn.problem.checks import MAX_HEAD_DIM
from flexattn.runtime.build import unloaded
from flexattn.runtime.dispatch import Choice, chosen
from flexattn.settings import current
from flexattn.tune.tasks import task_from
from flexattn.tune.workload import Row

# A problem depends on the device by its kind alone, which is named here.
NAMED = named("nvidia-h200")
_MOST = {
    "B": MAX_LENGTH, "Hq": MAX_HEADS, "Hkv": MAX_HEADS, "q_len": MAX_LENGTH, "kv_len": MAX_LENGTH,
    "D": MAX_HEAD_DIM, "Dv": MAX_HEAD_DIM, "block": MAX_LENGTH,
}  # fmt: skip


def problem_of(
    kind: Kind,
    dtype: str,
    shape: Shape,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    block: int = 128,
) -> Problem:
    """The problem of a call with dense, aligned tensors of these sizes, as the tuner makes it.

    The mask's blocks, square ones, are found on the CPU. Raises InputError for sizes that no call
    has, ModError for mods that cannot be read.
    """
    check_sizes(dtype, shape, block)
    row = Row("", kind, dtype, shape, None, None, (block, block), None, ())
    return task_from(row, score_mod, mask_mod, NAMED, torch.device("cpu")).problem


def check_sizes(dtype: str, shape: Shape, block: int) -> None:
    """Raise InputError for a dtype or sizes that no call has."""
    if dtype not in ITEMSIZE:
        raise InputError(f"dtype {dtype!r}", f"it is one of {', '.join(ITEMSIZE)}")
    if shape.Hkv < 1 or shape.Hq < 1 or shape.Hq % shape.Hkv:
        got = f"{shape.Hq} query heads and {shape.Hkv} key heads"
        raise InputError(got, "the query heads are a multiple of the key heads")
    sizes = asdict(shape) | {"block": block}
    if min(sizes.values()) < 1:
        got = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise InputError(got, "sizes are at least 1")
    for name, size in sizes.items():
        if size > (most := _MOST[name]):
            raise InputError(f"{name}={size}", f"it is at most {most}, as in a call")


def compiled(problem: Problem, device: Device, options: Options) -> tuple[Choice, Any]:
    """The choice that dispatch makes, with the kernel compiled for a device that need not be here.

    Raises ConfigError where nothing fits, BuildError where nothing compiles, and UnsupportedError
    in a process that interprets.
    """
    if current().interpret:
        raise UnsupportedError(
            "FLEXATTN_INTERPRET=1, and a kernel to compile",
            "one process interprets or compiles, never both",
            "unset FLEXATTN_INTERPRET",
        )
    choice, kernel, _ = chosen(problem, device, options, partial(unloaded, device=device))
    return choice, kernel.compiled


def nearest(problem: Problem, device: Device, start: Config, limit: int) -> Iterator[Config]:
    """A small space: `start`, then what kernel_options can force, the fewest changes first."""

    def distance(config: Config) -> int:
        names = type(start).__dataclass_fields__
        return sum(getattr(config, name) != getattr(start, name) for name in names)

    def forced(config: Config) -> bool:
        options = family_of(config).options_of(config)
        return config != start and parse(options).apply(start) == config

    others = filter(forced, space(problem, device))
    yield from islice((start, *sorted(others, key=distance)), limit)
