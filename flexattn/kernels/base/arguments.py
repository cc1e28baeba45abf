"""The kernels' arguments: one list that templates print, the build types and a launch fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType
from typing import Any

from flexattn.kernels.base.config import Config, walks_runs
from flexattn.kernels.base.features import skips_far
from flexattn.kernels.printers.spelling import (
    buffer_names,
    invariant_names,
    scalar_name,
    signature_type,
)
from flexattn.mods import Bound
from flexattn.mods.numbers import divisors, invariant
from flexattn.problem import ITEMSIZE, Captures, Structure


@dataclass(frozen=True, slots=True)
class Argument:
    """One kernel argument: its name, its type as Triton's signature spells it, what divides it.

    near: it points to less than 2 GiB, of which offsets have 32 bits.
    """

    name: str
    type: str
    divisible_by: int = 1
    near: bool = False

    @property
    def described(self) -> bool:
        """True if the argument is a tensor descriptor."""
        return self.type.startswith("tensordesc")


def several(kind: str, *names: str, divisible_by: int = 1) -> list[Argument]:
    """Arguments of one type."""
    return [Argument(name, kind, divisible_by) for name in names]


def stride_arguments(prefix: str, axes: str, divisible_by: int = 1) -> list[Argument]:
    """Strides of a tensor, an argument for each letter of `axes`."""
    return [Argument(f"stride_{prefix}{axis}", "i64", divisible_by) for axis in axes]


def attention_arguments(
    structure: Structure,
    config: Config,
    described: Mapping[str, str] = MappingProxyType({}),
    results: Sequence[Argument] = (),
    sizes: Sequence[Argument] = (),
) -> tuple[Argument, ...]:
    """Arguments of the kernel of a call, in order.

    described: types of the tensors that it has tensor descriptors of. results, sizes: what one
    family's kernels alone have, behind the outputs and behind the numbers that all have.
    """
    found = [pointer(tensor, structure) for tensor in "qkv"]
    found += [*outputs(structure), *results]
    found += [each for tensor in "qkv" for each in strides_of(tensor, structure)]
    found += output_strides(structure)
    found += several("i32", "Hq", "group", "q_len", "kv_len", "num_tiles")
    found += [*sizes, Argument("sm_scale", "fp32"), *sinks(structure), *_descales(structure)]
    if skips_far(structure, config):
        found.append(Argument("DECAY_WINDOW", "*fp32", 4))
    found += _sparse(structure, config)
    found += captured_arguments(structure.score, structure.mask)
    found += dropout_arguments(structure)
    return tuple(
        Argument(each.name, described[each.name]) if each.name in described else each
        for each in found
    )


def descriptor(name: str, dtype: str, rows: int, width: int) -> tuple[str, str]:
    """A tensor's name, and the type of a descriptor of its tiles."""
    return name, f"tensordesc<{signature_type(dtype)}{[1, 1, rows, width]}>"


def captured_values(captures: Captures | None, bound: Bound | None) -> dict[str, Any]:
    """The values that a launch passes for `captured_arguments`, by name."""
    if captures is None or bound is None:
        return {}
    values: dict[str, Any] = {}
    kind = captures.mod.kind
    for slot, (tensor, inner) in enumerate(zip(bound.tensors, captures.contiguous, strict=True)):
        shape, steps = tensor.shape, tensor.stride()
        base, sizes, strides = _captured_names(kind, slot, len(shape), inner)
        values[base] = tensor
        values.update(zip(sizes, shape, strict=True))
        values.update(zip(strides, steps[:-1] if inner else steps, strict=True))
    for slot, number in enumerate(bound.scalars):
        values[scalar_name(kind, slot)] = number
    for slot in divisors(captures.mod.expr) if bound.scalars else ():
        factor, shift = invariant_names(kind, slot)
        multiplier, places = invariant(int(bound.scalars[slot]))
        # Its bits as a signed number: it is at least 2**31.
        values[factor], values[shift] = multiplier - 2**32, places
    return values


def pointer(tensor: str, structure: Structure) -> Argument:
    """The address of "q", "k" or "v"."""
    dtype = structure.dtype_of(tensor)
    aligned = 16 if structure.layout.aligned else ITEMSIZE[dtype]
    return Argument(tensor.upper(), f"*{signature_type(dtype)}", aligned)


def outputs(structure: Structure) -> list[Argument]:
    """The arguments to which a kernel writes its output and its statistics."""
    found = [Argument("OUT", f"*{signature_type(structure.out_dtype)}", 16)]
    statistics = ("LSE",) * structure.lse + ("MAX",) * structure.max_scores
    return found + several("*fp32", *statistics, divisible_by=16)


