"""SGLang 0.5.23 as far as an attention backend sees it.

Read in sglang/srt: layers/attention/base_attn_backend.py and attention_registry.py, layers/
radix_attention.py, mem_cache/{memory_pool,swa_memory_pool,kv_index_translator}.py,
model_executor/forward_batch_info.py, arg_groups/choices.py, plugins/__init__.py.
"""

from enum import Enum, IntEnum, auto
from types import ModuleType, SimpleNamespace

import torch

VERSION = "0.5.23"


class AttentionType(Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class IdSpaceKind(Enum):
    FULL = auto()
    SLIDING_WINDOW = auto()


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()

    def is_decode(self):
        return self == ForwardMode.DECODE

    def is_decode_or_idle(self):
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_target_verify(self):
        return self == ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self):
        return False


class AttentionBackend:
    needs_cpu_seq_lens = True
    kv_index_translator = None

    def init_forward_metadata(self, forward_batch):
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        return None

    def init_forward_metadata_in_graph(self, forward_batch):
        return None

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        raise NotImplementedError

    def get_cuda_graph_seq_len_fill_value(self):
        raise NotImplementedError

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        mode = forward_batch.forward_mode
        serve = self.forward_decode if mode.is_decode() else self.forward_extend
        return serve(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise NotImplementedError

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise NotImplementedError


CLASSES = {AttentionBackend: "FlexattnBackend"}


class KVWriteLoc:
    """Where a layer's keys go: in its pool's slots, and in those of the pool with windows."""

    def __init__(self, loc, swa_loc=None):
        self.loc, self.swa_loc = loc, swa_loc

    @classmethod
    def for_layer(cls, forward_batch, layer, *, swa_loc=None, full_loc=None):
        return cls(forward_batch.out_cache_loc, swa_loc)


class Pool:
    """MHATokenToKVPool of one layer: K and V [size + page, Hkv, D], or "hnd" pages."""

    def __init__(self, of, layout="nhd", eight=None):
        Hkv, D = of.shape[1:]
        shape = (of.pages * of.page, Hkv, D)
        if layout == "hnd":
            shape = (of.pages, Hkv, of.page, D)
        self.page, self.layout, self.dtype = of.page, layout, eight or of.dtype
        self.buffers = [
            torch.full(shape, torch.nan, device=of.device).to(self.dtype) for _ in "kv"
        ]

    def get_kv_buffer(self, layer_id):
        return tuple(each.view(self.dtype) for each in self.buffers)

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        self.write(loc_info.loc, cache_k, cache_v, k_scale, v_scale)

    def write(self, slots, k, v, k_scale, v_scale):
        where = slots // self.page, slots % self.page
        for pool, new, scale in zip(self.buffers, (k, v), (k_scale, v_scale), strict=True):
            rows = new if scale is None else new.float() / scale
            if pool.dtype.itemsize == 1:
                most = torch.finfo(pool.dtype).max
                rows = rows.clamp(-most, most)
            pages = pool.unflatten(0, (-1, self.page)) if pool.dim() == 3 else pool.transpose(1, 2)
            pages[where] = rows.to(pool.dtype)


class SWAKVPool(Pool):
    """A pool whose layer has a window, and slots of its own: here those of the other end."""

    def __init__(self, of, **more):
        super().__init__(of, **more)
        self.layers_mapping = {3: (0, True)}
        pages = torch.arange(of.pages).flip(0)[:, None] * of.page
        self.moved = (pages + torch.arange(of.page)).flatten().to(of.device)

    def translate_loc_from_full_to_swa(self, kv_indices):
        return self.moved[kv_indices]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        self.write(loc_info.swa_loc, cache_k, cache_v, k_scale, v_scale)


def layer(of, **fields):
    """A RadixAttention's fields, by their defaults."""
    Hq, Hkv, D = of.shape
    return SimpleNamespace(**{
        "tp_q_head_num": Hq, "tp_k_head_num": Hkv, "tp_v_head_num": Hkv, "head_dim": D,
        "qk_head_dim": D, "v_head_dim": D, "scaling": D**-0.5, "layer_id": 3, "logit_cap": 0.0,
        "sliding_window_size": -1, "is_cross_attention": False, "use_irope": False,
        "k_scale": None, "v_scale": None, "attn_type": AttentionType.DECODER,
        "xai_temperature_len": -1, **fields,
    })  # fmt: skip


def modules(invariant=False):
    """The modules that stand for SGLang."""
    srt = "sglang.srt"
    names = [
        "sglang", srt, f"{srt}.layers", f"{srt}.layers.attention", f"{srt}.mem_cache",
        f"{srt}.arg_groups",
    ]  # fmt: skip
    found = {each: ModuleType(each) for each in names}

    def add(name, **held):
        module = found[f"{srt}.{name}"] = ModuleType(f"{srt}.{name}")
        module.__dict__.update(held)
        setattr(found[module.__name__.rpartition(".")[0]], name.rpartition(".")[2], module)

    lists = {
        "ATTENTION_BACKEND_CHOICES": ["triton", "fa3"],
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": ["triton"],
        "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": ["triton"],
    }
    adders = {
        "add_attention_backend_choices": 0,
        "add_deterministic_attention_backend_choices": 1,
        "add_radix_supported_deterministic_attention_backend_choices": 2,
    }
    held = [*lists.values()]
    add("arg_groups.choices", **lists, **{name: held[i].extend for name, i in adders.items()})
    backends = {}

    def register_attention_backend(name):
        return lambda factory: backends.setdefault(name, factory)

    add(
        "layers.attention.attention_registry",
        ATTENTION_BACKENDS=backends,
        register_attention_backend=register_attention_backend,
    )
    add("layers.attention.base_attn_backend", AttentionBackend=AttentionBackend)
    add("layers.radix_attention", AttentionType=AttentionType)
    add("mem_cache.kv_loc_plan", IdSpaceKind=IdSpaceKind)
    add("mem_cache.memory_pool", KVWriteLoc=KVWriteLoc)
    add("mem_cache.swa_memory_pool", SWAKVPool=SWAKVPool)
    deterministic = SimpleNamespace(enable_deterministic_inference=invariant)
    add(
        "runtime_context",
        get_exec=lambda: SimpleNamespace(deterministic=deterministic),
        get_schedule=lambda: SimpleNamespace(max_prefill_tokens=64),
        max_prefill_buffer_tokens=lambda: 32,
    )
    return found


def runner(of, pool, *, requests=6, length=96):
    """The fields of a ModelRunner that are read."""

    def write_ids(forward_batch, kind=IdSpaceKind.FULL):
        if kind is IdSpaceKind.SLIDING_WINDOW and isinstance(pool, SWAKVPool):
            return pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
        return None

    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(
            size=requests,
            req_to_token=torch.zeros(requests + 1, length, dtype=torch.int32, device=of.device),
        ),
        token_to_kv_pool=pool, device=str(of.device), page_size=of.page, use_mla_backend=False,
        kv_index_translator=SimpleNamespace(is_translating=False, write_ids=write_ids),
    )  # fmt: skip


def forward_batch(step, runner, mode, page):
    """A ForwardBatch of a step, whose requests stand in rows 1, 2, … of req_to_token."""
    n = len(step.lens)
    tokens = runner.req_to_token_pool.req_to_token
    for b, length in enumerate(step.lens):
        places = torch.arange(length, device=tokens.device)
        tokens[b + 1, :length] = step.table[b, places // page] * page + places % page
    return SimpleNamespace(
        forward_mode=mode, batch_size=n,
        req_pool_indices=torch.arange(1, n + 1, device=tokens.device),
        seq_lens=torch.tensor(step.lens, device=tokens.device), out_cache_loc=step.slots,
        extend_seq_lens=torch.tensor(step.q_lens, device=tokens.device), spec_info=None,
        encoder_lens=None,
    )  # fmt: skip
