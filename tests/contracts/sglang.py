"""SGLang 0.5.17 to 0.5.23 as far as an attention backend sees it; RELEASES says how they differ.

Read in sglang/srt: layers/attention/base_attn_backend.py and attention_registry.py, layers/
radix_attention.py, mem_cache/{memory_pool,swa_memory_pool,kv_index_translator}.py,
model_executor/forward_batch_info.py, arg_groups/choices.py, plugins/__init__.py.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from types import ModuleType, SimpleNamespace

import torch


@dataclass(frozen=True)
class Release:
    """choices: the module of the lists of backends. translator: what says the slots of layers with
    windows, "" where the pool does. ceiling: tokens of a prefill are a function's."""

    choices: str
    translator: str
    ceiling: bool


RELEASES = {
    "0.5.17": Release("server_args", "", False),
    "0.5.18": Release("server_args", "", True),
    "0.5.19": Release("server_args", "sliding_window_write_loc_for", True),
    **dict.fromkeys(
        ("0.5.20", "0.5.21"),
        Release("arg_groups.choices", "sliding_window_write_loc_for", True),
    ),
    **dict.fromkeys(("0.5.22", "0.5.23"), Release("arg_groups.choices", "write_ids", True)),
}
# One of each kind.
KINDS = ("0.5.17", "0.5.19", "0.5.23")
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


class SWAKVPool(Pool):
    """A pool whose layer has a window, and slots of its own: here those of the other end."""

    def __init__(self, of, **more):
        super().__init__(of, **more)
        self.layers_mapping = {3: (0, True)}
        pages = torch.arange(of.pages).flip(0)[:, None] * of.page
        self.moved = (pages + torch.arange(of.page)).flatten().to(of.device)

    def translate_loc_from_full_to_swa(self, kv_indices):
        return self.moved[kv_indices]


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


def modules(invariant=False, version=VERSION, drafted=None):
    """The modules that stand for SGLang. drafted: tokens of a draft."""
    release, srt = RELEASES[version], "sglang.srt"
    names = ["sglang", srt, f"{srt}.layers", f"{srt}.layers.attention", f"{srt}.mem_cache"]
    found = {each: ModuleType(each) for each in names}

    def add(name, **held):
        module = found[f"{srt}.{name}"] = ModuleType(f"{srt}.{name}")
        module.__dict__.update(held)
        setattr(found[module.__name__.rpartition(".")[0]], name.rpartition(".")[2], module)

    add("arg_groups")
    add(
        release.choices,
        ATTENTION_BACKEND_CHOICES=["triton", "fa3"],
        DETERMINISTIC_ATTENTION_BACKEND_CHOICES=["triton"],
        RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND=["triton"],
    )
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
    if release.translator == "write_ids":
        add("mem_cache.kv_loc_plan", IdSpaceKind=IdSpaceKind)
    add("mem_cache.swa_memory_pool", SWAKVPool=SWAKVPool)
    deterministic = SimpleNamespace(enable_deterministic_inference=invariant)
    add(
        "runtime_context",
        get_exec=lambda: SimpleNamespace(deterministic=deterministic),
        get_schedule=lambda: SimpleNamespace(max_prefill_tokens=64, chunked_prefill_size=32),
        get_spec=lambda: SimpleNamespace(speculative_num_draft_tokens=drafted),
    )
    if release.ceiling:
        found[f"{srt}.runtime_context"].max_prefill_buffer_tokens = lambda: 32
    return found


def runner(of, pool, *, requests=6, length=96, version=VERSION):
    """The fields of a ModelRunner that are read."""
    found = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(
            size=requests,
            req_to_token=torch.zeros(requests + 1, length, dtype=torch.int32, device=of.device),
        ),
        token_to_kv_pool=pool, device=str(of.device), page_size=of.page, use_mla_backend=False,
        is_draft_worker=False,
    )  # fmt: skip
    named = RELEASES[version].translator

    def write_ids(forward_batch, kind=IdSpaceKind.FULL):
        if kind is IdSpaceKind.SLIDING_WINDOW and isinstance(pool, SWAKVPool):
            return pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
        return None

    if named:
        found.kv_index_translator = SimpleNamespace(is_translating=False)
        if named == "write_ids":
            found.kv_index_translator.write_ids = write_ids
    return found


def forward_batch(step, runner, mode, page, tree=None):
    """A ForwardBatch of a step, whose requests stand in rows 1, 2, … of req_to_token.

    tree: of a draft, by request, bool [n, n]: which tokens each one sees; its keys come on top.
    """
    n = len(step.lens)
    tokens = runner.req_to_token_pool.req_to_token
    for b, length in enumerate(step.lens):
        places = torch.arange(length, device=tokens.device)
        tokens[b + 1, :length] = step.table[b, places // page] * page + places % page
    lens, spec = step.lens, None
    if mode == ForwardMode.TARGET_VERIFY:
        drafted = step.q_lens[0]
        lens = [each - drafted for each in lens]
        mask = None
        if tree is not None:
            past = [torch.ones(drafted, each, dtype=torch.bool) for each in lens]
            each = zip(past, tree, strict=True)
            mask = torch.cat([torch.cat(parts, 1).flatten() for parts in each])
        spec = SimpleNamespace(custom_mask=mask, draft_token_num=drafted)
    return SimpleNamespace(
        forward_mode=mode, batch_size=n,
        req_pool_indices=torch.arange(1, n + 1, device=tokens.device),
        seq_lens=torch.tensor(lens, device=tokens.device), out_cache_loc=step.slots,
        extend_seq_lens=torch.tensor(step.q_lens, device=tokens.device), spec_info=spec,
        encoder_lens=None,
    )  # fmt: skip