def strides_of(tensor: str, structure: Structure) -> list[Argument]:
    """The strides of "q", "k" or "v"; the head dimension's stride only where it is not 1."""
    layout = structure.layout
    divisor = 16 // ITEMSIZE[structure.dtype_of(tensor)] if layout.aligned else 1
    inner = {"q": layout.q_contiguous, "k": layout.k_contiguous, "v": layout.v_contiguous}
    axes = "bhmd" if tensor == "q" else "bhnd"
    axes = axes[:3] if inner[tensor] else axes
    return stride_arguments(tensor, axes, divisor)


def output_strides(structure: Structure) -> list[Argument]:
    """The strides of a dense output, multiples of its rows: a thread stores 16 bytes at once."""
    return dense_stride_arguments("o", "bhm", structure.head_dim_v)


def sinks(structure: Structure) -> list[Argument]:
    """The logits of sinks, where there are any."""
    return [Argument("SINKS", f"*{signature_type(structure.sinks)}")] if structure.sinks else []


def dropout_arguments(structure: Structure) -> list[Argument]:
    """The seed, the last number that drops a weight, and what scales the others."""
    if not structure.dropout:
        return []
    last, scale = Argument("last_dropped", "i32"), Argument("keep_scale", "fp32")
    return [Argument("DROPOUT_SEED", "*i64", 8), last, scale]


def _descales(structure: Structure) -> list[Argument]:
    """The factors of the heads of q, k and v, each tensor with its strides."""
    if not structure.fp8:
        return []
    found = several("*fp32", "Q_DESCALE", "K_DESCALE", "V_DESCALE")
    return found + [Argument(f"{x}_descale_{axis}", "i64") for x in "qkv" for axis in "bh"]


def _sparse(structure: Structure, config: Config) -> list[Argument]:
    if structure.sparsity is None:
        return []
    strides = stride_arguments("mask_", "bh")
    if walks_runs(structure, config):
        return [Argument("RUNS", "*i32", 4), *strides]
    lists = ["KV", "FULL"] if structure.sparsity.has_full else ["KV"]
    found = [Argument(f"{name}_{what}", "*i32", 4) for name in lists for what in ("NUM", "IDX")]
    return [*found, *strides, *(Argument(f"{name}_WIDTH", "i64") for name in lists)]


def captured_arguments(*mods: Captures | None) -> list[Argument]:
    """The arguments of a kernel for mods: captured tensors, numbers and divisors of each."""
    found = []
    for captures in filter(None, mods):
        mod = captures.mod
        for slot, buffer in enumerate(mod.buffers):
            inner = captures.contiguous[slot]
            base, sizes, strides = _captured_names(mod.kind, slot, buffer.rank, inner)
            found.append(Argument(base, f"*{signature_type(buffer.dtype)}"))
            found += several("i32", *sizes)
            found += several("i64", *strides)
        found += [
            Argument(scalar_name(mod.kind, slot), signature_type(dtype))
            for slot, dtype in enumerate(mod.scalars)
        ]
        for slot in divisors(mod.expr):
            multiplier, shift = invariant_names(mod.kind, slot)
            found += several("i32", multiplier, shift)
    return found


def _captured_names(
    kind: str, slot: int, rank: int, inner: bool
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Pointer, sizes and strides of a captured tensor; inner: its last stride is 1, not told."""
    base, sizes, strides = buffer_names(kind, slot, rank)
    return base, sizes, strides[:-1] if inner else strides


def delta_arguments(structure: Structure, through_lse: bool) -> list[Argument]:
    """The output, its gradient, lse, delta and strides; through_lse: lse has a gradient, too."""
    element = f"*{signature_type(structure.dtype)}"
    found = several(element, "OUT", "DO", divisible_by=16)
    statistics = ("LSE", *("DLSE",) * through_lse, "DELTA")
    found += several("*fp32", *statistics, divisible_by=16)
    found += output_strides(structure)
    return found + dense_stride_arguments("do", "bhm", structure.head_dim_v)


def dense_stride_arguments(tensor: str, axes: str, head_dim: int) -> list[Argument]:
    """Strides of what is dense, all multiples of its rows."""
    return stride_arguments(tensor, axes, gcd(16, head_dim))


# Of each head: the end of the tiles of queries that have weights of each tile of keys, and the
# first tile of keys that each tile of queries has weights of, by decay_skip/blocks.py.jinja. Their
# addresses are 0 where all tiles are visited.
M_BLOCK_MAX, N_BLOCK_MIN = Argument("M_BLOCK_MAX", "*i32", 4), Argument("N_BLOCK_MIN", "*i32", 4)


def skips_vanished(structure: Structure, config: Config) -> bool:
    """True if a backward's kernel leaves out tiles of keys too far before one that its rows keep.

    It does so where a forward does. A weight exp(S' - lse) that is 0 in float32 is a factor of all
    that its score adds to gradients, those of lse and of captured tensors among them.
    """
    if structure.kind != "backward" or structure.ragged_kv:
        return False
    return skips_far(replace(structure, kind="prefill"), config)
