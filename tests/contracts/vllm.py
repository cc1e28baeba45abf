"""vLLM 0.26.0 to 0.33.0 as far as an attention backend sees it.

Read in vllm/v1/attention/backend.py, backends/registry.py, and model_executor/layers/attention/
attention.py, which calls a layer: first do_kv_cache_update, then forward. `RELEASES` says in what
they differ.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from enum import Enum
from types import ModuleType, SimpleNamespace

import torch

VERSION = "0.33.0"


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class KVQuantMode(Enum):
    NONE = 0
    FP8_PER_TENSOR = 1
    FP8_PER_TOKEN_HEAD = 3


class KVCacheLayout(Enum):
    LBHNC = (0, 1, 2, 3, 4)
    LBNHC = (0, 1, 3, 2, 4)
    LHBNC = (0, 2, 1, 3, 4)
    BLHNC = (1, 0, 2, 3, 4)
    BLNHC = (1, 0, 3, 2, 4)
    BHLNC = (1, 2, 0, 3, 4)


@dataclass(frozen=True)
class Spec:
    """A layer's cache: pages of [Hkv, block, content]."""

    block_size: int
    head_size: int
    head_size_v: int
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    state_content_bytes: int | None = None


class AttentionCGSupport(Enum):
    ALWAYS = 3
    NEVER = 0


class AttentionBackend(ABC):
    supported_dtypes = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

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

    supports_sliding_window = supports_batch_invariance = supports_sink
    supports_mm_prefix = supports_non_causal = supports_per_head_quant_scales = supports_sink

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

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


class OwnShape(AttentionBackend):
    """The base class up to 0.28."""

    @staticmethod
    def get_supported_kernel_block_sizes():
        return [1]

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"
    ): ...

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        raise NotImplementedError


class Layouts(AttentionBackend):
    """The base class from 0.29 on."""

    @staticmethod
    def get_supported_kernel_block_sizes():
        return [1]

    @classmethod
    def supported_kv_cache_layouts(cls):
        return None

    @classmethod
    def customize_spec(cls, spec):
        return spec


class SizesOfSpecs(Layouts):
    """The base class from 0.31 on."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [1]


RELEASES = {
    **dict.fromkeys(("0.26.0", "0.27.0", "0.28.0"), OwnShape),
    **dict.fromkeys(("0.29.0", "0.30.0"), Layouts),
    **dict.fromkeys(("0.31.0", "0.32.0", "0.33.0"), SizesOfSpecs),
}


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
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    mm_req_doc_ranges: dict | None = None


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
    OwnShape: "FlexattnBackend",
    Layouts: "FlexattnBackend",
    SizesOfSpecs: "FlexattnBackend",
    AttentionMetadataBuilder: "FlexattnMetadataBuilder",
    AttentionImpl: "FlexattnImpl",
}
BACKEND = "vllm.v1.attention.backend"
EIGHT_BITS = ("fp8", "fp8_e5m2", "fp8_per_token_head")


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


def modules(config=None, path=None, invariant=False, version=VERSION, order="NHD"):
    """The modules that stand for vLLM; path: of the backend that is registered as CUSTOM.

    order: of a cache's memory, where vLLM's settings say it.
    """
    names = "vllm vllm.config vllm.envs vllm.v1 vllm.v1.attention vllm.v1.attention.backend"
    registry = "vllm.v1.attention.backends.registry"
    found = {
        each: ModuleType(each) for each in [*names.split(), registry.rpartition(".")[0], registry]
    }
    found[BACKEND].AttentionBackend = RELEASES[version]
    if RELEASES[version] is OwnShape:
        utils = found["vllm.v1.attention.backends.utils"] = ModuleType("utils")
        utils.get_kv_cache_layout = lambda: order
    else:
        layouts = found["vllm.v1.kv_cache_layout"] = ModuleType("kv_cache_layout")
        layouts.KVCacheLayout = KVCacheLayout
    for each in (
        AttentionCGSupport, AttentionImpl, AttentionMetadata,
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


def config(
    block, *, requests=6, tokens=40, length=128, dtype=torch.float32, images=False, free=False
):
    """The fields of a VllmConfig that are read. images: tokens of one see each other. free:
    requests may say that they are not causal."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_seqs=requests, max_num_batched_tokens=tokens,
            max_num_encoder_input_tokens=tokens,
        ),
        attention_config=SimpleNamespace(use_non_causal=free),
        parallel_config=SimpleNamespace(use_ubatching=False),
        compilation_config=SimpleNamespace(
            static_forward_context={}, cudagraph_capture_sizes=[1, 2, 4]
        ),
        cache_config=SimpleNamespace(block_size=block),
        model_config=SimpleNamespace(max_model_len=length, dtype=dtype, is_mm_prefix_lm=images),
    )  # fmt: skip


