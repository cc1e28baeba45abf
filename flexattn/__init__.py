"""flexattn: attention as two small Python callables, at the speed of a hand-written kernel."""

from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)

from flexattn.block_mask.create import create_block_mask
from flexattn.block_mask.visual import visualize
from flexattn.deploy.warm import warm
from flexattn.frontend.attention import flex_attention
from flexattn.frontend.explain import Explanation, explain
from flexattn.frontend.install import install, uninstall
from flexattn.frontend.nested import Packed, pack
from flexattn.mods import register_op

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
    "install",
    "noop_mask",
    "or_masks",
    "pack",
    "register_op",
    "uninstall",
    "visualize",
    "warm",
]
