"""KernelFamily: what one family of kernels answers of its configs, from a search to a launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from flexattn.device import Device
from flexattn.kernels.base.config import Config, Language
from flexattn.kernels.base.feasibility import Feasibility
from flexattn.kernels.base.source import Source
from flexattn.kernels.base.tiles import Geometry
from flexattn.problem import Kind, Problem, Structure

__all__ = ["Around", "Effort", "KernelFamily"]

Effort = Literal["quick", "full", "exhaustive"]
C = TypeVar("C", bound=Config)


class Around(NamedTuple):
    """What a backward launches before and after its kernel, each `programs` programs.

    scratch: names and shapes of float32 memory that all three share.
    """

    before: Source
    after: Source
    programs: int
    scratch: tuple[tuple[str, tuple[int, ...]], ...]


class KernelFamily(Protocol[C]):
    """The kernels of one template for calls of one kind.

    name: its folder's; two families may share one. kind: of the calls that it serves. language:
    what its template is written in. feasibility: which configs can run, and why others cannot.
    """

    name: str
    kind: Kind
    language: Language
    feasibility: Feasibility

    def offered(self, device: Device) -> bool:
        """Whether the installed Triton, and the device, have what the template is written in."""

    def leads(self, structure: Structure, device: Device) -> bool:
        """Whether the static defaults try it, in the registry's order; the last of a kind always.

        `offered` is not asked before it.
        """

    def defaults(self, problem: Problem, device: Device) -> Iterator[C]:
        """Configs to start from, best first, cut to the mask's blocks; not all of them can run."""

    def variants(self, config: C) -> Iterator[C]:
        """A config, then its tiles compiled otherwise."""

    def axes(self, problem: Problem, device: Device, effort: Effort) -> Iterator[C]:
        """Every combination that a search may try; some cannot run."""

    def tile(self, config: C) -> C:
        """The config without what changes neither its tiles nor what they take."""

    def uncompiled(self, config: C) -> C:
        """The config without what says how it is compiled."""

    def of_this_compiler(self, config: C) -> C:
        """A config that another Triton measured, as this one compiles it."""

    def fit_to_mask(self, config: C, structure: Structure) -> C:
        """The config with its tiles cut to the mask's blocks."""

    def without_hints(self, config: C, structure: Structure, device: Device) -> C:
        """The config without hints of kernel_options that mean nothing here, which is logged."""

    def check_rows(self, rows: int) -> None:
        """Raise ConfigError for kernel_options' BLOCK_M where no tile has as many rows."""

    def forced(self, config: C, numbers: Mapping[str, Any]) -> C:
        """The config with what kernel_options ask for, by the names of Options."""

    def options_of(self, config: C) -> dict[str, int | bool | str]:
        """The kernel_options that force a config, as far as there are options for its numbers."""

    def grid(self, problem: Problem, config: C, device: Device) -> Geometry:
        """Programs of a launch; raises ConfigError where the sizes do not allow the config."""

    def at_sizes(self, config: C, measured: Problem, problem: Problem, device: Device) -> C:
        """A config measured at some sizes as it serves a problem of other sizes."""

    def render(self, structure: Structure, config: C, device: Device, title: str) -> Source:
        """The kernel; title goes into its header."""

    def combine(self, structure: Structure, device: Device) -> Source | None:
        """The kernel that merges the splits of this family's kernels."""

    def values_kernel(self, structure: Structure, config: C, device: Device) -> Source | None:
        """The kernel that lays V out anew before a launch; None where it is read as it lies."""

    def around(self, problem: Problem, config: C, device: Device) -> Around | None:
        """The kernels around a backward's own; None where it needs none."""

    def bind(self, problem: Problem, config: C, grid: Geometry) -> dict[str, Any]:
        """Values of the arguments that this family's kernels alone have, by name."""

    def launch_key(self, config: C) -> tuple[object, ...]:
        """What of a config decides a launch beside the kernel's code."""

    def short(self, config: C) -> str:
        """A config in a table's cell."""
