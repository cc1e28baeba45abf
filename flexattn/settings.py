"""The settings that the environment holds, read here and nowhere else."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast, get_args

from flexattn.errors import SettingsError
from flexattn.util.text import printable

log = logging.getLogger("flexattn")

Mode = Literal["off", "replay", "tune"]
Verify = Literal["off", "first", "always"]


@dataclass(frozen=True, slots=True)
class Settings:
    """One frozen reading of the environment; `override` makes another for a block of code.

    interpret: run the real templates in Triton's CPU interpreter (FLEXATTN_INTERPRET).
    debug: 0 silent, 1 dispatch, 2 timings, 3 expressions, 4 rendered source, 5 IR, 6 PTX
        (FLEXATTN_DEBUG); each level includes those below it.
    cache_dir: where rendered sources and the user's tuned records go (FLEXATTN_CACHE_DIR).
    cache: directories of tuned records that are looked at first (FLEXATTN_CACHE).
    mode: what dispatch takes from records (FLEXATTN_MODE).
    binaries: a directory of compiled kernels and traced mods (FLEXATTN_BINARIES).
    check: lengths and pages of each batch, and what mods read of captured tensors, are checked
        (FLEXATTN_CHECK).
    strict: a first candidate that fails is an error (FLEXATTN_STRICT).
    batch_invariant: rows are reduced in an order that depends on their own keys alone
        (FLEXATTN_BATCH_INVARIANT).
    mods: "module:function" of the mods that layers have in vLLM and SGLang (FLEXATTN_MODS).
    verify: which launches are held to plain torch (FLEXATTN_VERIFY).
    nrtpy_python: of an environment with AWS's nrtpy (FLEXATTN_NRTPY_PYTHON).
    """

    interpret: bool
    debug: int
    cache_dir: Path
    cache: tuple[Path, ...] = ()
    mode: Mode = "replay"
    binaries: Path | None = None
    check: bool = False
    nrtpy_python: Path | None = None
    strict: bool = False
    batch_invariant: bool = False
    mods: str = ""
    verify: Verify = "first"

    def __post_init__(self) -> None:
        if "\0" in str(self.cache_dir):
            raise SettingsError(
                f"cache_dir={str(self.cache_dir)!r}",
                "no path has a NUL in it",
                "name a directory that can be made",
            )


# Name, default, meaning: the table of docs/environment.md is checked against this one.
VARIABLES: tuple[tuple[str, str, str], ...] = (
    (
        "FLEXATTN_INTERPRET",
        "0",
        "1 runs the GPU kernels on CPU tensors in Triton's interpreter. Set it before triton is"
        " imported",
    ),
    (
        "FLEXATTN_DEBUG",
        "0",
        "prints to stderr: 1 dispatch, 2 timings, 3 expressions, 4 rendered source, 5 IR, 6 PTX",
    ),
    (
        "FLEXATTN_CACHE_DIR",
        "~/.cache/flexattn",
        "the directory to which flexattn writes: `kernels` has rendered sources, with what was "
        "refused or verified; `records` has the user's records; `untuned.jsonl` lists problems "
        "without a record",
    ),
    (
        "FLEXATTN_CACHE",
        "",
        "directories of records that calls read, for instance of `flexattn export`, separated "
        "as in PATH. They come before `FLEXATTN_CACHE_DIR/records` and the package's records",
    ),
    (
        "FLEXATTN_MODE",
        "replay",
        "off: calls use only default configs. replay: calls use records, and problems without "
        "one are listed. tune: as replay, and problems with a record of another environment are"
        " listed, too. No mode measures in a process that serves",
    ),
    (
        "FLEXATTN_BINARIES",
        "",
        "a directory that `flexattn export --with-binaries` made. Its kernels are loaded "
        "instead of compiled, and its mods need no trace. A file is not used if another user "
        "(except root) owns it or others may write to it",
    ),
    (
        "FLEXATTN_CHECK",
        "0",
        "1 checks each call on the host. It raises an error if lengths, pages or offsets exceed"
        " a plan's maxima, or if the mods of flex_attention or create_block_mask read outside "
        "of a captured tensor. With 0, kernels clamp the first and read 0 for the second",
    ),
    (
        "FLEXATTN_STRICT",
        "0",
        "1 raises an error if the first choice of a kernel does not compile or load. With 0 the"
        " next one is used. For tests and benchmarks",
    ),
    (
        "FLEXATTN_VERIFY",
        "first",
        "first: before the result of a kernel's first launch is used, some rows are compared "
        "with plain torch, once for each compiler and driver, except for kernels of hits. A "
        "kernel that is too inaccurate is not used. off: nothing is compared. always: every call "
        "is, and every plan when it is built",
    ),
    (
        "FLEXATTN_BATCH_INVARIANT",
        "0",
        "1 makes a row of flex_attention or of a DecodePlan depend on its own query and keys "
        "only, bit for bit: not on the batch, other rows, the SMs or a record. A call that "
        "cannot be so raises an error",
    ),
    (
        "FLEXATTN_MODS",
        "",
        "module:function, for vLLM and SGLang. Each of their processes calls it once for each "
        "attention layer. It returns a dict with the layer's score_mod and mask_mod, or None",
    ),
    (
        "FLEXATTN_NRTPY_PYTHON",
        "",
        "the python of an environment with AWS's nrtpy, which times kernels on a Neuron "
        "instance and cannot share nki's environment. The default is the present python",
    ),
)


_FLAGS = tuple(f"FLEXATTN_{each}" for each in ("INTERPRET", "CHECK", "STRICT", "BATCH_INVARIANT"))
# The words that a variable may be, and the same in one sentence.
_WORDS: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(_FLAGS, (("0", "1"), "0 or 1")),
    "FLEXATTN_DEBUG": (tuple("0123456"), "a level from 0 to 6"),
    "FLEXATTN_MODE": (get_args(Mode), f"one of {', '.join(get_args(Mode))}"),
    "FLEXATTN_VERIFY": (get_args(Verify), f"one of {', '.join(get_args(Verify))}"),
}


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Parse an environment; raises SettingsError for a value that is not understood."""
    # A variable that is empty is not set.
    values = {name: environ.get(name) or default for name, default, _ in VARIABLES}
    for name, (words, rule) in _WORDS.items():
        if values[name] not in words:
            got, do = f"{name}={values[name]!r}", f"unset it, or set it to {words[-1]}"
            raise SettingsError(got, f"it is {rule}", do)
    mods = values["FLEXATTN_MODS"]
    if mods and not all(mods.partition(":")):
        raise SettingsError(f"FLEXATTN_MODS={mods!r}", "it names a function as module:function")
    binaries, nrtpy = values["FLEXATTN_BINARIES"], values["FLEXATTN_NRTPY_PYTHON"]
    flags = {name.removeprefix("FLEXATTN_").lower(): values[name] == "1" for name in _FLAGS}
    return Settings(
        debug=int(values["FLEXATTN_DEBUG"]),
        cache_dir=_path(values["FLEXATTN_CACHE_DIR"]),
        cache=tuple(map(_path, filter(None, values["FLEXATTN_CACHE"].split(os.pathsep)))),
        mode=cast(Mode, values["FLEXATTN_MODE"]),
        binaries=_path(binaries) if binaries else None,
        nrtpy_python=_path(nrtpy) if nrtpy else None,
        mods=mods,
        verify=cast(Verify, values["FLEXATTN_VERIFY"]),
        **flags,
    )


