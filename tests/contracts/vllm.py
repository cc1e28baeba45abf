"""vLLM 0.33.0 as far as an attention backend sees it.

Read in vllm/v1/attention/backend.py, backends/registry.py, and model_executor/layers/attention/
attention.py, which calls a layer: first do_kv_cache_update, then forward.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from enum import Enum
from types import ModuleType, SimpleNamespace

import torch

VERSION = "0.33.0"


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionCGSupport(Enum):
    ALWAYS = 3
    NEVER = 0


class AttentionBackend(ABC):
    supported_dtypes = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [1]

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @classmethod
    def supports_head_size(cls, head_size):
        return True

    @classmethod
    def supports_sink(cls):
        return False

    @classmethod
    def supports_sliding_window(cls):
        return False

    @classmethod
    def supports_batch_invariance(cls):
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size,
        dtype,
        kv_cache_dtype,
        block_size,
        use_mla,
        has_sink,
        use_sparse,
        use_mm_prefix,
        device_capability,
    ):
        return None


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: object = True


class AttentionMetadataBuilder(ABC):
    _cudagraph_support = AttentionCGSupport.NEVER

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)


class AttentionImpl(ABC):
    @abstractmethod
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
    ): ...

    @abstractmethod
    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ): ...

    # Called, and on no base class.
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        raise NotImplementedError


# What the backend imports, by module; a release in which one of these is elsewhere breaks it.
CLASSES = {
    AttentionBackend: "FlexattnBackend",
    AttentionMetadataBuilder: "FlexattnMetadataBuilder",
    AttentionImpl: "FlexattnImpl",
}
BACKEND = "vllm.v1.attention.backend"
BYTES = {"fp8": torch.uint8, "fp8_e5m2": torch.uint8}


class _Registry:
    """AttentionBackendEnum's CUSTOM, and what is registered for it."""

    def __init__(self, path=None):
        self.path = path

    @property
    def CUSTOM(self):
        return self

    def is_overridden(self):
        return self.path is not None

    def get_path(self):
        return self.path

    def register_backend(self, backend, class_path=None, is_mamba=False):
        backend.path = class_path


def modules(config=None, path=None, invariant=False):
    """The modules that stand for vLLM; path: of the backend that is registered as CUSTOM."""
    names = "vllm vllm.config vllm.envs vllm.v1 vllm.v1.attention vllm.v1.attention.backend"
    registry = "vllm.v1.attention.backends.registry"
    found = {
        each: ModuleType(each) for each in [*names.split(), registry.rpartition(".")[0], registry]
    }
    for each in (
        AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadata,
        AttentionMetadataBuilder, AttentionType, CommonAttentionMetadata,
    ):  # fmt: skip
        setattr(found[BACKEND], each.__name__, each)
    found["vllm"].envs = found["vllm.envs"]
    found["vllm.envs"].VLLM_BATCH_INVARIANT = invariant
    found["vllm.config"].get_current_vllm_config = lambda: config
    custom = _Registry(path)
    found[registry].AttentionBackendEnum = custom
    found[registry].register_backend = custom.register_backend
    return found


def config(block, *, requests=6, tokens=40, length=128, dtype=torch.float32):
    """The fields of a VllmConfig that are read."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=requests, max_num_batched_tokens=tokens),
        compilation_config=SimpleNamespace(
            static_forward_context={}, cudagraph_capture_sizes=[1, 2, 4]
        ),
        cache_config=SimpleNamespace(block_size=block),
        model_config=SimpleNamespace(max_model_len=length, dtype=dtype),
    )


class Model:
    """One attention layer in vLLM's hands: profiled, given a cache, and run step by step.

    order: the cache's memory, "NHD" or "HND" behind the logical [blocks, Hkv, block, 2 D].
    """

    def __init__(self, backend, config, of, order="NHD", name="model.layers.3.attn", **layer):
        Hq, Hkv, D = of.shape
        self.config, self.kv_dtype = config, layer.get("kv_cache_dtype", "auto")
        self.impl = backend.get_impl_cls()(
            Hq, D, D**-0.5, Hkv, layer.pop("alibi_slopes", None),
            layer.pop("sliding_window", None), layer.pop("kv_cache_dtype", "auto"),
            layer.pop("logits_soft_cap", None), AttentionType.DECODER, None, **layer,
        )  # fmt: skip
        self.layer = SimpleNamespace(
            impl=self.impl, layer_name=name, dtype=of.dtype,
            _k_scale=of.scales[0], _v_scale=of.scales[1],
        )  # fmt: skip
        config.compilation_config.static_forward_context[name] = self.layer
        most = config.scheduler_config.max_num_batched_tokens
        rows = torch.zeros(most, Hq, D, dtype=of.dtype, device=of.device)
        out = torch.full_like(rows, torch.nan)
        self.impl.forward(self.layer, rows, None, None, torch.tensor([]), None, out)
        assert not out.any(), "a profiling run gives zeros"
        shape = {"NHD": (of.pages, of.page, Hkv), "HND": (of.pages, Hkv, of.page)}[order]
        dtype = BYTES.get(self.kv_dtype, of.dtype)
        nothing = 127 if dtype == torch.uint8 else torch.nan
        cache = torch.full((*shape, 2 * D), nothing, dtype=dtype, device=of.device)
        self.cache = cache.transpose(1, 2) if order == "NHD" else cache
        spec = SimpleNamespace(block_size=of.page)
        self.builder = backend.get_builder_cls()(spec, [name], config, of.device)

    def run(self, step, metadata=None):
        """out [rows, Hq, D] of a step, over metadata of a graph that was captured, where given."""
        if metadata is None:
            metadata = self.builder.build(0, common(step))
        return self.launch(metadata, step.q, step.k, step.v, step.slots)[: len(step.q)]

    def launch(self, metadata, q, k, v, slots):
        """What unified_kv_cache_update and unified_attention_with_output call."""
        self.impl.do_kv_cache_update(self.layer, k, v, self.cache, slots)
        out = torch.full_like(q, torch.nan)
        found = self.impl.forward(
            self.layer, q, k, v, self.cache, metadata, output=out, output_scale=None,
            output_block_scale=None,
        )  # fmt: skip
        assert found is out
        return out


def common(step):
    """The metadata of a step that nothing pads."""
    ends = torch.tensor([0, *step.q_lens]).cumsum(0).int()
    lens = torch.tensor(step.lens, dtype=torch.int32, device=step.q.device)
    return CommonAttentionMetadata(
        ends.to(step.q.device), ends, lens, len(step.lens), len(step.q),
        max(step.q_lens), max(step.lens), step.table, step.slots,
    )  # fmt: skip


FIELDS = [each.name for each in fields(CommonAttentionMetadata)]
