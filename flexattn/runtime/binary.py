"""Binary: the machine code of one kernel, with what a launch through the CUDA driver must know."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorMap:
    """How the copy engine reads a tensor: one copy's block, outermost first, and its swizzle."""

    block: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True, slots=True, eq=False)
class Binary:
    """A cubin and its launch.

    name: of the kernel in the cubin. shared: bytes of dynamic shared memory. parameters: how many
    the kernel takes. maps: one for each tensor descriptor among the arguments, in order. verified:
    its first launch was held to plain torch where it was compiled.
    """

    code: bytes
    name: str
    arch: str
    shared: int
    num_warps: int
    parameters: int
    maps: tuple[TensorMap, ...]
    verified: bool = False


def binary_of(compiled: Any, arch: str) -> Binary | None:
    """What Triton compiled; None where only Triton's own launcher can launch it.

    That is code for AMD's GPUs, and code that wants clusters, scratch memory or a special launch.
    """
    if "ptx" not in compiled.asm:
        return None
    metadata = compiled.metadata
    special = (
        metadata.num_ctas != 1
        or metadata.global_scratch_size
        or metadata.profile_scratch_size
        or metadata.launch_cooperative_grid
        or metadata.launch_pdl
    )
    if special:
        return None
    return Binary(
        code=compiled.asm["cubin"],
        name=metadata.name,
        arch=arch,
        shared=metadata.shared,
        num_warps=metadata.num_warps,
        parameters=_parameters(compiled.asm["ptx"]),
        maps=tuple(
            TensorMap(tuple(each["block_size"]), each["swizzle"])
            for each in metadata.tensordesc_meta or ()
        ),
    )


def _parameters(ptx: str) -> int:
    """How many parameters the kernel of a PTX text takes."""
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", ptx, re.DOTALL)
    return 0 if entry is None else len(re.findall(r"\.param", entry.group(1)))
