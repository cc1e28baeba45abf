"""Which backwards leave out tiles whose weights are proven to vanish: rule "decay_skip"."""

from __future__ import annotations

from dataclasses import replace

from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.base.config import Config
from flexattn.kernels.base.features import skips_far
from flexattn.problem import Structure

# What of the tiles of each head have weights: see templates/decay_skip/blocks.py.jinja. The
# addresses are 0 where nobody looked.
M_BLOCK_MAX, N_BLOCK_MIN = Argument("M_BLOCK_MAX", "*i32", 4), Argument("N_BLOCK_MIN", "*i32", 4)


def skips_vanished(structure: Structure, config: Config) -> bool:
    """Whether a backward's kernel leaves out keys that are too far before a kept one of their row.

    It is so where a forward leaves them out: of a weight exp(S' - lse) that is 0 in float32 all
    terms of all gradients are 0, that of lse among them.
    """
    return structure.kind == "backward" and skips_far(replace(structure, kind="prefill"), config)
