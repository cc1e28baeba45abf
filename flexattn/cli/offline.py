"""A Problem from numbers instead of tensors, its configs, and kernels compiled with no device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from functools import partial
from itertools import islice
from typing import Any

import torch

from flexattn.device import Device, named
from flexattn.errors import InputError, UnsupportedError
from flexattn.kernels.base.config import Config, GluonPrefillConfig, PrefillConfig
from flexattn.kernels.choose.options import Options, parse
from flexattn.kernels.choose.space import space
from flexattn.kernels.hopper.config import CONSUMER_REGISTERS
from flexattn.kernels.nki.config import NkiConfig, NkiDecodeConfig, NkiPrefillConfig
from flexattn.kernels.paged_decode.space import ServingConfig
from flexattn.kernels.triton.amd import hints
from flexattn.problem import ITEMSIZE, Kind, Problem, Shape
from flexattn.runtime.build import unloaded
from flexattn.runtime.dispatch import Choice, chosen
from flexattn.settings import current
from flexattn.tune.tasks import task_from
from flexattn.tune.workload import Row

# A problem depends on the device by its kind alone, which is named here.
NAMED = named("nvidia-h200")


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
        raise InputError(", ".join(f"{k}={v}" for k, v in sizes.items()), "sizes are at least 1")


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
        return sum(getattr(config, name) != getattr(start, name) for name in _names(start))

    def forced(config: Config) -> bool:
        return config != start and parse(kernel_options(config)).apply(start) == config

    others = filter(forced, space(problem, device))
    yield from islice((start, *sorted(others, key=distance)), limit)


def kernel_options(config: Config) -> dict[str, int | bool | str]:
    """The kernel_options that force a config, as far as there are options for its numbers."""
    if isinstance(config, GluonPrefillConfig):
        rows, keys, stages = config.all_rows, config.BLOCK_N, config.num_stages
        return {"BACKEND": "GLUON", "BLOCK_M": rows, "BLOCK_N": keys, "num_stages": stages}
    found: dict[str, int | bool | str] = {
        name: getattr(config, name) for name in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    }
    if isinstance(config, PrefillConfig):
        found["USE_TMA"] = config.use_tma
    elif config.num_splits:
        found["SPLIT_KV"] = config.num_splits
    return found


def short(config: Config | NkiConfig | ServingConfig) -> str:
    """A config in a table's cell: 128x64 w4 s2 tma group, or 16x128 w4 s3 x8 for eight splits.

    Of the Gluon template's, 128x128 c2 s2 turns static heads has two consumers that take turns.
    Of a plan's, 16x64 w4 s3 p2 last has two programs on an SM, the last of which merges.
    Of NKI's, 128x512 k4096 dma is tiles of 512 keys, of 4096 that stay on the chip; st: keys lie
    on the partitions.
    """
    if isinstance(config, (NkiPrefillConfig, NkiDecodeConfig)):
        return _short_nki(config)
    if isinstance(config, GluonPrefillConfig):
        return _short_gluon(config)
    if isinstance(config, ServingConfig):
        return _short_plan(config)
    parts = [f"{config.BLOCK_M}x{config.BLOCK_N} w{config.num_warps} s{config.num_stages}"]
    if isinstance(config, PrefillConfig):
        parts += ["tma"] * config.use_tma + [config.order] * (config.order != "last")
    else:
        parts += [f"x{config.num_splits}"] * (config.num_splits > 0)
    parts += [f"{name}={value}" for name, value in hints(config)]
    return " ".join(parts + ["late"] * (not config.early_loads))


def _short_gluon(config: GluonPrefillConfig) -> str:
    parts = [f"{config.BLOCK_M}x{config.BLOCK_N} c{config.consumers} s{config.num_stages}"]
    if config.registers != CONSUMER_REGISTERS.get(config.consumers):
        parts.append(f"r{config.registers}")
    parts += [f"q{config.q_registers}"] * (config.q_registers > 0) + ["watched"] * config.watched
    parts += ["packed"] * config.packed
    parts += (
        ["narrow"] * config.narrow
        + ["apart"] * (not config.chained)
        + ["long turns" if config.long_turns else "turns"] * config.ping_pong
    )
    parts += [config.schedule] * (config.schedule != "grid")
    if config.order != "last":
        parts.append(config.order + str(config.section) * (config.order == "sections"))
    return " ".join(parts + ["late"] * (not config.early_loads))


def _short_nki(config: NkiConfig) -> str:
    parts = [f"{config.BLOCK_M}x{config.BLOCK_N} k{config.section}"]
    if isinstance(config, NkiDecodeConfig):
        parts += [f"x{config.num_splits}"] * (config.num_splits > 1)
    parts += ["dma"] * (config.transpose == "dma") + ["scalar"] * (config.evict == "scalar")
    return " ".join(
        parts + [config.mask] * (config.mask != "range") + ["st"] * (config.form == "st")
    )


def _names(config: Config) -> tuple[str, ...]:
    return tuple(type(config).__dataclass_fields__)


def _short_plan(config: ServingConfig) -> str:
    parts = [f"{config.BLOCK_M}x{config.BLOCK_N} w{config.num_warps} s{config.num_stages}"]
    known = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "per_sm", "combine")
    parts += [f"p{config.per_sm}", config.combine]
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in known and value != field.default:
            parts.append(f"{field.name}={value}")
    return " ".join(parts)
