"""Source: a rendered kernel, whose header says what it is for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from flexattn.device import Device
from flexattn.kernels.base.dialect import TRITON, Dialect
from flexattn.kernels.ptx.stages import OWN_STAGES, Stages
from flexattn.kernels.render.arguments import Argument, arguments, combine_arguments
from flexattn.kernels.render.environment import render_template, template_hash
from flexattn.kernels.render.mask_parts import MaskParts, mask_parts, whole
from flexattn.kernels.render.score_printer import PrintedScore, print_score
from flexattn.kernels.render.triton_ops import triton_type
from flexattn.kernels.render.triton_printer import Traits
from flexattn.kernels.space.config import Config, Language, PrefillConfig, describe, pieces
from flexattn.kernels.space.terms import loads_tiles, multiplies_ramp, skips_far
from flexattn.kernels.space.tiles import tiles_per_q, walks_runs
from flexattn.mods.expr import pretty
from flexattn.problem import Captures, Structure

BASE_2 = (("LOG2E", 1.4426950408889634), ("LN2", 0.6931471805599453))
HELPERS = (
    "fast_tanh",
    "short_tanh",
    "sign",
    "sigmoid",
    "floor_div_int",
    "floor_mod_int",
    "fast_div",
    "fast_floor_div",
    "fast_trunc_div",
    "floor_div_float",
    "floor_mod_float",
)


@dataclass(frozen=True, slots=True)
class Source:
    """A rendered kernel: its text, its hash, its arguments, and how to compile it.

    num_warps: as the compiler is told; a warp-specialised kernel starts more. registers: the most
    that a thread may have, 0 for what the compiler finds best. stages: passes over its PTX, and
    which ptxas. stored: it was read, not rendered,
    and is not compiled.
    """

    text: str
    hash: str
    arguments: tuple[Argument, ...]
    num_warps: int
    num_stages: int
    language: Language = "triton"
    registers: int = 0
    stages: Stages = OWN_STAGES
    stored: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One power-of-two tile of a head dimension, as the templates name it."""

    name: str
    start: int
    tile: int
    used: int

    @property
    def end(self) -> int:
        return self.start + self.used


