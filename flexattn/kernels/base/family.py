"""KernelFamily: what one family of kernels answers of its configs, from a search to a launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from flexattn.device import Device
from flexattn.kernels.base.config import Config, Geometry, Language, at_rest, check_power, words
from flexattn.kernels.base.limits import Limits
from flexattn.kernels.base.source import Source
from flexattn.problem import Kind, Problem, Structure

Effort = Literal["quick", "full", "exhaustive"]
_C = TypeVar("_C", bound=Config)
_NUMBERS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
# Keys of one program that transposes V of 8 bits, and keys that it permutes among each other.
TRANSPOSED_KEYS, PERMUTED_KEYS = 128, 16


class Around(NamedTuple):
    """The kernels before and after a backward's own, each of `programs` programs.

    before: what makes delta, without and with a gradient of lse. scratch: names and shapes of the
    memory that all share, of four bytes an element. blocks: rows and keys of the tiles that the
    kernel leaves out where their weights vanish; None where it visits all. trim: what finds the
    ends of its walks, where a mask's lists alone do not say them, or packed sequences' tiles.
    sums: what adds up parts of dK and dV behind it, and its programs; None where they are whole.
    """

    before: tuple[Source, Source]
    programs: int
    after: Source | None = None
    scratch: tuple[tuple[str, tuple[int, ...]], ...] = ()
    blocks: tuple[int, int] | None = None
    trim: Source | None = None
    sums: tuple[Source, int] | None = None


class KernelFamily(ABC, Generic[_C]):
    """The kernels of one template for calls of one kind.

    name: its folder's; two families may share one. kind: of the calls that it serves. language:
    what its template is written in. limits: which configs can run, and why others cannot.
    A family says these four, its defaults, axes and grid, and what it renders. All else is
    answered here for a template of one kernel, which every device can compile.
    """

    name: str
    kind: Kind
    language: Language
    limits: Limits[Any]
    # Configs of the quick effort.
    quick = 12

    def offered(self, device: Device) -> bool:
        """True if the installed Triton, and the device, have the language of the template."""
        return True

    def leads(self, structure: Structure, device: Device) -> bool:
        """True if the static defaults try it, in the registry's order; the last of a kind always.

        `offered` is not asked before it.
        """
        return True

    @abstractmethod
    def defaults(self, problem: Problem, device: Device) -> Iterator[_C]:
        """Configs to start from, best first, cut to the mask's blocks; not all of them can run."""

    def can_run(self, problem: Problem, device: Device) -> Callable[[_C], bool]:
        """A function of a config: True if the config breaks no rule for a problem on a device."""
        violated, structure = self.limits.violated, problem.structure
        return lambda config: not violated(config, structure, device)

    def able(self, problem: Problem, device: Device) -> Iterator[_C]:
        """The defaults of the family that can run, in their order."""
        return filter(self.can_run(problem, device), self.defaults(problem, device))

    def at_other_sizes(self, problem: Problem, device: Device) -> Iterator[_C]:
        """Configs of all kernels that come first at other sizes, where that is more than one.

        Not all of them can run.
        """
        return iter(())

    def goes_first(self, problem: Problem, device: Device) -> bool:
        """True if its first config is faster at these sizes than families before it are."""
        return False

    def variants(self, config: _C) -> Iterator[_C]:
        """A config, then its tiles compiled otherwise."""
        yield config

    @abstractmethod
    def axes(self, problem: Problem, device: Device, effort: Effort) -> Iterator[_C]:
        """Every combination that a search may try; some cannot run."""

    def tile(self, config: _C) -> _C:
        """The config without what changes neither its tiles nor what they take."""
        return at_rest(config)

    def template(self, config: _C) -> str:
        """The name of the family's template that a config belongs to."""
        return config.language

    def uncompiled(self, config: _C) -> _C:
        """The config without what says how it is compiled."""
        return config

    def as_rendered(self, config: _C) -> _C:
        """The config without what no text of a kernel depends on, which its header alone names."""
        return config

    def of_this_compiler(self, config: _C) -> _C:
        """A config that another Triton measured, as this one compiles it."""
        return config

    def fit_to_mask(self, config: _C, structure: Structure) -> _C:
        """The config with its tiles cut to the mask's blocks."""
        return config

    def without_hints(self, config: _C, structure: Structure, device: Device) -> _C:
        """The config without hints of kernel_options that mean nothing here, which is logged."""
        return config

    def check_rows(self, rows: int) -> None:
        """Raise ConfigError for kernel_options' BLOCK_M where no tile has as many rows."""
        check_power("BLOCK_M", rows)

    def forced(self, config: _C, numbers: Mapping[str, Any]) -> _C:
        """The config with what kernel_options ask for, by the names of Options.

        Those of the numbers count that it has a field for.
        """
        names = {field.name for field in fields(config)}
        return replace(config, **{name: numbers[name] for name in names & numbers.keys()})

    def options_of(self, config: _C) -> dict[str, int | bool | str]:
        """The kernel_options that force a config, as far as there are options for its numbers."""
        return {name: getattr(config, name) for name in _NUMBERS}

    @abstractmethod
    def grid(self, problem: Problem, config: _C, device: Device) -> Geometry:
        """Programs of a launch; raises ConfigError where the sizes do not allow the config."""

    def serves(self, config: _C, measured: Problem, problem: Problem, device: Device) -> bool:
        """True if a config that was measured at some sizes may serve a problem of other sizes."""
        return True

    def at_sizes(self, config: _C, measured: Problem, problem: Problem, device: Device) -> _C:
        """A config measured at some sizes as it serves a problem of other sizes."""
        return config

    @abstractmethod
    def render(self, structure: Structure, config: _C, device: Device, title: str) -> Source:
        """The kernel; title goes into its header."""

    def combine(self, structure: Structure, device: Device) -> Source | None:
        """The kernel that merges the splits of this family's kernels."""
        return None

    def values_kernel(self, structure: Structure, device: Device) -> Source | None:
        """The kernel that lays V out anew before a launch; None where it is read as it lies."""
        return None

    def sources(
        self, structure: Structure, config: _C, device: Device, title: str
    ) -> tuple[Source, ...]:
        """The kernel, and the one that merges what it leaves, if there is one."""
        merges = self.combine(structure, device)
        attend = self.render(structure, config, device, title)
        return (attend,) if merges is None else (attend, merges)

    def around(self, problem: Problem, config: _C, device: Device) -> Around | None:
        """The kernels around a backward's own; None of other kinds."""
        return None

    def bind(self, problem: Problem, config: _C, grid: Geometry) -> dict[str, Any]:
        """Values of the arguments that this family's kernels alone have, by name."""
        return {}

    def made_deterministic(self, config: _C, structure: Structure) -> _C | None:
        """The config that gives the same bits in every run; None where the template has none."""
        return config

    def invariant(self, problem: Problem, device: Device) -> _C | None:
        """The config of a batch-invariant call; None where the template has no such kernels."""
        return None

    def launch_key(self, config: _C) -> tuple[object, ...]:
        """The parts of a config that decide a launch beside the kernel's code."""
        return config.BLOCK_M, config.num_warps

    def short(self, config: _C) -> str:
        """A config in a table's cell: 128x64 w4 s2, and the words of the knobs that are turned."""
        tile = f"{config.BLOCK_M}x{config.BLOCK_N} w{config.num_warps} s{config.num_stages}"
        return " ".join([tile, *words(config)])
