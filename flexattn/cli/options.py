"""The arguments and options of each verb, whose docstring is its help.

typer reads them before anything of the verb is imported: nothing here imports torch, so that help
and completion come at once. The lists of words are held to those of the package by
tests/unit/cli/test_front.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

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
# Where a field has what typer reads of it.
TYPER = "typer"


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


def option(default: Any, help: str, *flags: str, of: Sequence[str] = (), **about: Any) -> Any:
    """A field that is an option. of: its choices, which help shows and TAB completes."""
    if of:
        about = {"metavar": "|".join(of), "autocompletion": completing(of)} | about
    made = typer.Option(*flags, help=help, **about)
    return field(default=default, metadata={TYPER: made})


def argument(help: str, default: Any = MISSING, **about: Any) -> Any:
    """A field that is an argument; without a default it has to be given."""
    return field(default=default, metadata={TYPER: typer.Argument(help=help, **about)})


def completing(names: Sequence[str]) -> Callable[[str], list[str]]:
    """A function that completes the beginning of a name."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


MOD = "A name of the catalogue, package.module:function, or ./file.py:function."
JOBS = "Processes that compile; 0 for all cores."


def _device(names: Sequence[str]) -> Any:
    return option(
        None,
        "By default this machine's; `flexattn devices` lists the names, and a GPU's maker may be "
        "left out: h200.",
        of=names, metavar="NAME",
    )  # fmt: skip


def _effort() -> Any:
    return option("full", "The part of the space to try.", of=EFFORTS)


def _as_json() -> Any:
    return option(False, "Print one JSON object.", "--json")


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Problems of workload files and presets, of all or of those whose titles match."""

    workload: list[Path] | None = option(None, "A workload file's problems; repeatable.")
    preset: list[str] | None = option(
        None, "A shipped workload, repeatable; `flexattn tune --list-presets` has them.",
        of=PRESETS, metavar="NAME",
    )  # fmt: skip
    only: str | None = option(None, "A regular expression that titles match.")
    allow_module: list[str] | None = option(
        None,
        "A module whose functions workload files may name, which runs its code; repeatable.",
    )

    @property
    def named(self) -> bool:
        """True where a file or a preset is named."""
        return bool(self.workload or self.preset)


@dataclass(frozen=True, kw_only=True)
class CallSizes:
    """The sizes and options of a MOD's call."""

    arg: list[str] | None = option(None, "An argument of a factory; repeatable.")
    role: str | None = option(
        None, "The role of MOD, where its arity cannot tell.", "--as", of=ROLES
    )
    batch: int = option(1, "Batch; decode's splits depend on it.", "--B")
    heads: str = option(
        "32:8", "Query and key heads: 32:8, or 32 if they are equal.", metavar="Hq:Hkv"
    )
    head_dim: int = option(128, "Head dimension of query and key.")
    head_dim_v: int | None = option(None, "Head dimension of value; the same by default.")
    dtype: str = option(
        "bfloat16", "bf16, fp16, fp32 and fp8 are understood, too.", of=DTYPE_CHOICES
    )
    block_size: int = option(128, "Block size of a mask's BlockMask.")


@dataclass(frozen=True, kw_only=True)
class AskedProblems(CallSizes, Chosen):
    """Problems of MODs with these sizes too."""

    problems: list[str] | None = argument(
        f"MODs, or workload files (TOML, YAML or JSON). A MOD: {MOD[0].lower()}{MOD[1:]}",
        None, metavar="[MOD|FILE]...", show_default=False,
    )  # fmt: skip
    kind: str | None = option(None, "The lengths decide by default.", of=KIND_CHOICES)
    q_len: int = option(LENGTH, "Queries.")
    kv_len: int | None = option(None, "Keys; as many as queries.")

    @property
    def sized(self) -> bool:
        """True where an option of a MOD's call is not its default."""
        others = {"problems", *Chosen.__dataclass_fields__}
        mine = (each for each in fields(AskedProblems) if each.name not in others)
        return any(getattr(self, each.name) != each.default for each in mine)


@dataclass(frozen=True, kw_only=True)
class CallOptions(CallSizes):
    """The call of a problem without its keys: an argument or an option each."""

    mod: str = argument(MOD, metavar="MOD")
    kind: str = option("prefill", "The kind of kernel.", of=KIND_CHOICES)
    device: str | None = _device(DEVICES)
    q_len: int | None = option(None, f"Query length; by default 1 for decode, else {LENGTH}.")


@dataclass(frozen=True, kw_only=True)
class Tune(AskedProblems):
    """Tune problems; each record is kept as soon as its problem is done.

    Ctrl-C keeps what is finished, and the same command goes on from there. It measures on the
    device: a GPU, or a Neuron instance for trn1, trn2 and trn3.
    """

    list_presets: bool = option(False, "List the presets and stop.", "--list-presets")
    from_untuned: bool = option(
        False, "Tune what dispatch listed in untuned.jsonl, or in lists in the files' place.",
        "--from-untuned",
    )  # fmt: skip
    effort: str = _effort()
    budget: float | None = option(None, "Seconds of measuring for each problem.", min=0.0)
    time: float | None = option(None, "Seconds after which no further problem begins.", min=0.0)
    device: str | None = _device(DEVICES)
    storage: str | None = option(None, "An Optuna storage URL that many machines share.")
    jobs: int = option(0, JOBS, min=0)
    out: Path | None = option(None, "Directory of the records; the user's own by default.")
    dry_run: bool = option(False, "List problems and spaces; needs no GPU.", "--dry-run")
    prune: bool = option(
        False, "Each new record replaces older ones of its problem that the same Triton made.",
        "--prune",
    )  # fmt: skip
    again: bool = option(False, "Tune what has a record already, too.", "--again")
    as_json: bool = _as_json()


