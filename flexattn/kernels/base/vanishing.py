"""Which backwards leave out tiles whose weights are proven to vanish: rule "decay_skip"."""

from __future__ import annotations

from dataclasses import replace

from flexattn.kernels.base.config import Config
from flexattn.kernels.base.features import skips_far
from flexattn.problem import Structure


def skips_vanished(structure: Structure, config: Config) -> bool:
    """Whether a backward's kernel leaves out rows that are too far behind their keys.

    It is so where a forward leaves out the keys: of a weight that is 0 in float32, exp(S' - lse),
    all terms of all gradients are 0, whatever dropout or a gradient of lse does.
    """
    return structure.kind == "backward" and skips_far(replace(structure, kind="prefill"), config)
