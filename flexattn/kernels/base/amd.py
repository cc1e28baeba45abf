"""Hints of a config for AMD's compiler, the rule about them, and those that a search tries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import product, starmap
from typing import Any, TypeVar

from flexattn.device import Device, is_rdna
from flexattn.kernels.base.config import values
from flexattn.kernels.base.limits import Rule

# SIMDs of a CU of CDNA, and of a WGP of RDNA.
SIMDS = 4
# More waves of a SIMD than this leave no kernel of ours its registers.
MOST_WAVES = 8


# No slots: a config class that has some cannot inherit from two such.
@dataclass(frozen=True)
class AmdHints:
    """The hints of a config for an AMD GPU; a family's config class for AMD inherits them.

    waves_per_eu: waves that share the registers of a SIMD; 0 leaves the number to the compiler.
    matrix_instr_nonkdim: rows of a matrix instruction; 0 leaves them to it, too. kpack: elements
    of a thread's operands that lie together in LDS, in matrix instructions. buffer_loads: tensors
    are read by buffer instructions, with offsets of 32 bits, where all lie within 2 GiB.
    """

    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0
    kpack: int = 1
    buffer_loads: bool = False


_C = TypeVar("_C")


def as_kind(config: Any, kind: type[_C]) -> _C:
    """A config as one of a class that has its fields and more."""
    if isinstance(config, kind):
        return config
    return kind(**{each.name: getattr(config, each.name) for each in fields(config)})


def options_of(config: Any) -> tuple[tuple[str, int], ...]:
    """The options of a config for AMD's compiler, by Triton's names, without those at rest."""
    if not isinstance(config, AmdHints):
        return ()
    names = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
    found = ((name, getattr(config, name)) for name in names)
    return tuple((name, value) for name, value in found if value != getattr(AmdHints, name))


def hint_words(config: Any) -> list[str]:
    """The hints of a config as words of a table's cell."""
    found = [f"{name}={value}" for name, value in options_of(config)]
    return found + ["buffer"] * (isinstance(config, AmdHints) and config.buffer_loads)


def limited(device: Device, config: Any) -> Device:
    """The device with the registers of a thread that a config's waves leave it."""
    waves = config.waves_per_eu if isinstance(config, AmdHints) else 0
    if waves < 1:
        return device
    share = device.registers // (SIMDS * device.warp_size * waves)
    return replace(device, max_registers=min(device.max_registers, share))


# Archs whose matrix instructions have kpack.
_PACKING = ("gfx90a", "gfx942")


def _known(c: Any) -> bool:
    """True if the compiler knows a config's hints.

    Of rows of a matrix instruction RDNA has 16, CDNA 16 or 32. Compilers drop other hints without
    a word, or multiply tiles without matrix instructions.
    """
    hints = c.config
    if not hint_words(hints):
        return True
    rows = (0, 16) if c.device.warp_size == 32 else (0, 16, 32)
    return (
        c.device.backend == "hip"
        and 0 <= hints.waves_per_eu <= MOST_WAVES
        and hints.matrix_instr_nonkdim in rows
        and hints.kpack in ((1, 2) if c.device.arch in _PACKING else (1,))
    )


KNOWN_HINTS: Rule[Any] = Rule(
    "hints", "the compiler for {c.device.arch} does not know the hints of {config}", _known
)


# The hints that a search tries, by whether it is RDNA. CDNA's are those of published tiles, with
# buffer instructions, which take registers from each 16-bit forward that was compiled. RDNA's
# matrix instructions have 16 rows, and no kpack.
_FULL: dict[bool, tuple[AmdHints, ...]] = {
    False: (
        AmdHints(0, 0, buffer_loads=True),
        AmdHints(0, 16, buffer_loads=True),
        AmdHints(2, 0, buffer_loads=True),
        AmdHints(2, 16, buffer_loads=True),
        AmdHints(0, 0, 2, buffer_loads=True),
    ),
    True: (AmdHints(), AmdHints(buffer_loads=True)),
}
_EVERY: dict[bool, tuple[AmdHints, ...]] = {
    False: tuple(starmap(AmdHints, product((0, 1, 2, 3), (0, 16, 32), (1, 2), (False, True)))),
    True: tuple(starmap(AmdHints, product((0, 2, 4), (0,), (1,), (False, True)))),
}


def each_hinted(
    configs: Iterable[Any], kind: type[_C], device: Device, every: bool
) -> Iterator[_C]:
    """Each config, on an AMD GPU with the hints that a search tries there; kind: their class."""
    if device.backend != "hip":
        yield from configs
        return
    tried = (_EVERY if every else _FULL)[is_rdna(device)]
    packs = device.arch in _PACKING
    for config, hints in product(configs, tried):
        if packs or hints.kpack == 1:
            yield replace(as_kind(config, kind), **values(hints))  # type: ignore[type-var]
