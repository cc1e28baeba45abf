"""The environment in which records hold: this process, its device, and a hash of what renders.

Each kind of kernels has roots, its templates and the modules that render them. The hash covers all
that these reach by imports and includes. A family that is not listed has all its templates. It
is coarser than it could be: one module renders prefill and decode.
Imports are read from text by regular expressions, at the first lookup of every process: Python's
own parser takes twenty times as long. tests/unit/records/test_closure.py compares the two.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

import torch

from flexattn.device import Device, cuda_driver
from flexattn.kernels.base.environment import template_hash, template_text, templates_folder
from flexattn.kernels.choose.registry import families
from flexattn.kernels.ptx.assembler import triton_version
from flexattn.problem import Kind
from flexattn.records.record import SCHEMA, Environment, Policy

# The templates of each kind's kernels, rendered by `source` of their folder in kernels/.
_HELPERS = "base/helpers.jinja"
_NORMS, _WINDOW = "decay_skip/norms.py.jinja", "decay_skip/window.py.jinja"
TEMPLATES: dict[str, tuple[str, ...]] = {
    "prefill": (_HELPERS, "triton/prefill.py.jinja", _NORMS, _WINDOW),
    "decode": (_HELPERS, "triton/decode.py.jinja", "triton/combine.py.jinja"),
    "backward": (
        _HELPERS, "triton_backward/backward.py.jinja", "triton_backward/delta.py.jinja", _NORMS,
        _WINDOW, "decay_skip/blocks.py.jinja",
    ),
    "serving": (
        _HELPERS, "paged_decode/program.py.jinja", "paged_decode/combine.py.jinja",
        "paged_decode/warp.py.jinja", "paged_decode/mla.py.jinja",
        "paged_decode/mla_swap_ab.py.jinja", "paged_decode/warp_specialized.py.jinja",
    ),
    # Beside those of prefill, on devices that have the instructions.
    "hopper": (
        "hopper/prefill.py.jinja", "hopper/transpose_v.py.jinja", "hopper/widen_v.py.jinja",
    ),
}  # fmt: skip
_LISTED = {each.split("/")[0] for templates in TEMPLATES.values() for each in templates}

# What renderers import that decides no kernel of a record, and why.
NO_TEXT = {
    "errors": "it has only the words of errors",
    "device.device": "what it says of a device is hashed by value",
    "kernels.ptx.assembler": "which of Triton's assemblers: its release, and a config, say it",
    "kernels.printers.interpreted_gluon": "of Triton's interpreter, in which nothing is tuned",
}


@lru_cache(maxsize=16)
def source_hash(kind: Kind, device: Device) -> str:
    """A hash of all that turns a structure and a config into the kernels of one kind on a device.

    Comments and docstrings do not count.
    """
    names: list[str] = [kind]
    if kind == "prefill" and device.has_wgmma:
        names.append("hopper")
    names += unlisted(kind, device)
    parts = [f"{name}\n{source}" for name, source in rendering(*names).items()]
    parts += [template_hash(name) for each in names for name in templates_of(each)]
    parts.append(_facts(device))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def unlisted(kind: Kind, device: Device) -> list[str]:
    """The folders of a kind's families that TEMPLATES does not list, on a device that has them."""
    found = (family.name for family in families(kind, device))
    return sorted(set(found) - _LISTED)


def templates_of(name: str) -> tuple[str, ...]:
    """The templates of a name in TEMPLATES, or of a family's folder that is not listed there."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    folder = templates_folder()
    texts = (each.relative_to(folder).as_posix() for each in (folder / name).glob("*.py.jinja"))
    return tuple(sorted(texts))


def roots_of(*names: str) -> set[str]:
    """The modules that render these kinds' kernels, and those that their templates import."""
    templates = [each for name in names for each in templates_of(name)]
    found = {home(*each) for name in templates for each in imports_of(template_text(name))}
    folders = {each.split("/")[0] for each in templates} - {"base"}
    return found | {f"{_NAME}.kernels.{each}.source" for each in folders}


def rendering(*names: str) -> dict[str, str]:
    """Every module that decides the text of these kinds' kernels, with its bare source."""
    return closure(roots_of(*names), {f"{_NAME}.{name}" for name in NO_TEXT})


def _facts(device: Device) -> str:
    """All that a renderer may ask a device but its name: fields, and what these decide."""
    decided = (name for name, each in vars(Device).items() if isinstance(each, property))
    names = sorted({*(field.name for field in fields(Device)), *decided} - {"name"})
    return " ".join(f"{name}={getattr(device, name)}" for name in names)


