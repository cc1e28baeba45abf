"""What a mask reads for each key, where the loading warp can read it for all others."""

from __future__ import annotations

from functools import lru_cache

from flexattn.mods.expr import Expr, depending, walk
from flexattn.mods.key_bounds import key_bounds
from flexattn.problem import Structure
from flexattn.space.gluon_config import GluonPrefillConfig
from flexattn.space.terms import RANGES, asked_once

__all__ = ["told_keys"]

# Bytes of a number of each key; for all stages of K there are 16.
_TOLD = {"int32": 4, "int64": 8, "float32": 4}


def told_keys(structure: Structure, config: GluonPrefillConfig) -> str:
    """Dtype of the number of each key that the loading warp reads for mask_mod; "": it reads none.

    It then lies beside the keys, where all threads find it, and none hands it to another. So it is
    for documents, in kernels whose warps meet nowhere else.
    """
    mask, score = structure.mask, structure.score
    if not config.direct or mask is None or (score is not None and _keyed(score.mod.expr)):
        return ""
    found = key_bounds(mask.mod.expr, RANGES)
    rest = mask.mod.expr if found is None else found.rest
    if rest is None or asked_once(rest, config.BLOCK_N):
        return ""
    nodes, loads = list(walk(rest)), _keyed(rest)
    keyed, rowed = depending(nodes, ("kv_idx",)), depending(nodes, ("q_idx",))
    if len(loads) != 1 or loads[0] in rowed or loads[0].dtype not in _TOLD:
        return ""
    # Nothing else by key may be asked for: nor where to read, beside what is read there.
    within = set(walk(loads[0]))
    alone = all(node in rowed or node in within for node in keyed)
    asked = {arg for node in nodes if node not in within for arg in node.args if arg in keyed}
    alone = alone and all(arg is loads[0] or arg.op == "var" for arg in asked & within)
    return loads[0].dtype if alone and config.num_stages * _TOLD[loads[0].dtype] <= 16 else ""


@lru_cache(maxsize=1024)
def _keyed(expr: Expr) -> tuple[Expr, ...]:
    """What an expression loads by key."""
    nodes = list(walk(expr))
    keyed = depending(nodes, ("kv_idx",))
    return tuple(node for node in nodes if node.op == "load" and node in keyed)
