"""Names that users import from flexattn and that its first call loads, each from its module."""

from torch.nn.attention.flex_attention import (
    AuxOutput as AuxOutput,
    AuxRequest as AuxRequest,
    BlockMask as BlockMask,
    FlexKernelOptions as FlexKernelOptions,
    and_masks as and_masks,
    create_mask as create_mask,
    noop_mask as noop_mask,
    or_masks as or_masks,
)

from flexattn.block_mask.create import create_block_mask as create_block_mask
from flexattn.frontend.attention import flex_attention as flex_attention
from flexattn.mods import register_op as register_op
from flexattn.mods.expr import (
    MaskMod as MaskMod,
    ScoreMod as ScoreMod,
)
