"""What turns a structure and a config into the kernels of one kind, and a hash of all of it.

Each kind of kernels has roots, the modules and templates that render it. The hash covers all that
these reach by imports and includes. A family that is not listed has its module `source` and all
its templates for roots. It is coarser than it could be: one module renders prefill and decode.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TypeAlias

from flexattn.device import Device
from flexattn.kernels.base.environment import template_hash, template_text, templates_folder
from flexattn.kernels.choose.registry import families
from flexattn.problem import Kind
from flexattn.records.closure import closure, home, imports_of

# What there are records of: a call's kinds, and what a DecodePlan launches.
RecordKind: TypeAlias = Kind


@dataclass(frozen=True, slots=True)
class Renderer:
    """What renders the kernels of one kind: modules of this package, and templates."""

    modules: tuple[str, ...]
    templates: tuple[str, ...]


_HELPERS = "base/helpers.jinja"
RENDERERS: dict[str, Renderer] = {
    "prefill": Renderer(
        ("kernels.triton.source", "kernels.decay_skip.source"),
        (
            _HELPERS, "triton/prefill.py.jinja", "decay_skip/norms.py.jinja",
            "decay_skip/window.py.jinja",
        ),
    ),
    "decode": Renderer(
        ("kernels.triton.source",), (_HELPERS, "triton/decode.py.jinja", "triton/combine.py.jinja")
    ),
    "backward": Renderer(
        (
            "kernels.triton_backward.source", "kernels.decay_skip.source",
            "kernels.decay_skip.blocks",
        ),
        (
            _HELPERS, "triton_backward/backward.py.jinja", "triton_backward/delta.py.jinja",
            "decay_skip/norms.py.jinja", "decay_skip/window.py.jinja",
            "decay_skip/blocks.py.jinja",
        ),
    ),
    "serving": Renderer(
        ("kernels.paged_decode.source",),
        (
            _HELPERS, "paged_decode/program.py.jinja", "paged_decode/combine.py.jinja",
            "paged_decode/warp.py.jinja", "paged_decode/mla.py.jinja",
            "paged_decode/mla_swap_ab.py.jinja", "paged_decode/warp_specialized.py.jinja",
        ),
    ),
    # Beside those of prefill, on devices that have the instructions.
    "hopper": Renderer(
        ("kernels.hopper.source",),
        ("hopper/prefill.py.jinja",),
    ),
    # Beside those of prefill and decode, on devices whose compiler takes hints.
    "amd": Renderer(("kernels.triton.amd",), ()),
}  # fmt: skip

# Families whose modules are among these.
_LISTED = {module.split(".")[1] for each in RENDERERS.values() for module in each.modules}

# What renderers import that decides no kernel of a record, and why.
NO_TEXT = {
    "errors": "what is said where nothing is rendered",
    "device.device": "what it says of a device is hashed by value",
    "kernels.ptx.assembler": "which of Triton's assemblers: its release, and a config, say it",
    "kernels.printers.interpreted_gluon": "of Triton's interpreter, in which nothing is tuned",
}


@lru_cache(maxsize=16)
def source_hash(kind: RecordKind, device: Device) -> str:
    """A hash of all that turns a structure and a config into the kernels of one kind on a device.

    Comments and docstrings do not count.
    """
    names: list[str] = [kind]
    if kind == "prefill" and device.has_wgmma:
        names.append("hopper")
    if kind in ("prefill", "decode") and device.backend == "hip":
        names.append("amd")
    names += unlisted(kind, device)
    parts = [f"{name}\n{source}" for name, source in rendering(*names).items()]
    parts += [template_hash(name) for each in names for name in renderer_of(each).templates]
    parts.append(_facts(device))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def unlisted(kind: RecordKind, device: Device) -> list[str]:
    """The folders of a kind's families that RENDERERS does not list, on a device that has them."""
    found = (family.name for family in families(kind, device))
    return sorted(set(found) - _LISTED)


def renderer_of(name: str) -> Renderer:
    """Of a name in RENDERERS, or of a family's folder that is not listed there."""
    if name in RENDERERS:
        return RENDERERS[name]
    folder = templates_folder()
    texts = (each.relative_to(folder).as_posix() for each in (folder / name).glob("*.py.jinja"))
    return Renderer((f"kernels.{name}.source",), tuple(sorted(texts)))


def rendering(*names: str) -> dict[str, str]:
    """Every module that decides the text of these kinds' kernels, with its bare source.

    Those that their templates import are among them.
    """
    roots = {f"flexattn.{module}" for name in names for module in renderer_of(name).modules}
    for name in names:
        for template in renderer_of(name).templates:
            roots |= {home(*each) for each in imports_of(template_text(template))}
    return closure(roots, {f"flexattn.{name}" for name in NO_TEXT})


def _facts(device: Device) -> str:
    """All that a renderer may ask a device but its name: fields, and what these decide."""
    decided = (name for name, each in vars(Device).items() if isinstance(each, property))
    names = sorted({*(field.name for field in fields(Device)), *decided} - {"name"})
    return " ".join(f"{name}={getattr(device, name)}" for name in names)