_PACKAGE = Path(__file__).parents[1]
_NAME = _PACKAGE.name
# Strings, comments, and line ends with what goes behind them: a docstring, which follows a colon,
# a comment that has the line alone, and nothing. Each alternative begins with a character of its
# own, so that the scan for the next one is quick.
_LONG = r'""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
_BARE = re.compile(
    rf'"(?:{_LONG}|[^"\\\n]*(?:\\.[^"\\\n]*)*")'
    r"|'(?:''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''|[^'\\\n]*(?:\\.[^'\\\n]*)*')"
    r"|#[^\n]*"
    rf'|\n(?:(?<=:\n)[ ]*r?"{_LONG}(?=\n)|[ ]*#[^\n]*|(?=\n))',
    re.DOTALL,
)
_CHECKED_ONLY = re.compile(r"^([ ]*)if TYPE_CHECKING:\n(?:\1[ ]+[^\n]*\n|\n)+", re.MULTILINE)
_FROM = re.compile(rf"from {_NAME}([\w.]*) import (?:\(([^)]*)\)|([^\n]+))")
_WHOLE = re.compile(rf"import {_NAME}([\w.]*)")


def bare(source: str) -> str:
    """Python source without docstrings, comments and empty lines; other strings keep theirs."""
    # Behind a colon of its own, a file begins as a function does.
    return _BARE.sub(_string, f":\n{source}")[1:].replace("  \n", "\n").lstrip("\n")


def _string(found: re.Match[str]) -> str:
    return text if (text := found[0])[0] in "\"'" else ""


def imports_of(source: str) -> set[tuple[str, str]]:
    """The imports of this package in bare source, in functions too: (module, name or "").

    What the type checker alone imports is not among it.
    """
    if "TYPE_CHECKING" in source:
        source = _CHECKED_ONLY.sub("", source)
    found = {(_NAME + each[1], "") for each in _WHOLE.finditer(source) if _begins(each)}
    for each in _FROM.finditer(source):
        if _begins(each):
            names = (name.split() for name in (each[2] or each[3]).split(","))
            found |= {(_NAME + each[1], words[0]) for words in names if words}
    return found


def _begins(found: re.Match[str]) -> bool:
    """True if a match has nothing but its indent before it in its line."""
    start = found.start()
    return not found.string[found.string.rfind("\n", 0, start) + 1 : start].strip()


@lru_cache(maxsize=4096)
def module_path(module: str) -> Path | None:
    """The file of a module of this package, by its dotted name; None where there is none."""
    place = _PACKAGE.joinpath(*module.split(".")[1:])
    if (file := place.with_suffix(".py")).is_file():
        return file
    return whole if (whole := place / "__init__.py").is_file() else None


def closure(roots: Iterable[str], stop: Collection[str] = ()) -> dict[str, str]:
    """Every module that `roots` reach by imports, they among them, with its bare source, sorted.

    A name that a package passes on is followed to the module that defines it: importing the
    package for it reaches no other. stop: modules that are left out, with what they alone reach.
    """
    found: dict[str, str] = {}
    todo = list(roots)
    while todo:
        module = todo.pop()
        if module not in found and module not in stop:
            found[module], reached, _ = _read(module)
            todo += reached
    return dict(sorted(found.items()))


@lru_cache(maxsize=512)
def _read(module: str) -> tuple[str, frozenset[str], frozenset[tuple[str, str]]]:
    """A module's bare source, the modules that define what it imports, and its imports."""
    path = module_path(module)
    assert path is not None, f"{module} is no module of this package"
    source = bare(path.read_text(encoding="utf-8"))
    imports = imports_of(source)
    files = {each for each, _ in imports if not _is_package(each)}
    homes = {home(*each) for each in imports if each[0] not in files}
    return source, frozenset((files | homes) - {module}), frozenset(imports)


def _is_package(module: str) -> bool:
    path = module_path(module)
    return path is not None and path.name == "__init__.py"


def home(module: str, name: str) -> str:
    """The module that defines a name which is imported from `module`."""
    if not name or not _is_package(module):
        return module
    if module_path(f"{module}.{name}") is not None:
        return f"{module}.{name}"
    for source, passed in _read(module)[2]:
        if passed == name:
            return home(source, passed)
    return module


def serving_policy(kind: Kind, device: Device) -> tuple[bool, bool]:
    """(graph, cold_l2) of the records that dispatch takes for its own.

    Servers replay decode as CUDA graphs and launch prefill eagerly, as training does a backward;
    in all of them the rest of a model has run since the same layer's last call, so the L2 cache
    holds nothing of it. The interpreter and Neuron have neither.
    """
    if device.backend in ("interpreter", "neuron"):
        return False, False
    return kind not in ("prefill", "backward"), True


def environment(kind: Kind, device: Device, policy: Policy | None = None) -> Environment:
    """The environment of a kind's records, measured by a policy (dispatch's if None)."""
    graph, cold_l2 = (
        serving_policy(kind, device) if policy is None else (policy.graph, policy.cold_l2)
    )
    return Environment(
        schema=SCHEMA,
        template=source_hash(kind, device),
        triton=triton_version(),
        # A plain text: torch's own class parses both versions at every comparison.
        torch=str(torch.__version__),
        driver=_driver(),
        device=device.name,
        arch=device.arch,
        num_sms=device.num_sms,
        graph=graph,
        cold_l2=cold_l2,
    )


def _driver() -> str:
    """The major version of CUDA that the driver speaks, or HIP's; "" without either."""
    if torch.version.hip:
        return torch.version.hip.split(".")[0]
    # The driver's own word: not every torch that runs on it passes it on.
    version = cuda_driver.version()
    return str(version // 1000) if version else ""
