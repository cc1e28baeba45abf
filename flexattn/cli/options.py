"""What each verb is asked for: its arguments and options, whose docstring is its help.

typer reads them before anything of the verb is imported, so no torch stands behind --help.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from flexattn.cli.arguments import (
    BACKENDS,
    LENGTH,
    PARTS,
    RECORDED_CHOICES,
    TANHS,
    AnyKind,
    AnyMod,
    AsJson,
    BatchSize,
    BlockSize,
    CallOptions,
    Chosen,
    DeviceName,
    Dtype,
    EffortName,
    GpuName,
    HeadDim,
    HeadDimV,
    KeyHeads,
    ModArguments,
    QueryHeads,
    RoleName,
    Workloads,
    option,
)


@dataclass(frozen=True, kw_only=True)
class Tune(Chosen):
    """Tune a workload's problems; each record is kept as soon as its problem is done.

    Ctrl-C keeps what is finished, and the same command goes on from there. For trn1, trn2 and trn3
    a cost model ranks the configs, on any machine; on a Neuron instance its best ones are built
    and measured.
    """

    workload: Workloads = None
    list_presets: Annotated[
        bool, typer.Option("--list-presets", help="List the presets and stop.")
    ] = False
    from_untuned: Annotated[
        bool,
        typer.Option(
            "--from-untuned",
            help="Tune what dispatch listed in untuned.jsonl, or in lists in the files' place.",
        ),
    ] = False
    effort: EffortName = "full"
    budget: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds of measuring for each problem.")
    ] = None
    time: Annotated[
        float | None,
        typer.Option("--time", min=0.0, help="Seconds after which no further problem begins."),
    ] = None
    device: DeviceName = None
    storage: Annotated[
        str | None, typer.Option(help="An Optuna storage URL that many machines share.")
    ] = None
    jobs: Annotated[int, typer.Option(min=0, help="Processes that compile; 0 for all cores.")] = 0
    out: Annotated[
        Path | None, typer.Option(help="Directory of the records; the user's own by default.")
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List problems and spaces; needs no GPU.")
    ] = False
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Each new record replaces older ones of its problem that the same Triton made.",
        ),
    ] = False
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Tune what has a record already too; in --storage, what was finished.",
        ),
    ] = False
    as_json: AsJson = False


@dataclass(frozen=True)
class Build(CallOptions):
    """Compile every config of a space, for a device that need not be here.

    The status is 1 where the compiler failed on one, or nothing is left to time.
    """

    device: GpuName = None
    kv_len: Annotated[int, typer.Option(help="Key length.")] = LENGTH
    effort: EffortName = "full"
    jobs: Annotated[int, typer.Option(help="Processes that compile; 0 for all cores.")] = 0
    deadline: Annotated[
        float, typer.Option(help="Seconds after which one config's compiler is killed.")
    ] = 120.0
    as_json: AsJson = False


@dataclass(frozen=True)
class Show:
    """List tuned records: speedup over the static default, how sure it is, winner and sizes."""

    folders: Annotated[
        list[Path] | None, typer.Argument(help="Directories of records; by default every layer.")
    ] = None
    kind: Annotated[
        str | None,
        option("--kind", of=RECORDED_CHOICES, help="Records of one kind alone."),
    ] = None
    device: Annotated[str | None, typer.Option(help="A device's name, or part of it.")] = None
    model: Annotated[str | None, typer.Option(help="A regular expression that titles match.")] = (
        None
    )
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class Why(Chosen):
    """Say whether a problem's config is a hit, a hint, the nearest or the default, and why.

    The problem is that of MOD, or those of a workload or a preset.
    """

    mod: AnyMod = None
    arg: ModArguments = None
    role: RoleName = None
    kind: AnyKind = None
    batch: BatchSize = 1
    hq: QueryHeads = 32
    hkv: KeyHeads = 8
    q_len: Annotated[int, typer.Option(help="Queries.")] = LENGTH
    kv_len: Annotated[int | None, typer.Option(help="Keys; as many as queries.")] = None
    head_dim: HeadDim = 128
    head_dim_v: HeadDimV = None
    dtype: Dtype = "bfloat16"
    block_size: BlockSize = 128
    device: GpuName = None
    as_json: AsJson = False


@dataclass(frozen=True)
class Merge:
    """Merge directories of records: of two for one key the better one stays, and it is said."""

    sources: Annotated[list[Path], typer.Argument(help="Directories of records.")]
    out: Annotated[
        Path | None, typer.Option(help="Where they go; the user's own records by default.")
    ] = None
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class Export(Chosen):
    """Collect a device's tuned records in a directory for FLEXATTN_CACHE, each one checked.

    With a workload or a preset, only its problems; those without a record are named, and the
    status is 1.
    """

    out: Annotated[Path, typer.Argument(help="The directory; what lies there stays.")]
    source: Annotated[
        list[Path] | None,
        typer.Option("--from", help="A directory of records; every layer by default."),
    ] = None
    device: GpuName = None
    with_binaries: Annotated[
        bool, typer.Option("--with-binaries", help="Compiled kernels too, of a workload.")
    ] = False
    as_json: AsJson = False


@dataclass(frozen=True)
class Report:
    """Write one HTML page about tuned records: speedups by model, spaces, limits, why winners won.

    It has its pictures inside, and needs no other file.
    """

    records: Annotated[
        list[Path] | None, typer.Argument(help="Record files, or folders of them.")
    ] = None
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("report")
    cache: Annotated[
        list[Path] | None,
        typer.Option(help="A directory of records, all of them shown; repeatable."),
    ] = None
    bench: Annotated[
        list[Path] | None, typer.Option(help="JSON of a bench: ours beside torch; repeatable.")
    ] = None
    png: Annotated[
        bool, typer.Option("--png", help="The pictures as PNG files beside the page, too.")
    ] = False
    as_json: AsJson = False


@dataclass(frozen=True)
class ReplayStudy:
    """Recompute decisions from their samples; the status is 1 if one comes out differently.

    A study is tuned again, with times drawn from it.
    """

    paths: Annotated[
        list[Path], typer.Argument(help="Record files, studies, or directories of records.")
    ]
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class Bench(Chosen):
    """Time a workload as dispatch serves it, beside the static default and torch's compiled flex.

    Above 1 a ratio says that flexattn is faster. The status is 1 if an accuracy gate is red.
    Gradients are left out: python -m bench.backward times those.
    """

    workload: Workloads = None
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of each interleaved race.")] = 20
    min_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds that each value fills.")] = (
        5.0
    )
    rivals: Annotated[
        bool, typer.Option("--torch/--no-torch", help="Compile and time torch's kernel too.")
    ] = True
    as_json: AsJson = False


@dataclass(frozen=True)
class Doctor:
    """Look at the installation, the GPU and the caches; the last line says what works here.

    The status is 1 if something is broken.
    """

    device: GpuName = None
    clear_outcomes: Annotated[
        bool,
        typer.Option("--clear-outcomes", help="Forget what was refused."),
    ] = False
    as_json: AsJson = False


@dataclass(frozen=True)
class Render(CallOptions):
    """Show the expression, the kernel's source, its PTX's path or the resources it takes."""

    kv_len: Annotated[
        int | None,
        typer.Option(help=f"Key length; a prefill's query length, else {LENGTH}."),
    ] = None
    block_m: Annotated[int | None, typer.Option(help="Force BLOCK_M.")] = None
    block_n: Annotated[int | None, typer.Option(help="Force BLOCK_N.")] = None
    num_warps: Annotated[int | None, typer.Option(help="Force num_warps.")] = None
    num_stages: Annotated[int | None, typer.Option(help="Force num_stages.")] = None
    split_kv: Annotated[int | None, typer.Option(help="Force SPLIT_KV.")] = None
    use_tma: Annotated[bool | None, typer.Option(help="Force USE_TMA.")] = None
    backend: Annotated[
        str | None,
        option("--backend", of=BACKENDS, help="Force a prefill's template; GLUON is "
               "Hopper's."),
    ] = None  # fmt: skip
    show: Annotated[
        list[str] | None,
        option("--show", of=PARTS, help="Repeatable; by default expr and source."),
    ] = None
    explain: Annotated[
        bool, typer.Option(help="Print the rules that rewrote the score_mod, and its terms.")
    ] = False
    rules_off: Annotated[
        str | None, typer.Option(help='Rules to leave out, separated by commas, or "all".')
    ] = None
    tanh: Annotated[str | None, option("--tanh", of=TANHS, help="How tanh is computed.")] = None
    as_json: AsJson = False


@dataclass(frozen=True)
class Devices:
    """List what --device takes: GPUs, and Neuron's chips for `tune` and `render`."""


@dataclass(frozen=True)
class Demo:
    """Llama-3 and Gemma-2 attention beside torch's, checked against a float64 oracle.

    Without a GPU the kernels run in Triton's interpreter and are compiled for an H200.
    """

    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("demo-out")
    part: Annotated[str | None, typer.Option(hidden=True)] = None