def _path(text: str) -> Path:
    """A path with the home directory in place of ~; raises SettingsError where there is none."""
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise SettingsError(f"{text!r} in the environment", "~ is the home of a user of this host")
    return Path(path)


def doubts(environ: Mapping[str, str]) -> Iterator[str]:
    """Warnings of what an environment sets and nothing reads."""
    known = [name for name, _, _ in VARIABLES]
    for name in sorted(environ):
        if name.startswith("FLEXATTN_") and name not in known:
            import difflib  # seldom needed

            near = difflib.get_close_matches(name, known, 1, 0.0)[0]
            yield f"{name} is set, and flexattn has no such variable: did you mean {near}?"
    for each in filter(None, environ.get("FLEXATTN_CACHE", "").split(os.pathsep)):
        if not os.path.isdir(os.path.expanduser(each)):
            yield (
                f"FLEXATTN_CACHE names {each}, which is no directory: no record is found there; "
                "make it, or correct its name"
            )


def importer(name: str, modules: Mapping[str, Any]) -> str:
    """The module that imported a package first, by what it holds of it; nothing where none does.

    modules: sys.modules, which has modules in the order in which their imports began. An import
    within a function leaves nothing behind.
    """

    def inside(path: object) -> bool:
        return isinstance(path, str) and path.partition(".")[0] == name

    # A package may come behind its parts.
    before = list(takewhile(lambda other: not inside(other), modules))
    for other in reversed(before):
        for held in list(getattr(modules[other], "__dict__", {}).values()):
            home = "__name__" if isinstance(held, ModuleType) else "__module__"
            if inside(getattr(held, home, "")):
                return other
    return ""


