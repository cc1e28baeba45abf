"""What `render --explain` says of a score_mod: the rules applied to it, and its terms."""

from __future__ import annotations

from flexattn.kernels.base.features import decays
from flexattn.mods.expr import pretty
from flexattn.mods.rules import ONE, REWRITES
from flexattn.problem import Structure

# What a term is called, and where it is computed.
_PLACES = {
    "core": "for each score",
    "inner": "times the score, inside: one number before the loop",
    "outer": "times that, outside: one number before the loop",
    "row": "for each row, after the loop",
    "row_slope": "for each row, after the loop, times q_idx - q_start",
    "column": "for each key of a tile, where q_idx is q_start, the tile's first row",
    "diagonal": "for each diagonal of a tile",
    "rest": "for each score",
    "keep": "a mask, in tiles that it cuts",
}

Rewrite = dict[str, str]


def rewrites(structure: Structure) -> list[Rewrite]:
    """Rules, then terms: {"what": "rule" or "term", "name", "says", "to"}; none without a mod."""
    terms = structure.terms
    if terms is None:
        return []
    found = [
        {"what": "rule", "name": step.rule, "says": REWRITES[step.rule], "to": step.to}
        for step in terms.steps
    ]
    if terms.rise is not None and decays(structure):
        text = pretty(terms.rise.step).replace("\n", "; ")
        found.append(
            {"what": "rule", "name": "decay_skip", "says": REWRITES["decay_skip"], "to": text}
        )
    for name, place in _PLACES.items():
        expr = getattr(terms, name)
        if expr is not None and expr is not ONE:
            text = pretty(expr).replace("\n", "; ")
            found.append({"what": "term", "name": name, "says": place, "to": text})
    return found
