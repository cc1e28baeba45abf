"""serving: decoding over contiguous and paged caches, for batches of any lengths."""

from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.serving.cascade import CascadePlan
from flexattn.serving.decode import flex_decode
from flexattn.serving.merge import merge_states
from flexattn.serving.plan import DecodePlan

__all__ = ["CascadePlan", "DecodePlan", "ServingConfig", "flex_decode", "merge_states"]