def render(structure: Structure, config: Config, device: Device, title: str) -> Source:
    """The prefill or decode kernel of a structure with a config; title goes into its header."""
    name = f"triton/{structure.kind}.py.jinja"
    traits = traits_of(device, structure)
    score = None
    if structure.score is not None:
        score = print_score(structure, traits, ramps=multiplies_ramp(structure, device))
    mask = None
    runs, prefill = walks_runs(structure, config), structure.kind == "prefill"
    if structure.mask is not None:
        mask = whole(structure.mask, traits)
        if runs:
            heads = structure.packed_heads
            mask = mask_parts(structure.mask, traits, heads, _looks_ahead(structure), prefill)
    qk, v = named_pieces("qk", structure.head_dim_qk), named_pieces("v", structure.head_dim_v)
    sparsity = structure.sparsity
    settings: dict[str, int] = {"BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N}
    ragged_q = False
    if structure.kind == "decode":
        settings |= {"PACKED": structure.packed_heads, "HEAD_DIM_V": structure.head_dim_v}
    if score is not None and score.strip:
        settings |= {"STRIP": power(config.BLOCK_M + config.BLOCK_N)}
    if sparsity is not None:
        settings |= {
            "SPARSE_Q": sparsity.q_block,
            "SPARSE_KV": sparsity.kv_block,
            "TILES_PER_Q": tiles_per_q(structure, config),
            "TILES_PER_KV": -(-sparsity.kv_block // config.BLOCK_N),
        }
        ragged_q = sparsity.q_block % config.BLOCK_M != 0
    if mask is not None and mask.segments is not None and sparsity is not None:
        settings["EDGE"] = power(sparsity.kv_block)
    used: list[PrintedScore | MaskParts] = [each for each in (score, mask) if each is not None]
    context = {
        **mod_context([each.lines for each in used], device),
        "hoisted": [line for each in used for line in each.hoisted],
        "score": score,
        "mask": mask,
        "qk_pieces": qk,
        "v_pieces": v,
        "all_pieces": (*qk, *v),
        "constants": (*settings.items(), *BASE_2),
        "layout": structure.layout,
        "sparse": sparsity is not None,
        "runs": runs,
        "columns": prefill,
        "has_full": sparsity is not None and sparsity.has_full,
        "ragged_q": ragged_q,
        "ragged_kv": sparsity is not None and sparsity.kv_block % config.BLOCK_N != 0,
        "use_tma": isinstance(config, PrefillConfig) and config.use_tma,
        "order": config.order if isinstance(config, PrefillConfig) else "",
        "early_loads": config.early_loads,
        "licm": _moves_out_of_loops(structure, config, device),
        "fold_scale": structure.positive_scale if score is None else score.folded,
        "element": triton_type(structure.dtype),
        "widens": structure.kv_dtype != "",
        "upcast": device.backend == "interpreter" and structure.dtype == "bfloat16",
        "precision": _precision(structure),
        "lse": structure.lse,
        "max_scores": structure.max_scores,
        "sinks": structure.sinks != "",
        "reach": skips_far(structure, config),
    }
    return make_source(
        name,
        device,
        [title, f"config: {describe(config)}", *expressions(structure)],
        context,
        arguments(structure, config),
        config.num_warps,
        config.num_stages,
    )


def _looks_ahead(structure: Structure) -> bool:
    """Whether a tile of rows looks at the numbers of its first and its last block of keys."""
    sparsity = structure.sparsity
    return structure.kind == "prefill" and sparsity is not None and sparsity.kv_block <= 1024


def _moves_out_of_loops(structure: Structure, config: Config, device: Device) -> bool:
    """Whether LLVM may move what does not change out of the loop over keys.

    There it stays in registers, which a warpgroup's accumulator and scores have filled. A mod that
    gathers a value for every score loses more by computing its addresses anew.
    """
    warpgroups = device.has_wgmma and structure.itemsize == 2 and structure.kind == "prefill"
    return not warpgroups or config.BLOCK_M < 64 or loads_tiles(structure)


def render_combine(structure: Structure, device: Device) -> Source:
    """The kernel that merges the splits of a decode kernel of this structure."""
    v = named_pieces("v", structure.head_dim_v)
    context = {
        "v_pieces": v,
        "constants": (("HEAD_DIM_V", structure.head_dim_v), ("BLOCK_S", 16), *BASE_2),
        "element": triton_type(structure.dtype),
        "lse": structure.lse,
        "max_scores": structure.max_scores,
        "sinks": structure.sinks != "",
    }
    title = f"combine {structure.dtype} D={structure.head_dim_v} for {device.arch}"
    return make_source(
        "triton/combine.py.jinja", device, [title], context, combine_arguments(structure), 4, 1
    )


def make_source(
    template: str,
    device: Device,
    header: list[str],
    context: dict[str, object],
    found: tuple[Argument, ...],
    num_warps: int,
    num_stages: int,
    language: Language = "triton",
    registers: int = 0,
    stages: Stages = OWN_STAGES,
) -> Source:
    """A template with its context, header and arguments as a Source; found: the arguments."""
    lines = [*header, f"template: {template} {template_hash(template)}"]
    lines += [f"pass: {name} (flexattn/kernels/ptx/{name}.py)" for name in stages.passes]
    text = render_template(
        template,
        {
            **context,
            "interpreted": device.backend == "interpreter",
            "header": "\n".join(f"# {line}" for line in lines),
            "arguments": [argument.name for argument in found],
        },
    )
    text = "\n".join(line.rstrip() for line in text.split("\n")).rstrip("\n") + "\n"
    # What a macro left out leaves an empty line: none stands inside a function.
    text = re.sub(r"\n+(\n {4})", r"\1", text)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    source = Source(text, "", found, num_warps, num_stages, language, registers, stages)
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
    return hashlib.sha256(key.encode()).hexdigest()


def traits_of(device: Device, structure: Structure) -> Traits:
    """How a structure's mods are printed for a device."""
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
    """What a template needs to know of the statements it holds: helpers and imports."""
    lines = [line for each in printed for line in each]
    # `tl.sigmoid(` calls no helper.
    called = [each for each in HELPERS if re.search(rf"(?<![.\w]){each}\(", "\n".join(lines))]
    math = any("libdevice." in line for line in lines) or any("_float" in n for n in called)
    interpreted = device.backend == "interpreter"
    origin = (
        "flexattn.kernels.render import interpreted_math as"
        if interpreted
        else ("triton.language.extra import")
    )
    helpers = render_template("triton/helpers.jinja", {"used": called, "dialect": dialect})
    return {
        "helpers": helpers,
        "libdevice_import": f"from {origin} libdevice" if math else "",
    }


def named_pieces(prefix: str, head_dim: int) -> tuple[_Piece, ...]:
    """The tiles of a head dimension, by the names that templates give them."""
    return tuple(
        _Piece(f"{prefix}{i}", start, tile, used)
        for i, (start, tile, used) in enumerate(pieces(head_dim))
    )


def _precision(structure: Structure) -> str:
    if structure.dtype != "float32":
        return ""
    return "tf32x3" if structure.tf32 else "ieee"


def expressions(structure: Structure) -> list[str]:
    """The mods as lines of a header."""
    pairs = (("score_mod", structure.score), ("mask_mod", structure.mask))
    return [f"{name}: {one_line(mod)}" for name, mod in pairs if mod is not None]


def one_line(captures: Captures) -> str:
    """A mod's expression for a header."""
    return pretty(captures.mod.expr).replace("\n", "; ")


def power(value: int) -> int:
    """The least power of two that is not below a size, and a tile of Triton: at least 16."""
    return max(16, 1 << (value - 1).bit_length())
