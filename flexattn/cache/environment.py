"""Where records hold exactly: what this process, its templates and its device are, as fields."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from flexattn import cuda_driver, mods, render
from flexattn.cache.record import SCHEMA, Environment, Policy
from flexattn.device import Device
from flexattn.problem import Kind
from flexattn.ptx.assembler import triton_version
from flexattn.render.environment import template_hash

__all__ = ["RecordKind", "environment", "renderer_hash", "serving_policy", "source_hash"]

# What there are records of: a call's kinds, and what a DecodePlan launches.
RecordKind: TypeAlias = Kind | Literal["serving"]

# What prints for plain torch, or runs in the interpreter, decides no compiled kernel.
_NOT_RENDERING = ("torch_printer.py", "interpreted_math.py", "interpreted_gluon.py")
# What ends a cascade: no record names a config of it, or was timed with it.
_OF_CASCADES = ("serving_join.py",)
# What renders a plan's kernels alone.
_OF_SERVING = ("serving.py", "serving_await.py", "serving_layouts.py", "serving_reads.py")
# How a score_mod is taken apart, after its fingerprint was made.
_OF_MODS = ("dependence.py", "rules.py", "terms.py")
# What becomes of the Hopper template's PTX.
_OF_GLUON = "ptx/merge_consumers.py"
_DOCSTRING = re.compile(r'^[ \t]*r?"""(?:.|\n)*?"""[ \t]*$', re.MULTILINE)
# With a quote behind it this may be the inside of a string, which counts.
_COMMENT = re.compile(r"""(^|[ ]{2})[ \t]*#[^"'\n]*$""", re.MULTILINE)


def serving_policy(kind: RecordKind, device: Device) -> tuple[bool, bool]:
    """(graph, cold_l2) of the records that dispatch takes for its own.

    Servers replay decode as CUDA graphs and launch prefill eagerly; in both the rest of a model
    has run since the same layer's last call, so the L2 cache holds nothing of it. The interpreter
    and Neuron have neither.
    """
    if device.backend in ("interpreter", "neuron"):
        return False, False
    return kind != "prefill", True


def environment(kind: RecordKind, device: Device, policy: Policy | None = None) -> Environment:
    """The environment of records of a kind's template, measured by a policy (dispatch's if None).

    It is computed once per process, kind and device.
    """
    graph, cold = (
        serving_policy(kind, device) if policy is None else (policy.graph, policy.cold_l2)
    )
    return _environment(kind, device, graph, cold)


@lru_cache(maxsize=64)
def _environment(kind: RecordKind, device: Device, graph: bool, cold_l2: bool) -> Environment:
    return Environment(
        schema=SCHEMA,
        template=source_hash(kind, device.has_wgmma),
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


@lru_cache(maxsize=8)
def source_hash(kind: RecordKind, hopper: bool = False) -> str:
    """A hash of all that turns a structure and a config into the kernels of one kind.

    hopper: the Gluon template serves as well.
    """
    names = [f"triton/{kind}.py.jinja", "triton/helpers.jinja"]
    if kind == "decode":
        names.append("triton/combine.py.jinja")
    if kind == "serving":
        names += ["triton/serving_combine.py.jinja", "gluon/serving.py.jinja"]
    gluon = hopper and kind == "prefill"
    if gluon:
        names.append("gluon/prefill.py.jinja")
    parts = [*map(template_hash, names), renderer_hash()]
    if gluon:
        parts.append(renderer_hash("gluon"))
    if kind == "serving":
        parts.append(renderer_hash("serving"))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


@lru_cache(maxsize=3)
def renderer_hash(part: Literal["", "gluon", "serving"] = "") -> str:
    """A hash of the renderer's own sources without comments and docstrings.

    part: of what it has for Gluon's prefill, or for plans, alone; else of what it has for all.
    """
    package = Path(render.__file__).parents[1]
    if part == "serving":
        files = [package / "render" / name for name in _OF_SERVING]
    else:
        left_out = (*_NOT_RENDERING, *_OF_CASCADES, *_OF_SERVING)
        folder = package / "render" / part
        files = sorted(path for path in folder.glob("*.py") if path.name not in left_out)
        files += [Path(mods.__file__).parent / name for name in _OF_MODS]
    if part == "gluon":
        files.append(package / _OF_GLUON)
    text = "\n".join(bare(path.read_text(encoding="utf-8")) for path in files)
    return hashlib.sha256(text.encode()).hexdigest()


def bare(source: str) -> str:
    """Python source without docstrings, comments and empty lines.

    A comment that holds a quote stays: to strip too little costs a hint, too much a wrong hit.
    """
    stripped = _COMMENT.sub("", _DOCSTRING.sub("", source))
    return "\n".join(line.rstrip() for line in stripped.splitlines() if line.strip())


def _driver() -> str:
    """The major version of CUDA that the driver speaks, or HIP's; "" without either."""
    if torch.version.hip:
        return torch.version.hip.split(".")[0]
    # The driver's own word: not every torch that runs on it passes it on.
    version = cuda_driver.version()
    return str(version // 1000) if version else ""
