"""What users import from flexattn, each name from where it is made."""

from torch.nn.attention.flex_attention import (
    AuxOutput as AuxOutput,
)
from torch.nn.attention.flex_attention import (
    AuxRequest as AuxRequest,
)
from torch.nn.attention.flex_attention import (
    BlockMask as BlockMask,
)
from torch.nn.attention.flex_attention import (
    FlexKernelOptions as FlexKernelOptions,
)
from torch.nn.attention.flex_attention import (
    and_masks as and_masks,
)
from torch.nn.attention.flex_attention import (
    create_mask as create_mask,
)
from torch.nn.attention.flex_attention import (
    noop_mask as noop_mask,
)
from torch.nn.attention.flex_attention import (
    or_masks as or_masks,
)

from flexattn.block_mask.create import create_block_mask as create_block_mask
from flexattn.block_mask.visual import visualize as visualize
from flexattn.deploy.warm import warm as warm
from flexattn.frontend.attention import flex_attention as flex_attention
from flexattn.frontend.explain import (
    Explanation as Explanation,
)
from flexattn.frontend.explain import (
    explain as explain,
)
from flexattn.frontend.install import (
    install as install,
)
from flexattn.frontend.install import (
    uninstall as uninstall,
)
from flexattn.frontend.nested import (
    Packed as Packed,
)
from flexattn.frontend.nested import (
    pack as pack,
)
from flexattn.mods import register_op as register_op
from flexattn.mods.signatures import (
    MaskMod as MaskMod,
)
from flexattn.mods.signatures import (
    ScoreMod as ScoreMod,
)
