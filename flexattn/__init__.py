"""flexattn: attention as two small Python callables, at the speed of a hand-written kernel."""

from flexattn.attention import flex_attention
from flexattn.explain import Explanation, explain
from flexattn.masks import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)
from flexattn.mods import register_op
from flexattn.nested import Packed, pack
from flexattn.visual import visualize
from flexattn.warm import warm

__version__ = "0.1.0"

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "Explanation",
    "FlexKernelOptions",
    "Packed",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "explain",
    "flex_attention",
    "noop_mask",
    "or_masks",
    "pack",
    "register_op",
    "visualize",
    "warm",
]