_override: ContextVar[Settings | None] = ContextVar("flexattn_settings", default=None)


@lru_cache(maxsize=1)
def _from_process() -> Settings:
    for warning in doubts(os.environ):
        say_once(warning)
    settings = read_settings(os.environ)
    if settings.interpret:
        _enter_interpreter()
    if settings.debug and not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("flexattn: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
    return settings


def _enter_interpreter() -> None:
    """Triton decides at its first import whether it interprets or compiles, for the process."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    if "triton" in sys.modules:
        by = importer("triton", sys.modules)
        raise SettingsError(
            "FLEXATTN_INTERPRET=1, but triton is imported already and compiles"
            + (f": {by} imported it" if by else ""),
            "one process interprets or compiles, never both",
            "set FLEXATTN_INTERPRET=1 (or TRITON_INTERPRET=1) before anything imports triton",
        )
    os.environ["TRITON_INTERPRET"] = "1"


def current() -> Settings:
    """The settings in force: the innermost `override`, else the process's environment."""
    return _override.get() or _from_process()


@contextmanager
def override(**changes: object) -> Iterator[Settings]:
    """Settings for a block of code, safe with threads: `with override(debug=3): ...`."""
    if "interpret" in changes:
        raise SettingsError(
            "override(interpret=...)",
            "one process interprets or compiles, never both",
            "set FLEXATTN_INTERPRET=1 before the process starts",
        )
    settings = replace(current(), **changes)  # type: ignore[arg-type]
    token = _override.set(settings)
    try:
        yield settings
    finally:
        _override.reset(token)


def child_environment(*, interpret: bool) -> dict[str, str]:
    """This process's environment, for a child that interprets or for one that compiles."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"FLEXATTN_INTERPRET": str(int(interpret))}


def worker_environment(gpu: int) -> dict[str, str]:
    """The environment of a child that imports as this process does and sees one of its GPUs.

    gpu: its index among those that this process sees. Raises SettingsError where there is none.
    """
    name = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    visible = os.environ.get(name)
    chosen = str(gpu)
    if visible is not None:
        entries = visible.split(",")
        if gpu >= len(entries):
            raise SettingsError(
                f"GPU {gpu} with {name}={visible!r}",
                "GPUs are counted from 0 among those that are visible",
                f"unset {name}, or list more GPUs in it",
            )
        chosen = entries[gpu]
    return dict(os.environ) | {name: chosen, "PYTHONPATH": _import_path()}


def compiler_environment() -> dict[str, str]:
    """The environment of a child that imports as this process does, compiles and sees no GPU."""
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
    return child_environment(interpret=False) | hidden | {"PYTHONPATH": _import_path()}


def neuron_environment(artifacts: Path, target: str) -> dict[str, str]:
    """The environment of a child that builds an NKI kernel for a target and leaves its files."""
    own = {"NKI_ARTIFACTS_DIR": str(artifacts), "NEURON_PLATFORM_TARGET_OVERRIDE": target}
    return dict(os.environ) | own | {"PYTHONPATH": _import_path()}


def neuron_names() -> tuple[str, str]:
    """The target that the environment names for NKI, and the physical cores of a logical one."""
    names = ("NEURON_PLATFORM_TARGET_OVERRIDE", "NEURON_LOGICAL_NC_CONFIG")
    target, cores = (os.environ.get(name, "") for name in names)
    return target, cores


def names_ptxas() -> bool:
    """True if the environment names a ptxas for Triton: the user then wants that one."""
    names = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
    return any(os.environ.get(name) for name in names)


def nrtpy_python() -> str:
    """The python that has nrtpy: the one that is named, else this one."""
    return str(current().nrtpy_python or sys.executable)


def _import_path() -> str:
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


@lru_cache(maxsize=256)
def say_once(message: str, level: int = logging.WARNING) -> None:
    """Log a message once in this process.

    A warning is for whoever has something to mend, and Python prints it on stderr where nobody
    set logging up. INFO, which nothing shows until it is asked for, is all else.
    """
    log.log(level, "%s", printable(message))


def _at_import() -> None:
    """Triton reads TRITON_INTERPRET at its first import, which may come with the next one.

    A value that is not understood raises at the first use: the command line can show that.
    """
    try:
        read_settings(os.environ)
    except SettingsError:
        return
    _from_process()


_at_import()
