"""The registry: one row a family of kernels; who has a config, and who serves a structure."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

from flexattn.device import Device
from flexattn.errors import ConfigError
from flexattn.kernels.base.config import Language
from flexattn.kernels.base.family import KernelFamily
from flexattn.problem import Kind, Structure


class FamilyRow(NamedTuple):
    """The folder of a family in kernels/, which is imported on first use.

    family: the name of its object in the folder's module `family`. configs: its config classes,
    in the folder's module `config`. plugin: the folder is one of flexattn/ itself
    and has the name of a backend whose devices it serves; nothing but this row names it.
    measured: False if its kernels were never timed. Then only kernel_options choose it.
    """

    folder: str
    family: str
    configs: tuple[str, ...]
    plugin: bool = False
    measured: bool = True


# In the order in which the static defaults ask them; the last of a kind always serves.
ROWS = (
    FamilyRow("blackwell", "PREFILL", ("BlackwellPrefillConfig",), measured=False),
    FamilyRow("hopper", "PREFILL", ("HopperPrefillConfig", "RaggedPrefillConfig")),
    FamilyRow("triton", "PREFILL", ("PrefillConfig", "AmdPrefillConfig")),
    FamilyRow("triton", "DECODE", ("DecodeConfig", "AmdDecodeConfig")),
    FamilyRow("hopper_backward", "BACKWARD", ("HopperBackwardConfig",)),
    FamilyRow("triton_backward", "BACKWARD", ("BackwardConfig", "AmdBackwardConfig")),
    FamilyRow("paged_decode", "PAGED_DECODE", ("ServingConfig",)),
    FamilyRow("neuron", "NKI", ("NkiPrefillConfig", "NkiDecodeConfig"), True),
)
_ROW_OF = {name: row for row in ROWS for name in row.configs}


def _module(row: FamilyRow, name: str) -> Any:
    return import_module(f"flexattn.{'' if row.plugin else 'kernels.'}{row.folder}.{name}")


def plugin_module(backend: str) -> Any:
    """The module `plugin` of what serves a backend that is no GPU's; None for any other."""
    row = next((row for row in ROWS if row.plugin and row.folder == backend), None)
    return None if row is None else _module(row, "plugin")


def config_names() -> tuple[str, ...]:
    """The names of all config classes."""
    return tuple(_ROW_OF)


def config_class(name: str) -> type:
    """The config class of a name of `config_names`."""
    found: type = getattr(_module(_ROW_OF[name], "config"), name)
    return found


def is_config(value: object) -> bool:
    """True if a value is a config of any family."""
    name = type(value).__name__
    return name in _ROW_OF and type(value) is config_class(name)


def backend_of(config: object) -> str:
    """The backend of a config's records: "gpu", or a plug-in's."""
    row = _ROW_OF[type(config).__name__]
    return row.folder if row.plugin else "gpu"


def _family(row: FamilyRow) -> Any:
    return getattr(_module(row, "family"), row.family)


def family_of(config: Any) -> KernelFamily[Any]:
    """The family of a config, by its class."""
    family: KernelFamily[Any] = _family(_ROW_OF[type(config).__name__])
    return family


def short(config: Any) -> str:
    """A config of any family in a table's cell, as 128x64 w4 s2; its family has the legend."""
    return family_of(config).short(config)


def launch_key(config: Any) -> tuple[object, ...]:
    """The parts of a GPU config that decide a launch beside the kernel's code, for any family."""
    return family_of(config).launch_key(config)


def _all(kind: Kind, measured: bool = True) -> list[KernelFamily[Any]]:
    """The families of a kind. measured: only those whose kernels somebody has timed."""
    rows = (row for row in ROWS if not row.plugin and row.measured >= measured)
    return [family for family in map(_family, rows) if family.kind == kind]


def _written_in(kind: Kind, language: Language) -> list[KernelFamily[Any]]:
    """The families of a kind whose templates are in a language, the last row's first."""
    return [each for each in reversed(_all(kind, measured=False)) if each.language == language]


def families(kind: Kind, device: Device) -> tuple[KernelFamily[Any], ...]:
    """The measured families of a kind of calls that a device and the installed Triton can run."""
    return tuple(each for each in _all(kind) if each.offered(device))


def leading(structure: Structure, device: Device) -> Iterator[KernelFamily[Any]]:
    """The families that the static defaults try for a structure, in their order."""
    return (each for each in _all(structure.kind) if each.leads(structure, device))


def by_language(kind: Kind, language: Language, device: Device) -> KernelFamily[Any] | None:
    """The family that kernel_options mean by a language: of several, the last row's that runs."""
    found = _written_in(kind, language)
    return next((each for each in found if each.offered(device)), found[0] if found else None)


def check_rows(kind: Kind, language: Language, rows: int) -> None:
    """Raise ConfigError if no family of a language has tiles of so many rows, on any device."""
    refused = None
    for family in reversed(_written_in(kind, language)):
        try:
            family.check_rows(rows)
        except ConfigError as error:
            refused = error
        else:
            return
    if refused is not None:
        raise refused
