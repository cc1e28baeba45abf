"""What finds the ends of a backward's walks, where a mask's runs are trimmed to its tiles."""

from __future__ import annotations

from typing import NamedTuple

from flexattn.kernels.base.config import Geometry
from flexattn.mods.expr import walk
from flexattn.problem import Problem
from flexattn.runtime.key_lists import BothLists

TRIMMED = "M_RUNS"


class TrimmedRuns(NamedTuple):
    """M_RUNS of one problem: its shape, the programs that fill it, what kernels are told."""

    shape: tuple[int, ...]
    programs: int
    told: dict[str, int]

    @classmethod
    def of(cls, problem: Problem, grid: Geometry, lists: BothLists) -> TrimmedRuns:
        """Of as many heads and batches as a mask's lists have, or as its mask_mod tells apart."""
        assert problem.structure.mask is not None
        names = {x.value for x in walk(problem.structure.mask.mod.expr) if x.op == "var"}
        listed = lists.by_key.kv_num.shape
        batches, heads = (
            size if name in names or listed[axis] > 1 else 1
            for axis, (name, size) in enumerate((("b", problem.B), ("h", problem.Hq)))
        )
        tiles = grid.num_tiles
        told = {
            "mask_heads": heads,
            "stride_m_runs_b": heads * tiles if batches > 1 else 0,
            "stride_m_runs_h": tiles if heads > 1 else 0,
        }
        return cls((batches, heads, tiles, 4), batches * heads * tiles, told)
