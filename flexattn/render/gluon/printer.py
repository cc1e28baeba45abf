"""Mods as Gluon statements: what the Triton printer says of them, in the names of Gluon."""

from __future__ import annotations

import re
from dataclasses import replace

from flexattn.problem import Captures, Structure
from flexattn.render.score_printer import PrintedScore
from flexattn.render.score_printer import print_score as triton_score
from flexattn.render.triton_printer import Printed, Traits
from flexattn.render.triton_printer import print_mod as triton_mod

__all__ = ["gluon_text", "print_mod", "print_score"]

# What the Triton printer writes, and what a consumer of ROWS rows calls it.
_LAYOUTS = (
    (r"tl\.zeros\(\[BLOCK_M, BLOCK_N\], (tl\.\w+)\)", r"gl.zeros([ROWS, BLOCK_N], \1, MMA_S)"),
    (r"tl\.zeros\(\[1, BLOCK_N\], (tl\.\w+)\)", r"gl.zeros([1, BLOCK_N], \1, MMA_S)"),
    (r"tl\.zeros\(\[STRIP\], (tl\.\w+)\)", r"gl.zeros([STRIP], \1, IN_A_LINE)"),
    (r"tl\.zeros\(\[BLOCK_M\], (tl\.\w+)\)", r"gl.zeros([ROWS], \1, BY_ROW)"),
    (r"tl\.arange\(0, BLOCK_M\)", "gl.arange(0, ROWS, BY_ROW)"),
    (r"tl\.arange\(0, BLOCK_N\)", "gl.arange(0, BLOCK_N, BY_KEY)"),
    (r"tl\.arange\(0, STRIP\)", "gl.arange(0, STRIP, IN_A_LINE)"),
    (r"at\.reshape\(BLOCK_M \* BLOCK_N\)", "gl.reshape(at, [ROWS * BLOCK_N])"),
    (
        r"strip\.reshape\(BLOCK_M, BLOCK_N\)",
        "gl.convert_layout(gl.reshape(strip, [ROWS, BLOCK_N]), MMA_S)",
    ),
    (r"\bBLOCK_M\b", "ROWS"),
    # A selection behind a condition stays there.
    (r"^( +)qk = tl\.where\((.*)\)$", r"\1qk = stay(gl.where(\2))"),
    (r"\btl\.sigmoid\b", "sigmoid"),
    # Its enumerations have no other name.
    (r"\btl\.(?!PropagateNan)", "gl."),
)


def print_mod(captures: Captures, traits: Traits) -> Printed:
    """A mask_mod; q_idx is a column and kv_idx a row, in the scores' layout."""
    found = triton_mod(captures.mod, captures.contiguous, traits)
    return Printed(
        _texts(found.hoisted), _texts(found.early), _texts(found.body), gluon_text(found.result)
    )


def print_score(structure: Structure, traits: Traits) -> PrintedScore:
    """The score_mod of a structure that has one, each consumer's rows for themselves."""
    found = triton_score(structure, traits)
    return replace(
        found,
        hoisted=_texts(found.hoisted),
        early=_texts(found.early),
        body=_texts(found.body),
        rows=_texts(found.rows),
        limits=None,
    )


def gluon_text(text: str) -> str:
    """Triton's functions by Gluon's names, with the layouts that Gluon wants said."""
    for pattern, replacement in _LAYOUTS:
        text = re.sub(pattern, replacement, text)
    return text


def _texts(lines: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(gluon_text(line) for line in lines)