@dataclass(frozen=True, kw_only=True)
class Build(CallOptions):
    """Compile every config of a space, for a device that need not be here.

    The status is 1 where the compiler failed on one, or nothing is left to time.
    """

    device: str | None = _device(GPUS)
    kv_len: int = option(LENGTH, "Key length.")
    effort: str = _effort()
    jobs: int = option(0, JOBS)
    deadline: float = option(120.0, "Seconds after which one config's compiler is killed.")


@dataclass(frozen=True)
class Show:
    """List tuned records: speedup over the static default, how sure it is, winner and sizes."""

    folders: list[Path] | None = argument("Directories of records; by default every layer.", None)
    kind: str | None = option(None, "Records of one kind alone.", of=RECORDED_CHOICES)
    device: str | None = option(None, "A device's name, or part of it.")
    model: str | None = option(None, "A regular expression that titles match.")
    as_json: bool = _as_json()


@dataclass(frozen=True, kw_only=True)
class Why(AskedProblems):
    """Say whether a problem's config is a hit, a hint, the nearest or the default, and why.

    `explain` is another name of `why`.
    """

    device: str | None = _device(GPUS)
    as_json: bool = _as_json()


@dataclass(frozen=True)
class Merge:
    """Merge directories of records; it keeps the better of two for one key, and prints which."""

    sources: list[Path] = argument("Directories of records.")
    out: Path | None = option(None, "Folder of the merged records; the user's own by default.")


@dataclass(frozen=True, kw_only=True)
class Export(Chosen):
    """Collect a device's tuned records in a directory for FLEXATTN_CACHE, each one checked.

    With a workload or a preset, only its problems; those without a record are named, and the
    status is 1. For Trainium it writes the kernels of a workload instead, with their schedules and
    tables.
    """

    out: Path = argument("The directory; what lies there stays.")
    source: list[Path] | None = option(
        None, "A directory of records; every layer by default.", "--from"
    )
    device: str | None = _device(DEVICES)
    with_binaries: bool = option(False, "Compiled kernels too, of a workload.", "--with-binaries")


@dataclass(frozen=True)
class Report:
    """Write one HTML page about tuned records: speedups by model, spaces, limits, why winners won.

    It has its pictures inside, and needs no other file.
    """

    records: list[Path] | None = argument(
        "Record files, or directories of records; by default every layer.", None
    )
    out: Path = option(Path("report"), "Folder for the page.")
    bench: list[Path] | None = option(None, "JSON of a bench: ours beside torch; repeatable.")
    png: bool = option(False, "The pictures as PNG files beside the page, too.", "--png")


@dataclass(frozen=True)
class ReplayStudy:
    """Recompute decisions from their samples; the status is 1 if one comes out differently."""

    paths: list[Path] = argument("Record files, or directories of records.")


@dataclass(frozen=True, kw_only=True)
class Bench(AskedProblems):
    """Is it faster for me? Times of flexattn beside torch's flex and other libraries' attention.

    Without a MOD, a file or a preset it times four calls of Llama-3 and Gemma-2; with sizes it
    times a call without mods. The others are SDPA, and FlashAttention 2, 3, 4 and FlashInfer if
    they can be imported. A ratio above 1 means that flexattn is faster. The status is 1 if an
    accuracy gate is red. It writes a page with a chart, except with --json. Without a GPU it
    prints what it would time. Gradients are left out.
    """

    rounds: int = option(20, "Rounds of each interleaved race.", min=3)
    min_ms: float = option(5.0, "Milliseconds that each value fills.", min=0.0)
    rivals: bool = option(
        True, "Time torch's kernel and other libraries too.", "--torch/--no-torch"
    )
    out: Path = option(Path("bench-report"), "Folder for the page with a chart.")
    as_json: bool = _as_json()


@dataclass(frozen=True)
class Doctor:
    """Look at the installation, the GPU and the caches; the first line says what works here.

    The status is 1 if something is broken.
    """

    device: str | None = _device(GPUS)
    clear_outcomes: bool = option(False, "Forget what was refused.", "--clear-outcomes")


@dataclass(frozen=True, kw_only=True)
class Render(CallOptions):
    """Show the expression, the kernel's source, its PTX's path or the resources it takes."""

    kv_len: int | None = option(None, f"Key length; a prefill's query length, else {LENGTH}.")
    kernel_option: list[str] | None = option(
        None, "One of `kernel_options`, as BLOCK_M=64 or TANH=fast; repeatable.", "--option",
        metavar="NAME=VALUE",
    )  # fmt: skip
    show: list[str] | None = option(None, "Repeatable; by default expr and source.", of=PARTS)
    explain: bool = option(False, "Print the rules that rewrote the score_mod, and its terms.")
    as_json: bool = _as_json()


@dataclass(frozen=True)
class Devices:
    """List what --device takes: GPUs, and Neuron's chips for `tune` and `render`."""


@dataclass(frozen=True)
class Demo:
    """Llama-3 and Gemma-2 attention beside torch's, checked against a float64 oracle.

    Without a GPU the kernels run in Triton's interpreter and are compiled for an H200.
    """

    out: Path = option(Path("demo-out"), "Folder for the pictures.")
