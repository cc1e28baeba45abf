"""Sparse attention of published models: keys are chosen by torch and read by a Selection.

    from flexattn.sparse import moba, nsa

Each function takes tensors in flex_attention's layout and equals its paper's formula. Gradients go
through attention, pooled keys and gates, never through a choice. docs/selection.md says what each
costs today.
"""

from flexattn.sparse.text import dsa, indexer_scores, moba, nsa, quest
from flexattn.sparse.video import vsa

__all__ = ["dsa", "indexer_scores", "moba", "nsa", "quest", "vsa"]
