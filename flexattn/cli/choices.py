"""Words that options take: they are shown in help, completed, and understood in short forms.

Nothing here imports torch, so that help and completion come at once; the lists are held to those
of the package by tests/unit/cli/test_front.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from flexattn.device import INTERPRETER, KNOWN, NEURON
from flexattn.errors import InputError
from flexattn.presets import files
from flexattn.util.near import did_you_mean

KIND_CHOICES = ("prefill", "decode", "backward")
RECORDED_CHOICES = (*KIND_CHOICES, "serving")
EFFORTS = ("quick", "full", "exhaustive")
DTYPE_CHOICES = ("float16", "bfloat16", "float32", "float8_e4m3fn")
ROLES = ("score", "mask")
TANHS = ("auto", "fast", "exact")
BACKENDS = ("TRITON", "GLUON")
PARTS = ("expr", "source", "ptx", "resources")
PRESETS = (*files(), "all")
GPUS = tuple(KNOWN)
DEVICES = (*GPUS, *NEURON)


def choice(option: str, word: str, names: Sequence[str], others: Mapping[str, str] = {}) -> str:
    """The name that a word stands for, whatever its case; others: further words for them.

    Raises InputError that lists the names, with the nearest one.
    """
    spelled = {name.lower(): name for name in names} | dict(others)
    found = spelled.get(word.lower())
    if found is None:
        listed = f"{', '.join(names[:-1])} or {names[-1]}"
        near = did_you_mean(word, names) or did_you_mean(word, others)
        raise InputError(f"{option} {word}", f"it is {listed}", near)
    return found


def device_name(word: str) -> str:
    """The name of a device in the table: its maker may be left out, and case and blanks differ.

    Raises InputError that lists the names, with the nearest one.
    """
    names = {name: name for name in (*DEVICES, INTERPRETER.name)}
    names |= {name.partition("-")[2]: name for name in KNOWN}
    asked = word.lower().replace(" ", "-").replace("_", "-")
    if asked not in names:
        raise InputError(
            f"no device is called {word!r}",
            f"there are {', '.join(DEVICES)}",
            did_you_mean(asked, names) or "`flexattn devices` lists what they are",
        )
    return names[asked]


def option(*flags: str, of: Sequence[str], help: str, shown: str | None = None) -> Any:
    """A typer option that shows its choices, and completes them; shown: in their place."""
    return typer.Option(
        *flags, help=help, metavar=shown or "|".join(of), autocompletion=completing(of)
    )


def completing(names: Sequence[str]) -> Callable[[str], list[str]]:
    """What completes the beginning of a name."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete
