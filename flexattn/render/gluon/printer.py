"""Mods as Gluon statements: the Triton printer's, in Gluon's names."""

from __future__ import annotations

import re

from flexattn.mods import Mod
from flexattn.render.triton_printer import Printed, Traits, _Printer, _Value

__all__ = ["gluon_text", "print_mod"]


def print_mod(mod: Mod, contiguous: tuple[bool, ...], traits: Traits) -> Printed:
    """As the Triton printer's: q_idx is a column and kv_idx a row, in the scores' layout."""
    found = _GluonPrinter(mod, contiguous, traits).run()
    hoisted, early, body = (
        tuple(gluon_text(line) for line in lines)
        for lines in (found.hoisted, found.early, found.body)
    )
    return Printed(hoisted, early, body, gluon_text(found.result), found.full)


def gluon_text(text: str) -> str:
    """Triton's functions by Gluon's names; only its enumerations have none."""
    text = re.sub(r"\btl\.sigmoid\b", "sigmoid", text)
    return re.sub(r"\btl\.(?!PropagateNan)", "gl.", text)


class _GluonPrinter(_Printer):
    def _guarded(self, load: _Value) -> _Value:
        # Nothing pipelines Gluon's loads: none has to hide from it.
        return self._name(load)
