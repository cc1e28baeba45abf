"""Arguments and options that several verbs share, and how a command line names one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flexattn.cli import choices
from flexattn.cli.choices import option

LENGTH = 4096
# The device that is assumed where none is named and none is here.
OFFLINE = "nvidia-h200"

MOD = "A name of the catalogue, package.module:function, or ./file.py:function."
ModName = Annotated[str, typer.Argument(metavar="MOD", help=MOD)]
AnyMod = Annotated[str | None, typer.Argument(metavar="[MOD]", help=MOD, show_default=False)]
ModArguments = Annotated[
    list[str] | None, typer.Option("--arg", help="An argument of a factory; repeatable.")
]
RoleName = Annotated[
    str | None, option("--as", of=choices.ROLES, help="What MOD is, where arity cannot tell.")
]
KindName = Annotated[
    str, option("--kind", of=choices.KIND_CHOICES, help="What the kernel computes.")
]
AnyKind = Annotated[
    str | None, option("--kind", of=choices.KIND_CHOICES, help="The lengths decide by default.")
]
HeadDim = Annotated[int, typer.Option(help="Head dimension of query and key.")]
HeadDimV = Annotated[
    int | None, typer.Option(help="Head dimension of value; the same by default.")
]
Dtype = Annotated[
    str,
    option(
        "--dtype", of=choices.DTYPE_CHOICES, help="bf16, fp16, fp32 and fp8 are understood, too."
    ),
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
    option("--preset", of=choices.PRESETS, shown="NAME",
           help=f"A shipped workload, repeatable: {', '.join(choices.PRESETS)}."),
]  # fmt: skip
Only = Annotated[str | None, typer.Option(help="A regular expression that titles match.")]
EffortName = Annotated[str, option("--effort", of=choices.EFFORTS, help="How much of the space.")]


def _device(names: Sequence[str]) -> Any:
    return option(
        "--device", of=names, shown="NAME",
        help=f"By default the one that is here. {', '.join(names)}; a GPU's maker may be left "
             "out: h200.",
    )  # fmt: skip


DeviceName = Annotated[str | None, _device(choices.DEVICES)]
GpuName = Annotated[str | None, _device(choices.GPUS)]
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
