"""vLLM's attention over this library: what it asks of a backend, of its metadata, of a layer.

The contract was read in vLLM 0.33.0: vllm/v1/attention/backend.py and the layer that calls it,
vllm/model_executor/layers/attention/attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

from flexattn.errors import InputError, UnsupportedError
from flexattn.integrations.plans import Layer, Plans, write_pages
from flexattn.problem.checks import MAX_HEAD_DIM
from flexattn.serving import DecodePlan

# Of --kv-cache-dtype: what vLLM allocates as bytes.
_EIGHT_BITS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# Tokens of a page that a plan reads.
_PAGES = (16, 32, 64, 128, 256)
_SIXTEEN_BITS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class FlexattnBackend(AttentionBackend):
    """--attention-backend CUSTOM: decoders, chunks of prefill and single tokens in one launch."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *_SIXTEEN_BITS, *_EIGHT_BITS]
    # Keys and values are written by `do_kv_cache_update`, before `forward`.
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enum that the class stands in."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlexattnImpl]:
        """The class of a layer's attention."""
        return FlexattnImpl

    @staticmethod
    def get_builder_cls() -> type[FlexattnMetadataBuilder]:
        """The class that makes a batch's metadata."""
        return FlexattnMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Tokens of a page: larger blocks are cut into the largest of these that divides them."""
        return [*_PAGES]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """True where a kernel serves this head dimension."""
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks, windows, and under VLLM_BATCH_INVARIANT plans that are batch-invariant."""
        return True

    supports_sliding_window = supports_batch_invariance = supports_sink

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *others: Any, **named: Any
    ) -> str | None:
        """Why a cache's dtype does not go with the queries'; None where it does."""
        if _SIXTEEN_BITS.get(kv_cache_dtype, dtype) != dtype:
            return f"a {kv_cache_dtype} cache serves queries of the same dtype, not {dtype}"
        if kv_cache_dtype in _EIGHT_BITS and dtype == torch.float32:
            return "a cache of 8 bits serves queries of 16 bits"
        return None


@dataclass
class FlexattnMetadata(AttentionMetadata):
    """The batch of a forward for a group of layers; tensors are vLLM's own buffers."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor


class FlexattnMetadataBuilder(AttentionMetadataBuilder):
    """Metadata of a group of layers, whose plans are made with it, before anything is captured."""

    # Lengths are read on the device: one graph serves every batch of its rows.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.ALWAYS

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        for name in layer_names:
            layer = layers[name]
            layer.impl.prepare(name, kv_cache_spec.block_size, layer.dtype, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlexattnMetadata:
        """Nothing is computed: plans cut a batch on the device."""
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedError("attention that is not causal", "plans serve decoders")
        return FlexattnMetadata(
            common.num_actual_tokens, common.max_query_len, common.query_start_loc,
            common.max_seq_len, common.seq_lens, common.block_table_tensor, common.slot_mapping,
        )  # fmt: skip


class FlexattnImpl(AttentionImpl):
    """Attention of one layer, over plans that it shares with the layers like it."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise UnsupportedError(f"attention of the type {attn_type}", "plans serve decoders")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._about: dict[str, Any] = {
            "heads": (num_heads, self.num_kv_heads), "head_dim": (head_size, head_size),
            "kv_dtype": _EIGHT_BITS.get(kv_cache_dtype), "scale": self.scale,
            "softcap": logits_soft_cap, "window": sliding_window,
            "slopes": None if alibi_slopes is None else tuple(alibi_slopes),
            "sinks": sinks is not None, "scaled": kv_cache_dtype in _EIGHT_BITS,
        }  # fmt: skip
        self._config = config = get_current_vllm_config()
        layers = config.compilation_config.static_forward_context.values()
        before = [getattr(layer, "impl", None) for layer in layers]
        plans = [impl.plans for impl in before if isinstance(impl, FlexattnImpl)]
        self.plans: Plans = plans[0] if plans else Plans()
        self._ready: tuple[Layer, DecodePlan, DecodePlan] | None = None
        self._pages: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    def prepare(self, name: str, page: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the layer's plans, one for single tokens and one for chunks; all later is launches.

        In the profiling run, so that their memory is counted, with the page that is expected then.
        """
        if self._ready is not None:
            before = self._ready[0]
            if (before.page_size, before.dtype) == (page, dtype):
                return
        layer = Layer(dtype=dtype, device=device, page_size=page, name=name, **self._about)
        scheduler = self._config.scheduler_config
        graphs = self._config.compilation_config.cudagraph_capture_sizes or []
        rows = max(scheduler.max_num_batched_tokens, *graphs, 1)
        plans = self.plans.pair(
            layer, rows, batch=scheduler.max_num_seqs,
            kv_len=self._config.model_config.max_model_len,
            batch_invariant=True if envs.VLLM_BATCH_INVARIANT else None,
        )  # fmt: skip
        self._ready = layer, *plans

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values; padding has slots below 0, and block 0 is no request's."""
        eight = self.kv_cache_dtype in _EIGHT_BITS
        scales = (layer._k_scale, layer._v_scale) if eight else (None, None)
        write_pages(self._paged(kv_cache), slot_mapping, (key, value), scales)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlexattnMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of all requests: query, output [tokens, Hq, D], kv_cache as `_paged` has it.

        Rows behind the last request, of a batch that is padded, get zeros or stay as they are.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("an output that is quantised", "plans write q's dtype")
        if attn_metadata is None:  # the profiling run
            block = self._config.cache_config.block_size
            page = max((each for each in _PAGES if block % each == 0), default=_PAGES[0])
            self.prepare(layer.layer_name, page, query.dtype, query.device)
            return output.fill_(0)
        batch = attn_metadata
        assert self._ready is not None, "the metadata builder made the plans"
        _, single, chunks = self._ready
        given: dict[str, Any] = {"seq_lens": batch.seq_lens, "block_table": batch.block_table}
        if self.sinks is not None:
            given["sinks"] = self.sinks.float()
        if self.kv_cache_dtype in _EIGHT_BITS:
            given |= {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        requests, rows = batch.seq_lens.shape[0], batch.num_actual_tokens
        pages = self._paged(kv_cache)
        if batch.max_query_len == 1 and requests <= rows:
            q, out = query[:requests].unsqueeze(1), output[:requests].unsqueeze(1)
            single.run(q, pages, out=out, **given)
        else:
            given["cu_seqlens_q"] = batch.query_start_loc
            chunks.run(query[:rows], pages, out=output[:rows], **given)
        return output

    def _paged(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V as [blocks, block, Hkv, D] of vLLM's [blocks, Hkv, block, 2 D], of any strides.

        These views are made once a cache: plans know them again.
        """
        if self._pages is None or self._pages[0] is not kv_cache:
            if kv_cache.dim() != 4 or kv_cache.shape[1::2] != (
                self.num_kv_heads,
                2 * self.head_size,
            ):
                raise InputError(
                    f"a cache of shape {list(kv_cache.shape)}",
                    f"it is [blocks, {self.num_kv_heads}, block, {2 * self.head_size}]: each "
                    "head's keys, and values of the same dimension beside them",
                    "take vLLM 0.33.0, whose caches were read",
                )
            both = kv_cache.transpose(1, 2)
            if self.kv_cache_dtype in _EIGHT_BITS:
                both = both.view(_EIGHT_BITS[self.kv_cache_dtype])
            k, v = both.split(self.head_size, dim=-1)
            self._pages = kv_cache, (k, v)
        return self._pages[1]