class Model:
    """One attention layer in vLLM's hands: profiled, given a cache, and run step by step.

    order: the cache's memory, "NHD" or "HND" behind the logical [blocks, Hkv, block, content].
    """

    def __init__(
        self, backend, config, of, order="NHD", name="model.layers.3.attn", clamp=False,
        kind=AttentionType.DECODER, **layer,
    ):  # fmt: skip
        Hq, Hkv, D = of.shape
        self.config, self.kv_dtype = config, layer.get("kv_cache_dtype", "auto")
        self.impl = backend.get_impl_cls()(
            Hq, D, D**-0.5, Hkv, layer.pop("alibi_slopes", None),
            layer.pop("sliding_window", None), layer.pop("kv_cache_dtype", "auto"),
            layer.pop("logits_soft_cap", None), kind, None, **layer,
        )  # fmt: skip
        self.layer = SimpleNamespace(
            impl=self.impl, layer_name=name, dtype=of.dtype, mm_prefix_clamp_sliding_window=clamp,
            _k_scale=of.scales[0], _v_scale=of.scales[1],
        )  # fmt: skip
        config.compilation_config.static_forward_context[name] = self.layer
        self.warm(of)
        token_head = self.kv_dtype == "fp8_per_token_head"
        mode = KVQuantMode.FP8_PER_TOKEN_HEAD if token_head else KVQuantMode.NONE
        spec = Spec(of.page, D, D, mode)
        content = 2 * D
        if issubclass(backend, Layouts):
            spec = backend.customize_spec(spec)
            content = spec.state_content_bytes or content
        shape = (of.pages, Hkv, of.page, content)
        memory = (0, 2, 1, 3) if order == "NHD" else (0, 1, 2, 3)
        if issubclass(backend, OwnShape):
            assert shape == backend.get_kv_cache_shape(of.pages, of.page, Hkv, D, self.kv_dtype)
            memory = backend.get_kv_cache_stride_order()
        eight = self.kv_dtype in EIGHT_BITS
        cache = torch.full(
            [shape[axis] for axis in memory], 127 if eight else torch.nan,
            dtype=torch.uint8 if eight else of.dtype, device=of.device,
        )  # fmt: skip
        self.cache = cache.permute([memory.index(axis) for axis in range(4)])
        self.builder = backend.get_builder_cls()(spec, [name], config, of.device)

    def warm(self, of):
        """A forward without metadata, as vLLM runs for memory, and again behind its cache."""
        Hq, _, D = of.shape
        most = self.config.scheduler_config.max_num_batched_tokens
        rows = torch.zeros(most, Hq, D, dtype=of.dtype, device=of.device)
        out = torch.full_like(rows, torch.nan)
        self.impl.forward(self.layer, rows, None, None, torch.tensor([]), None, out)
        assert not out.any(), "a profiling run gives zeros"

    def run(self, step, metadata=None, **batch):
        """out [rows, Hq, D] of a step, over metadata of a graph that was captured, where given.

        batch: fields of its metadata.
        """
        if metadata is None:
            metadata = self.builder.build(0, common(step, **batch))
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


def common(step, **batch):
    """The metadata of a step that nothing pads."""
    ends = torch.tensor([0, *step.q_lens]).cumsum(0).int()
    lens = torch.tensor(step.lens, dtype=torch.int32, device=step.q.device)
    return CommonAttentionMetadata(
        ends.to(step.q.device), ends, lens, len(step.lens), len(step.q),
        max(step.q_lens), max(step.lens), step.table, step.slots,
        **{"seq_lens_cpu_upper_bound": lens.cpu(), **batch},
    )  # fmt: skip


FIELDS = [each.name for each in fields(CommonAttentionMetadata)]
FIRST = FIELDS[:-2]
