"""The arguments and options of each verb, whose docstring is its help.

typer reads them before anything of the verb is imported: nothing here imports torch, so that help
and completion come at once. The lists of words are held to those of the package by
tests/unit/cli/test_front.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from flexattn.device import INTERPRETER, KNOWN, NEURON
from flexattn.errors import InputError
from flexattn.presets import files
from flexattn.util.text import did_you_mean

KIND_CHOICES = ("prefill", "decode", "backward")
RECORDED_CHOICES = (*KIND_CHOICES, "serving")
EFFORTS = ("quick", "full", "exhaustive")
DTYPE_CHOICES = ("float16", "bfloat16", "float32", "float8_e4m3fn")
ROLES = ("score", "mask")
PARTS = ("expr", "source", "ptx", "resources")
PRESETS = (*files(), "all")
GPUS = tuple(KNOWN)
DEVICES = (*GPUS, *NEURON)
LENGTH = 4096
# The device that is assumed where none is named and none is here.
OFFLINE = "nvidia-h200"


def choice(option: str, word: str, names: Sequence[str], others: Mapping[str, str] = {}) -> str:
    """The name that a word means, in upper or lower case; others: more words for the names.

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
    """A function that completes the beginning of a name."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


MOD = "A name of the catalogue, package.module:function, or ./file.py:function."
ModName = Annotated[str, typer.Argument(metavar="MOD", help=MOD)]
ModArguments = Annotated[
    list[str] | None, typer.Option("--arg", help="An argument of a factory; repeatable.")
]
RoleName = Annotated[
    str | None, option("--as", of=ROLES, help="The role of MOD, where its arity cannot tell.")
]
KindName = Annotated[str, option("--kind", of=KIND_CHOICES, help="The kind of kernel.")]
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
HeadPair = Annotated[
    str,
    typer.Option(metavar="Hq:Hkv", help="Query and key heads: 32:8, or 32 if they are equal."),
]
BlockSize = Annotated[int, typer.Option(help="Block size of a mask's BlockMask.")]
BatchSize = Annotated[int, typer.Option("--B", help="Batch; decode's splits depend on it.")]
QueryLength = Annotated[
    int | None, typer.Option(help=f"Query length; by default 1 for decode, else {LENGTH}.")
]
Problems = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MOD|FILE]...", show_default=False,
        help=f"MODs, or workload files (TOML, YAML or JSON). A MOD: {MOD[0].lower()}{MOD[1:]}",
    ),
]  # fmt: skip
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
           help="A shipped workload, repeatable; `flexattn tune --list-presets` has them."),
]  # fmt: skip
Only = Annotated[str | None, typer.Option(help="A regular expression that titles match.")]
EffortName = Annotated[str, option("--effort", of=EFFORTS, help="The part of the space to try.")]


def _device(names: Sequence[str]) -> Any:
    return option(
        "--device", of=names, shown="NAME",
        help="By default this machine's; `flexattn devices` lists the names, and a GPU's "
             "maker may be left out: h200.",
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
        """True where a file or a preset is named."""
        return bool(self.workload or self.preset)


@dataclass(frozen=True, kw_only=True)
class CallSizes:
    """The sizes and options of a MOD's call."""

    arg: ModArguments = None
    role: RoleName = None
    batch: BatchSize = 1
    heads: HeadPair = "32:8"
    head_dim: HeadDim = 128
    head_dim_v: HeadDimV = None
    dtype: Dtype = "bfloat16"
    block_size: BlockSize = 128


@dataclass(frozen=True, kw_only=True)
class AskedProblems(CallSizes, Chosen):
    """Problems of MODs with these sizes too."""

    problems: Problems = None
    kind: AnyKind = None
    q_len: Annotated[int, typer.Option(help="Queries.")] = LENGTH
    kv_len: Annotated[int | None, typer.Option(help="Keys; as many as queries.")] = None

    @property
    def sized(self) -> bool:
        """True where an option of a MOD's call is not its default."""
        others = {"problems", *Chosen.__dataclass_fields__}
        mine = (each for each in fields(AskedProblems) if each.name not in others)
        return any(getattr(self, each.name) != each.default for each in mine)


@dataclass(frozen=True, kw_only=True)
class CallOptions(CallSizes):
    """The call of a problem without its keys: an argument or an option each."""

    mod: ModName
    kind: KindName = "prefill"
    device: DeviceName = None
    q_len: QueryLength = None


