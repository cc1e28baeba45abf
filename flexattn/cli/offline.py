"""A Problem from numbers instead of tensors, its configs, and kernels compiled with no device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from flexattn.build import compile_source
from flexattn.device import Device
from flexattn.dispatch import Choice, choices
from flexattn.errors import ConfigError, InputError, UnsupportedError
from flexattn.mods import bind
from flexattn.options import Options
from flexattn.problem import ITEMSIZE, Kind, Layout, Problem, Sparsity, Structure, captures_of
from flexattn.settings import current
from flexattn.space.config import Config, PrefillConfig
from flexattn.space.triton import space

ALIGNED = Layout(True, True, True, True)


@dataclass(frozen=True)
class Numbers:
    """The sizes of a call; q [B, Hq, q_len, D], k [B, Hkv, kv_len, D], v [B, Hkv, kv_len, Dv]."""

    B: int
    Hq: int
    Hkv: int
    q_len: int
    kv_len: int
    D: int
    Dv: int


def problem_of(
    kind: Kind,
    dtype: str,
    numbers: Numbers,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    block: int = 128,
) -> Problem:
    """The problem of dense, aligned tensors of these sizes, with a mask in square blocks."""
    if dtype not in ITEMSIZE:
        raise InputError(f"dtype {dtype!r}", f"it is one of {', '.join(ITEMSIZE)}")
    if numbers.Hkv < 1 or numbers.Hq < 1 or numbers.Hq % numbers.Hkv:
        got = f"{numbers.Hq} query heads and {numbers.Hkv} key heads"
        raise InputError(got, "the query heads are a multiple of the key heads")
    if min(numbers.D, numbers.Dv, block) < 1:
        raise InputError(f"D={numbers.D}, Dv={numbers.Dv}, {block=}", "sizes are at least 1")
    structure = Structure(
        kind=kind,
        dtype=dtype,
        head_dim_qk=numbers.D,
        head_dim_v=numbers.Dv,
        group=numbers.Hq // numbers.Hkv if kind == "decode" else 0,
        score=captures_of(bind(score_mod, "score")),
        mask=captures_of(bind(mask_mod, "mask")),
        sparsity=None if mask_mod is None else Sparsity(block, block, True, False),
        layout=ALIGNED,
        lse=False,
        max_scores=False,
        tf32=False,
        positive_scale=True,
    )
    n = numbers
    return Problem(structure, n.B, n.Hq, n.Hkv, n.q_len, n.kv_len)


def compiled(problem: Problem, device: Device, options: Options) -> tuple[Choice, Any]:
    """The choice that dispatch makes, with the kernel compiled for a device that need not be here.

    Raises ConfigError where nothing fits, and UnsupportedError in a process that interprets.
    """
    if current().interpret:
        raise UnsupportedError(
            "FLEXATTN_INTERPRET=1, and a kernel to compile",
            "one process interprets or compiles, never both",
            "unset FLEXATTN_INTERPRET",
        )
    needed = 0
    for choice in choices(problem, device, options):
        kernel = compile_source(choice.source, device)
        needed = int(kernel.metadata.shared)
        if needed <= device.shared_memory:
            return choice, kernel
    raise ConfigError(
        f"{problem.describe()}: the kernel needs {needed} bytes of shared memory",
        f"{device.name} has {device.shared_memory}",
        "use smaller blocks, or fewer stages",
    )


def nearest(problem: Problem, device: Device, start: Config, limit: int) -> Iterator[Config]:
    """A small space: `start`, then the configs that differ from it in the fewest numbers."""

    def distance(config: Config) -> int:
        return sum(getattr(config, name) != getattr(start, name) for name in _names(start))

    others = (c for c in space(problem, device) if c != start and type(c) is type(start))
    yield from islice((start, *sorted(others, key=distance)), limit)


def kernel_options(config: Config) -> dict[str, int | bool]:
    """The kernel_options that force a config."""
    found: dict[str, int | bool] = {
        name: getattr(config, name) for name in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    }
    if isinstance(config, PrefillConfig):
        found["USE_TMA"] = config.use_tma
    elif config.num_splits:
        found["SPLIT_KV"] = config.num_splits
    return found


def short(config: Config) -> str:
    """A config in a table's cell: 128x64 w4 s2 tma."""
    text = f"{config.BLOCK_M}x{config.BLOCK_N} w{config.num_warps} s{config.num_stages}"
    return text + " tma" if isinstance(config, PrefillConfig) and config.use_tma else text


def _names(config: Config) -> tuple[str, ...]:
    return tuple(type(config).__dataclass_fields__)
