"""Which tensors that a score_mod captures get a gradient."""

from __future__ import annotations

from flexattn.mods import Bound
from flexattn.mods.derivative import loaded_floats
from flexattn.problem.problem import captures_of


def slots_of(score: Bound | None) -> tuple[int, ...]:
    """The slots of a score_mod's tensors that require a gradient."""
    if score is None or captures_of(score) is None:
        return ()
    return tuple(s for s in loaded_floats(score.mod) if score.tensors[s].requires_grad)
