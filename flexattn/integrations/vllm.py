"""vLLM's attention over this library: what it asks of a backend, of its metadata, of a layer.

The contract was read in vLLM 0.26.0 to 0.33.0: vllm/v1/attention/backend.py and the layer that
calls it, vllm/model_executor/layers/attention/attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from flexattn.errors import InputError, UnsupportedError
from flexattn.integrations.plans import Layer, LayerPlans, Plans, Spans
from flexattn.problem.checks import MAX_HEAD_DIM
from flexattn.settings import current

try:
    import vllm.envs as envs
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
except ImportError as error:
    # vLLM would take it for a package that is not there.
    raise UnsupportedError(
        f"vLLM lacks what flexattn's backend is made of: {error}",
        "vLLM 0.26 to 0.33 were read",
        "install one of them, or take another --attention-backend",
    ) from error

# Of --kv-cache-dtype: what vLLM allocates as bytes.
_PER_TOKEN_HEAD = "fp8_per_token_head"
_EIGHT_BITS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    _PER_TOKEN_HEAD: torch.float8_e4m3fn,
}
# vLLM up to 0.28 asks the backend for its cache's shape, later ones a spec that it may change.
_OWN_PAGES = hasattr(AttentionBackend, "supported_kv_cache_layouts")
# Bytes behind K and V of a token and head for both scales, so that all stays aligned.
_SCALES = 16
# Tokens of a page that a plan reads.
_PAGES = (16, 32, 64, 128, 256)
_SIXTEEN_BITS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# Rows that see keys of the call alone, which is in no cache.
_PACKED = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class FlexattnBackend(AttentionBackend):
    """--attention-backend CUSTOM: decoders, chunks of prefill and single tokens in one launch."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        each
        for each in ("auto", *_SIXTEEN_BITS, *_EIGHT_BITS)
        if _OWN_PAGES or each != _PER_TOKEN_HEAD
    ]
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

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Of vLLM up to 0.28: each head's keys, and its values beside them."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Of vLLM up to 0.28: the order in memory that VLLM_KV_CACHE_LAYOUT names."""
        layout = import_module("vllm.v1.attention.backends.utils").get_kv_cache_layout()
        if include_num_layers_dimension:
            return (1, 0, 3, 2, 4) if layout == "NHD" else (1, 2, 0, 3, 4)
        return (0, 2, 1, 3) if layout == "NHD" else (0, 1, 2, 3)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Of vLLM from 0.29 on: all in which a head's stride does not grow with the cache."""
        layouts = import_module("vllm.v1.kv_cache_layout").KVCacheLayout
        return tuple(layouts[name] for name in ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC"))

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Of vLLM from 0.29 on: room for the scales of each token and head behind its values."""
        if spec.kv_quant_mode.name != _PER_TOKEN_HEAD.upper() or spec.state_content_bytes:
            return spec
        return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + _SCALES)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """True where a kernel serves this head dimension."""
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks, windows, rows of an image that see each other, requests that are not causal, a
        scale a head, and under VLLM_BATCH_INVARIANT plans that are batch-invariant."""
        return True

    supports_sliding_window = supports_batch_invariance = supports_sink
    supports_mm_prefix = supports_non_causal = supports_per_head_quant_scales = supports_sink

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """True of decoders, of encoders, and of decoders that read an encoder's keys."""
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *_PACKED)

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
    """The batch of a forward for a group of layers; tensors are vLLM's own buffers.

    single: each request has one row, which sees all of its keys. wide: rows may see more than a
    causal mask. least_q: no request has fewer rows, as far as the host knows.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    single: bool
    wide: bool
    least_q: int


class FlexattnMetadataBuilder(AttentionMetadataBuilder):
    """Metadata of a group of layers, whose plans are made with it, before anything is captured."""

    # Lengths are read on the device: one graph serves every batch of its rows.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.ALWAYS

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = [
            vllm_config.compilation_config.static_forward_context[name] for name in layer_names
        ]
        for layer in layers:
            layer.impl.prepare(layer, kv_cache_spec.block_size, layer.dtype, device)
        impl = layers[0].impl if layers else None
        self._spans: Spans | None = None
        self._steps = torch.arange(0)
        self._rows_of: Tensor | None = None
        self._causal = impl is None or impl.attn_type == AttentionType.DECODER
        if impl is not None and self._causal:
            self._spans = impl.plans.spans
        elif impl is not None and impl.packed:
            batch, most = impl.maxima["batch"], impl.maxima["kv_len"]
            self._steps = torch.arange(most, dtype=torch.int32, device=device)
            self._rows_of = torch.zeros(batch, most, dtype=torch.int32, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlexattnMetadata:
        """Plans cut a batch on the device: here is written what masks and encoders read of it."""
        common = common_attn_metadata
        lens, ends = common.seq_lens, common.query_start_loc
        table, wide = common.block_table_tensor, False
        if self._rows_of is not None:
            table = self._rows_of[: len(lens)]
            torch.add(ends[:-1, None], self._steps, out=table)
        elif self._causal:
            ranges = common.mm_req_doc_ranges or {}
            if self._spans is not None:
                wide = self._spans.fill(
                    ends, lens, common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound,
                    ranges, common.causal,
                )  # fmt: skip
            elif common.causal is not True or any(ranges.values()):
                raise UnsupportedError(
                    "attention that is not causal, of which vLLM's configuration says nothing",
                    "attention_config.use_non_causal, or a model with prefixes, says so first",
                )
        single = common.max_query_len == 1 and not wide and self._rows_of is None
        return FlexattnMetadata(
            common.num_actual_tokens, common.max_query_len, ends, common.max_seq_len, lens, table,
            common.slot_mapping, single and len(lens) <= common.num_actual_tokens, wide,
            0 if single else int(common.query_start_loc_cpu.diff().min()),
        )  # fmt: skip

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlexattnMetadata:
        """A graph of chunks serves batches with and without images, of any rows a request."""
        found = self.build(0, common_attn_metadata)
        found.wide, found.least_q = self._spans is not None, 0
        return found


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
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks, self._float_sinks = sinks, sinks
        self.packed = attn_type in _PACKED
        self.eight = None if self.packed else _EIGHT_BITS.get(kv_cache_dtype)
        token_head = kv_cache_dtype == _PER_TOKEN_HEAD
        self._about: dict[str, Any] = {
            "heads": (num_heads, self.num_kv_heads), "head_dim": (head_size, head_size),
            "kv_dtype": self.eight, "scale": self.scale, "softcap": logits_soft_cap,
            "window": sliding_window, "causal": attn_type == AttentionType.DECODER,
            "slopes": None if alibi_slopes is None else tuple(alibi_slopes),
            "sinks": sinks is not None,
            "scaled": self.eight is not None and ("token_head" if token_head else True),
        }  # fmt: skip
        config = get_current_vllm_config()
        scheduler, graphs = config.scheduler_config, config.compilation_config
        sizes = graphs.cudagraph_capture_sizes or []
        self._rows = max(scheduler.max_num_batched_tokens, *sizes, 1)
        longest = config.model_config.max_model_len
        if attn_type == AttentionType.ENCODER_DECODER:
            longest = max(longest, scheduler.max_num_encoder_input_tokens)
        self.maxima: dict[str, Any] = {
            "batch": scheduler.max_num_seqs, "kv_len": longest,
            "batch_invariant": True if envs.VLLM_BATCH_INVARIANT else None,
        }  # fmt: skip
        self._wide = self._about["causal"] and (
            config.model_config.is_mm_prefix_lm or config.attention_config.use_non_causal
        )
        self._images = config.model_config.is_mm_prefix_lm
        if self._wide and config.parallel_config.use_ubatching:
            raise UnsupportedError(
                "--enable-dbo with a model whose rows see more than a causal mask",
                "the metadata of one batch at a time stands where masks read it",
                "leave --enable-dbo out",
            )
        block = config.cache_config.block_size or _PAGES[0]
        self._guess = max((each for each in _PAGES if block % each == 0), default=_PAGES[0])
        before = [getattr(layer, "impl", None) for layer in graphs.static_forward_context.values()]
        plans = [impl.plans for impl in before if isinstance(impl, FlexattnImpl)]
        self.plans: Plans = plans[0] if plans else Plans()
        self._ready: tuple[Layer, LayerPlans] | None = None
        self._cache: tuple[Tensor, tuple[Tensor, Tensor], dict[str, Tensor]] | None = None
        device = torch.empty(0).device
        if device.type == "cuda" and not (self._wide or current().mods):
            # While weights are read.
            layer = self._layer("", self._guess, torch.get_default_dtype(), device)
            self.plans.begin(layer, self._rows, None, **self.maxima)

    def _layer(self, name: str, page: int, dtype: torch.dtype, device: torch.device) -> Layer:
        page = 1 if self.packed else page
        return Layer(dtype=dtype, device=device, page_size=page, name=name, **self._about)

    def prepare(self, layer: Any, page: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the layer's plans, one for single tokens and one for chunks; all later is launches.

        In the profiling run, so that their memory is counted, with the page that is expected then.
        """
        self.process_weights_after_loading(dtype)
        kind = self._layer(layer.layer_name, page, dtype, device)
        if self._wide:
            if self.plans.spans is None:
                self.plans.spans = Spans.empty(self.maxima["batch"], self._rows, device)
            clamped = not self._images or layer.mm_prefix_clamp_sliding_window
            kind = replace(kind, spans=self.plans.spans, clamped=clamped)
        if self._ready is None or self._ready[0] != kind:
            self._ready = kind, self.plans.of(kind, self._rows, **self.maxima)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Keep sinks as plans read them."""
        self._float_sinks = None if self.sinks is None else self.sinks.detach().float()

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values, by one kernel; padding has slots below 0."""
        if self.packed or not kv_cache.numel():
            return
        (k, v), scales = self._paged(layer, kv_cache)
        assert self._ready is not None
        n = min(len(key), len(slot_mapping))
        self._ready[1].append.run(
            key[:n], value[:n], (k, v), slot_mapping=slot_mapping[:n], **scales
        )

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
        if attn_metadata is None:  # a run for memory or compilation, with or without a cache
            if self._ready is None:
                self.prepare(layer, self._guess, query.dtype, query.device)
            return output.fill_(0)
        batch = attn_metadata
        rows = batch.num_actual_tokens
        given: dict[str, Any] = {"seq_lens": batch.seq_lens, "block_table": batch.block_table}
        if self._float_sinks is not None:
            given["sinks"] = self._float_sinks
        if self.packed:
            pages = key[:rows].unsqueeze(1), value[:rows].unsqueeze(1)
        else:
            pages, scales = self._paged(layer, kv_cache)
            given |= scales
        assert self._ready is not None
        plans = self._ready[1]
        if batch.single:
            requests = len(batch.seq_lens)
            q, out = query[:requests].unsqueeze(1), output[:requests].unsqueeze(1)
            plans.single.run(q, pages, out=out, **given)
        else:
            given |= {"cu_seqlens_q": batch.query_start_loc, "least_q": batch.least_q}
            plan = plans.spans if batch.wide else plans.chunks
            plan.run(query[:rows], pages, out=output[:rows], **given)
        return output

    def _paged(
        self, layer: Any, kv_cache: Tensor
    ) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
        """K and V as [blocks, block, Hkv, D] of vLLM's [blocks, Hkv, block, 2 D], of any strides,
        and their scales.

        These views are made once a cache, as are plans for its pages.
        """
        D, scaled = self.head_size, self._about["scaled"]
        if self._cache is None or self._cache[0] is not kv_cache:
            wide = 2 * D + (_SCALES if scaled == "token_head" else 0)
            if kv_cache.dim() != 4 or kv_cache.shape[1::2] != (self.num_kv_heads, wide):
                raise InputError(
                    f"a cache of shape {list(kv_cache.shape)}",
                    f"it is [blocks, {self.num_kv_heads}, block, {wide}]: each "
                    "head's keys, and values of the same dimension beside them",
                    "take vLLM 0.26 to 0.33, whose caches were read",
                )
            both = kv_cache.transpose(1, 2)
            own: dict[str, Tensor] = {}
            if scaled == "token_head":
                places = both[..., 2 * D : 2 * D + 8].view(torch.float32)
                own = {"k_scale": places[..., 0], "v_scale": places[..., 1]}
            if self.eight is not None:
                both = both.view(self.eight)
            self._cache = kv_cache, (both[..., :D], both[..., D : 2 * D]), own
            self.prepare(layer, kv_cache.shape[2], layer.dtype, kv_cache.device)
        _, pages, own = self._cache
        if scaled is True:
            own = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        return pages, own