@dataclass(frozen=True, kw_only=True)
class Tune(AskedProblems):
    """Tune problems; each record is kept as soon as its problem is done.

    Ctrl-C keeps what is finished, and the same command goes on from there. It measures on the
    device: a GPU, or a Neuron instance for trn1, trn2 and trn3.
    """

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
        typer.Option("--again", help="Tune what has a record already, too."),
    ] = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
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
class Why(AskedProblems):
    """Say whether a problem's config is a hit, a hint, the nearest or the default, and why.

    `explain` is another name of `why`.
    """

    device: GpuName = None
    as_json: AsJson = False


@dataclass(frozen=True)
class Merge:
    """Merge directories of records; it keeps the better of two for one key, and prints which."""

    sources: Annotated[list[Path], typer.Argument(help="Directories of records.")]
    out: Annotated[
        Path | None, typer.Option(help="Folder of the merged records; the user's own by default.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Export(Chosen):
    """Collect a device's tuned records in a directory for FLEXATTN_CACHE, each one checked.

    With a workload or a preset, only its problems; those without a record are named, and the
    status is 1. For Trainium it writes the kernels of a workload instead, with their schedules and
    tables.
    """

    out: Annotated[Path, typer.Argument(help="The directory; what lies there stays.")]
    source: Annotated[
        list[Path] | None,
        typer.Option("--from", help="A directory of records; every layer by default."),
    ] = None
    device: DeviceName = None
    with_binaries: Annotated[
        bool, typer.Option("--with-binaries", help="Compiled kernels too, of a workload.")
    ] = False


@dataclass(frozen=True)
class Report:
    """Write one HTML page about tuned records: speedups by model, spaces, limits, why winners won.

    It has its pictures inside, and needs no other file.
    """

    records: Annotated[
        list[Path] | None,
        typer.Argument(help="Record files, or directories of records; by default every layer."),
    ] = None
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("report")
    bench: Annotated[
        list[Path] | None, typer.Option(help="JSON of a bench: ours beside torch; repeatable.")
    ] = None
    png: Annotated[
        bool, typer.Option("--png", help="The pictures as PNG files beside the page, too.")
    ] = False


@dataclass(frozen=True)
class ReplayStudy:
    """Recompute decisions from their samples; the status is 1 if one comes out differently."""

    paths: Annotated[list[Path], typer.Argument(help="Record files, or directories of records.")]


@dataclass(frozen=True, kw_only=True)
class Bench(AskedProblems):
    """Is it faster for me? Times of flexattn beside torch's flex and other libraries' attention.

    Without a MOD, a file or a preset it times four calls of Llama-3 and Gemma-2; with sizes it
    times a call without mods. The others are SDPA, and FlashAttention 2, 3, 4 and FlashInfer if
    they can be imported. A ratio above 1 means that flexattn is faster. The status is 1 if an
    accuracy gate is red. It writes a page with a chart, except with --json. Without a GPU it
    prints what it would time. Gradients are left out.
    """

    rounds: Annotated[int, typer.Option(min=3, help="Rounds of each interleaved race.")] = 20
    min_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds that each value fills.")] = (
        5.0
    )
    rivals: Annotated[
        bool,
        typer.Option("--torch/--no-torch", help="Time torch's kernel and other libraries too."),
    ] = True
    out: Annotated[Path, typer.Option(help="Folder for the page with a chart.")] = Path(
        "bench-report"
    )
    as_json: AsJson = False


@dataclass(frozen=True)
class Doctor:
    """Look at the installation, the GPU and the caches; the first line says what works here.

    The status is 1 if something is broken.
    """

    device: GpuName = None
    clear_outcomes: Annotated[
        bool,
        typer.Option("--clear-outcomes", help="Forget what was refused."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class Render(CallOptions):
    """Show the expression, the kernel's source, its PTX's path or the resources it takes."""

    kv_len: Annotated[
        int | None,
        typer.Option(help=f"Key length; a prefill's query length, else {LENGTH}."),
    ] = None
    kernel_option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", metavar="NAME=VALUE",
            help="One of `kernel_options`, as BLOCK_M=64 or TANH=fast; repeatable.",
        ),
    ] = None  # fmt: skip
    show: Annotated[
        list[str] | None,
        option("--show", of=PARTS, help="Repeatable; by default expr and source."),
    ] = None
    explain: Annotated[
        bool, typer.Option(help="Print the rules that rewrote the score_mod, and its terms.")
    ] = False
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
