"""The gallery: masks and score mods of published models, each a function to import or to copy.

    from flexattn.catalogue import alibi, sliding_window

A mask goes to `create_block_mask`, a score mod to `flex_attention(score_mod=...)`, and torch's
`and_masks` joins masks. Each docstring has what the mod is for, a line that makes one, and its
paper; docs/gallery.md shows them all. Names and arguments are stable: they stand in workload files
and records. `CASES` has the same mods with tensors for any shape, for the command line and tests.

Positions: causal, causal_offset, sliding_window, dilated_window, head_windows, prefix_lm.
Packed and padded batches: document, document_offsets, document_ids, padding.
Structures: natten_2d, sliding_tile_3d, flamingo, transfusion, tree, block_table.
Scores: softcap, alibi, relative_bias, t5_bias, head_bias, length_temperature, scaled.
"""

from flexattn.catalogue.cases import CASES, Built, Case, Setup, case
from flexattn.catalogue.masks import (
    block_table,
    causal,
    causal_offset,
    dilated_window,
    document,
    document_ids,
    document_offsets,
    flamingo,
    head_windows,
    natten_2d,
    noop,
    padding,
    prefix_lm,
    sliding_tile_3d,
    sliding_window,
    transfusion,
    tree,
)
from flexattn.catalogue.scores import (
    alibi,
    alibi_slopes,
    head_bias,
    length_temperature,
    relative_bias,
    scaled,
    softcap,
    t5_bias,
)

__all__ = [
    "CASES",
    "Built",
    "Case",
    "Setup",
    "alibi",
    "alibi_slopes",
    "block_table",
    "case",
    "causal",
    "causal_offset",
    "dilated_window",
    "document",
    "document_ids",
    "document_offsets",
    "flamingo",
    "head_bias",
    "head_windows",
    "length_temperature",
    "natten_2d",
    "noop",
    "padding",
    "prefix_lm",
    "relative_bias",
    "scaled",
    "sliding_tile_3d",
    "sliding_window",
    "softcap",
    "t5_bias",
    "transfusion",
    "tree",
]
