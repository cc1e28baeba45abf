"""serving: decoding over contiguous and paged caches, for batches of any lengths."""

from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.serving.append import AppendPlan, append_paged_kv_cache
from flexattn.serving.append_checks import Rope
from flexattn.serving.cascade import CascadePlan, merge_states
from flexattn.serving.decode import flex_decode
from flexattn.serving.kept import KeptKeys
from flexattn.serving.plan import DecodePlan
from flexattn.serving.tree import PrefixTree, ReadCost, TreeReads, choose_reads
from flexattn.serving.tree_plan import TreePlan

__all__ = [
    "AppendPlan",
    "CascadePlan",
    "DecodePlan",
    "KeptKeys",
    "PrefixTree",
    "ReadCost",
    "Rope",
    "ServingConfig",
    "TreePlan",
    "TreeReads",
    "append_paged_kv_cache",
    "choose_reads",
    "flex_decode",
    "merge_states",
]
