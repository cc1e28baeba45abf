"""What a kernel's arguments for captured tensors and numbers are called."""

from __future__ import annotations


def buffer_names(kind: str, slot: int, rank: int) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The kernel's argument names for one captured tensor: pointer, sizes, strides."""
    base = f"{kind}_buf{slot}"
    return (
        base,
        tuple(f"{base}_size{d}" for d in range(rank)),
        tuple(f"{base}_stride{d}" for d in range(rank)),
    )


def scalar_name(kind: str, slot: int) -> str:
    """The kernel's argument name for one captured Python number."""
    return f"{kind}_scalar{slot}"
