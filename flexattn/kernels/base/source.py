"""Source: a rendered kernel, whose header says what it is for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import wrap
from typing import Any, NamedTuple

from flexattn.device import Device
from flexattn.kernels.base.amd import AmdHints, options_of
from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.base.config import Config, Language, pieces
from flexattn.kernels.base.environment import render_template, render_tidy, template_hash
from flexattn.kernels.base.features import fp32_products
from flexattn.kernels.printers.spelling import TRITON, Dialect, triton_type
from flexattn.kernels.printers.triton_printer import Traits
from flexattn.kernels.ptx.assembler import Ptxas, for_split_tiles
from flexattn.kernels.ptx.stages import OWN_STAGES, Stages
from flexattn.mods.expr import in_a_line
from flexattn.problem import Captures, Structure

# Of batch-invariant kernels: whether a product and a sum become one instruction else depends on
# what stands around them.
UNFUSED = (("enable_fp_fusion", False),)
BASE_2 = {"LOG2E": 1.4426950408889634, "LN2": 0.6931471805599453}
# Tensors whose sizes a problem has, by their arguments' names: `Layout.near` is of these.
_SIZED = frozenset(("Q", "K", "V", "OUT", "LSE", "MAX", "DO", "DELTA", "DQ", "DK", "DV"))
# Of templates/base/shared.jinja what few kernels have, for those that do not name it.
_SELDOM: dict[str, object] = dict.fromkeys(
    ("late_sum", "columns", "widens", "scales", "dropout"), False
)


@dataclass(frozen=True, slots=True)
class Source:
    """A rendered kernel: its text, its hash, its arguments, and how to compile it.

    num_warps: as the compiler is told; a warp-specialised kernel starts more. registers: the most
    that a thread may have, 0 for what the compiler finds best. stages: passes over its PTX, and
    which ptxas. hints: options of Triton's compiler, by Triton's names. entry: the
    function that is launched, by which profilers call the kernel. stored: it was read, not
    rendered, and is not compiled.
    """

    text: str
    hash: str
    arguments: tuple[Argument, ...]
    num_warps: int
    num_stages: int
    language: Language = "triton"
    registers: int = 0
    stages: Stages = OWN_STAGES
    hints: tuple[tuple[str, int], ...] = ()
    entry: str = field(default="kernel", compare=False)
    stored: bool = field(default=False, compare=False)

    @property
    def launch_pdl(self) -> bool:
        """True if the kernel waits itself for the one before it: programmatic dependent launch."""
        return "griddepcontrol.wait" in self.text


class _Piece(NamedTuple):
    """One power-of-two tile of a head dimension, as the templates name it."""

    name: str
    start: int
    tile: int
    used: int

    @property
    def end(self) -> int:
        return self.start + self.used


def make_source(
    template: str,
    device: Device,
    header: list[str],
    context: Mapping[str, Any],
    found: Sequence[Argument],
    num_warps: int = 4,
    num_stages: int = 1,
    language: Language = "triton",
    registers: int = 0,
    stages: Stages = OWN_STAGES,
) -> Source:
    """A template with its context, header and arguments as a Source; found: the arguments."""
    lines = [*header, f"template: {template} {template_hash(template)}"]
    lines += [
        f"pass: {name} (flexattn/kernels/{name.replace('.', '/')}.py)" for name in stages.passes
    ]
    entry = entry_of(template)
    names = [argument.name for argument in found]
    text = render_tidy(
        template,
        {
            **_SELDOM,
            **context,
            "constants": context["constants"].items(),
            "entry": entry,
            "interpreted": device.backend == "interpreter",
            "header": "\n".join(f"# {line}" for line in lines),
            "arguments": names,
            "parameters": "\n    ".join(["", *wrap(", ".join(names), 94)]) + ",\n",
        },
    )
    source = Source(
        text, "", tuple(found), num_warps, num_stages, language, registers, stages, entry=entry
    )
    return replace(source, hash=digest_of(source))


def entry_of(template: str) -> str:
    """hopper/prefill.py.jinja has flexattn_hopper_prefill; no word stands twice at the end."""
    family, _, stem = template.removesuffix(".py.jinja").partition("/")
    return f"flexattn_{family}" if family.endswith(stem) else f"flexattn_{family}_{stem}"


def hinted(source: Source, hints: tuple[tuple[str, int], ...]) -> Source:
    """The source with hints, under a hash of its own; as it is without any."""
    if not hints:
        return source
    source = replace(source, hints=hints)
    return replace(source, hash=digest_of(source))


def with_hints(source: Source, config: Config, structure: Structure) -> Source:
    """A rendered kernel with the hints of its config, under a hash of its own."""
    source = hinted(source, source.hints + options_of(config))
    if not isinstance(config, AmdHints) or not config.buffer_loads or not structure.layout.near:
        return source
    near = (replace(each, near=each.name in _SIZED) for each in source.arguments)
    source = replace(source, arguments=tuple(near))
    return replace(source, hash=digest_of(source))


def digest_of(source: Source) -> str:
    """The hash of what is compiled, and how: all of a Source but its header."""
    # The header names lengths; kernels that differ in nothing else are one kernel.
    body = source.text[source.text.find("import triton") :]
    signature = [(each.name, each.type, each.divisible_by) for each in source.arguments]
    key = f"{body}\n{signature} {source.num_warps} {source.num_stages}"
    if source.registers:
        key += f" {source.registers}"
    if source.stages.ptxas:
        key += f" {source.stages.ptxas}"
    if source.hints:
        key += f" {source.hints}"
    if near := [each.name for each in source.arguments if each.near]:
        key += f" near: {near}"
    return hashlib.sha256(key.encode()).hexdigest()


def traits_of(device: Device, structure: Structure) -> Traits:
    """The traits by which a structure's mods are printed for a device."""
    half = structure.out_dtype in ("bfloat16", "float16")
    brief = structure.out_dtype == "bfloat16"
    fast = structure.tanh == "fast" or (structure.tanh == "auto" and brief)
    return Traits(
        head_per_row=structure.kind == "decode",
        interpreted=device.backend == "interpreter",
        fast_tanh=device.has_tanh and fast,
        short_tanh=half and structure.tanh == "auto",
    )


