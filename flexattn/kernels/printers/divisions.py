"""How kernels divide by a captured number: by a product and a shift, where 32 bits hold it all."""

from __future__ import annotations

from flexattn.mods.expr import Expr
from flexattn.mods.numbers import divisor_of
from flexattn.mods.ops import Range

_LARGEST = 2**31 - 1


def invariant_names(kind: str, slot: int) -> tuple[str, str]:
    """The kernel's arguments that divide by a captured number: its multiplier and its shift."""
    return f"{kind}_scalar{slot}_multiplier", f"{kind}_scalar{slot}_shift"


def by_invariant(node: Expr, kind: str, numerator: Range | None) -> str:
    """A quotient or remainder as Triton source, to be filled with numerator and divisor.

    numerator: what it can be. "" where the divisor is no positive number of 32 bits, or where the
    numerator may have more.
    """
    slot = divisor_of(node)
    if slot is None or numerator is None or max(map(abs, numerator)) > _LARGEST:
        return ""
    name = "fast_div" if numerator[0] >= 0 else f"fast_{node.op.replace('mod', 'div')}"
    quotient = f"{name}({{0}}, {', '.join(invariant_names(kind, slot))})"
    return quotient if node.op.endswith("div") else f"({{0}} - {quotient} * {{1}})"
