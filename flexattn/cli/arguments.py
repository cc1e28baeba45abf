"""Arguments and options that verbs share, the words that they take, and how one call is named.

Nothing here imports torch, so that help and completion come at once. The lists of words are held
to those of the package by tests/unit/cli/test_front.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

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
LENGTH = 4096
# The device that is assumed where none is named and none is here.
OFFLINE = "nvidia-h200"


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


MOD = "A name of the catalogue, package.module:function, or ./file.py:function."
ModName = Annotated[str, typer.Argument(metavar="MOD", help=MOD)]
AnyMod = Annotated[str | None, typer.Argument(metavar="[MOD]", help=MOD, show_default=False)]
ModArguments = Annotated[
    list[str] | None, typer.Option("--arg", help="An argument of a factory; repeatable.")
]
RoleName = Annotated[
    str | None, option("--as", of=ROLES, help="What MOD is, where arity cannot tell.")
]
KindName = Annotated[str, option("--kind", of=KIND_CHOICES, help="What the kernel computes.")]
AnyKind = Annotated[
    str | None, option("--kind", of=KIND_CHOICES, help="The lengths decide by default.")
]
HeadDim = Annotated[int, typer.Option(help="Head dimension of query and key.")]
HeadDimV = Annotated[
    int | None, typer.Option(help="Head dimension of value; the same by default.")
]
Dtype = Annotated[
    str,
    option("--dtype", of=DTYPE_CHOICES, help="bf16, fp16, fp32 and fp8 are understood, too."),
]
QueryHeads = Annotated[int, typer.Option("--Hq", help="Query heads.")]
KeyHeads = Annotated[int, typer.Option("--Hkv", help="Key heads.")]
BlockSize = Annotated[int, typer.Option(help="Block size of a mask's BlockMask.")]
BatchSize = Annotated[int, typer.Option("--B", help="Batch; decode's splits depend on it.")]
QueryLength = Annotated[
    int | None, typer.Option(help=f"Query length; by default 1 for decode, else {LENGTH}.")
]
Workloads = Annotated[
    list[Path] | None,
    typer.Argument(metavar="WORKLOADS", help="Workload files, TOML, YAML or JSON."),
]
WorkloadFiles = Annotated[
    list[Path] | None, typer.Option("--workload", help="A workload file's problems; repeatable.")
]
AllowedModules = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-module",
        help="A module whose functions workload files may name, which runs its code; repeatable.",
    ),
]
Presets = Annotated[
    list[str] | None,
    option("--preset", of=PRESETS, shown="NAME",
           help=f"A shipped workload, repeatable: {', '.join(PRESETS)}."),
]  # fmt: skip
Only = Annotated[str | None, typer.Option(help="A regular expression that titles match.")]
EffortName = Annotated[str, option("--effort", of=EFFORTS, help="How much of the space.")]


def _device(names: Sequence[str]) -> Any:
    return option(
        "--device", of=names, shown="NAME",
        help=f"By default the one that is here. {', '.join(names)}; a GPU's maker may be left "
             "out: h200.",
    )  # fmt: skip


DeviceName = Annotated[str | None, _device(DEVICES)]
GpuName = Annotated[str | None, _device(GPUS)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Problems of workload files and presets, of all or of those whose titles match."""

    workload: WorkloadFiles = None
    preset: Presets = None
    only: Only = None
    allow_module: AllowedModules = None

    @property
    def named(self) -> bool:
        """Whether a file or a preset is."""
        return bool(self.workload or self.preset)


@dataclass(frozen=True)
class CallOptions:
    """The call of a problem but for its keys: an argument or an option each."""

    mod: ModName
    arg: ModArguments = None
    role: RoleName = None
    kind: KindName = "prefill"
    head_dim: HeadDim = 128
    head_dim_v: HeadDimV = None
    dtype: Dtype = "bfloat16"
    device: DeviceName = None
    hq: QueryHeads = 32
    hkv: KeyHeads = 8
    block_size: BlockSize = 128
    batch: BatchSize = 1
    q_len: QueryLength = None