def mod_context(
    printed: Iterable[tuple[str, ...]], device: Device, dialect: Dialect = TRITON
) -> dict[str, object]:
    """The helpers and imports that a template needs for the statements it holds."""
    called = "\n".join(line for each in printed for line in each)
    helpers, functions = "", []
    if called:
        every = render_template("base/helpers.jinja", {"dialect": dialect})
        functions = every.strip().split("\n\n")
    for function in reversed(functions):
        name = function[function.index("def ") + 4 : function.index("(")]
        # `tl.sigmoid(` calls no helper.
        if re.search(rf"(?<![.\w]){name}\(", called):
            called, helpers = called + function, f"\n\n{function.rstrip()}\n{helpers}"
    origin = (
        "flexattn.kernels.printers import interpreted_math as"
        if device.backend == "interpreter"
        else "triton.language.extra import"
    )
    return {
        "helpers": helpers,
        "libdevice_import": f"from {origin} libdevice" if "libdevice." in called else "",
    }


def printed_context(
    printed: Iterable[Any], device: Device, dialect: Dialect = TRITON
) -> dict[str, Any]:
    """mod_context for printed mods, None among them, with the lines before their loop."""
    used = [each for each in printed if each is not None]
    hoisted = [line for each in used for line in each.hoisted]
    return {**mod_context([each.lines for each in used], device, dialect), "hoisted": hoisted}


def named_pieces(
    prefix: str, head_dim: int, halved: bool = False, least: int = 16
) -> tuple[_Piece, ...]:
    """The tiles of a head dimension, by the names that templates give them.

    halved: one tile is two. least: as `pieces` has it.
    """
    cut = pieces(head_dim, least)
    if halved and len(cut) == 1:
        half = cut[0][1] // 2
        cut = (0, half, half), (half, half, head_dim - half)
    return tuple(
        _Piece(f"{prefix}{i}", start, tile, used) for i, (start, tile, used) in enumerate(cut)
    )


def structure_context(
    structure: Structure, device: Device, halved: bool = False
) -> dict[str, object]:
    """The template's variables for a structure: itself, its tiles, and how they are computed.

    halved: a head dimension of one tile is cut into two, so that a product holds half of it.
    """
    qk, v = (
        named_pieces(name, dim, halved)
        for name, dim in zip(("qk", "v"), structure.head_dims, strict=True)
    )
    sparsity, sinks = structure.sparsity, structure.sinks != ""
    return {
        "structure": structure,
        "sparsity": sparsity,
        "layout": structure.layout,
        "qk_pieces": qk,
        "v_pieces": v,
        "all_pieces": (*qk, *v),
        "element": triton_type(structure.dtype),
        "precision": fp32_products(structure),
        "upcast": device.backend == "interpreter" and structure.dtype == "bfloat16",
        "lse": structure.lse,
        "max_scores": structure.max_scores,
        "sinks": sinks,
        "far": structure.far or sinks,
        "dropout": structure.dropout,
        "ptx": device.backend == "cuda",
        "rows_aligned": sparsity is None or sparsity.q_block % 16 == 0,
    }


def split_tiles_ptxas(structure: Structure, device: Device) -> Ptxas:
    """The ptxas for loops of warpgroups, where a tile of the structure is several products."""
    split = sum(len(pieces(dim)) for dim in structure.head_dims) > 2
    return for_split_tiles() if device.has_wgmma and split else ""


def expressions(structure: Structure) -> list[str]:
    """The mods as lines of a header."""
    pairs = (("score_mod", structure.score), ("mask_mod", structure.mask))
    return [f"{name}: {expression_line(mod)}" for name, mod in pairs if mod is not None]


def expression_line(captures: Captures) -> str:
    """A mod's expression for a header."""
    return in_a_line(captures.mod.expr)
