"""Which backwards leave out tiles whose weights are proven to vanish: rule "decay_skip"."""

from __future__ import annotations

from dataclasses import replace

from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.base.config import Config
from flexattn.kernels.base.features import skips_far
from flexattn.problem import Structure

# Of each head: the end of the tiles of queries that have weights of each tile of keys, and the
# first tile of keys that each tile of queries has weights of, by decay_skip/blocks.py.jinja. Their
# addresses are 0 where all tiles are visited.
M_BLOCK_MAX, N_BLOCK_MIN = Argument("M_BLOCK_MAX", "*i32", 4), Argument("N_BLOCK_MIN", "*i32", 4)


def skips_vanished(structure: Structure, config: Config) -> bool:
    """Whether a backward's kernel leaves out tiles of keys too far before one that its rows keep.

    It does so where a forward does. A weight exp(S' - lse) that is 0 in float32 is a factor of all
    that its score adds to gradients, those of lse and of captured tensors among them.
    """
    return structure.kind == "backward" and skips_far(replace(structure, kind="prefill"), config)
