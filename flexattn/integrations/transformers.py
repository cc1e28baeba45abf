"""register(): "flexattn" as an attention implementation of Hugging Face transformers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn import catalogue
from flexattn.block_mask.create import create_block_mask
from flexattn.block_mask.lists import MOST_ROWS, few_rows
from flexattn.errors import InputError, UnsupportedError
from flexattn.frontend.attention import flex_attention
from flexattn.frontend.varlen import varlen_attn
from flexattn.integrations.decode_masks import (
    MaskFunction,
    and_padding,
    check_again,
    decoding_mask,
    is_few,
    moved_mask,
    padded_mask,
    shared_mask,
    static_mask,
    window_of,
)
from flexattn.integrations.paged import accept, attend_paged

_NAME = "flexattn"
# Continuous batching takes no name without "flash" in it.
PAGED = "flexattn_flash2"
# Tensors that models hand on and that say nothing beside the mask, whatever it is; and those of
# which a mask that transformers made has what they say.
_NO_PART = frozenset({"position_ids", "cache_position", "num_items_in_batch"})
_IN_A_MASK = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})

# A mask's window, where it is known to have no other condition but that of packed sequences.
_WINDOW = "_flexattn_window"


def register(name: str = _NAME) -> None:
    """Let models be made with attn_implementation=name; a second call changes nothing.

    PAGED, which `serve_batches` sets, is the implementation of generate_batch.
    Raises UnsupportedError where transformers is missing, or too old to say where queries stand.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise UnsupportedError(
            f"transformers cannot be imported: {error}",
            "the integration registers functions with it",
            "pip install 'flexattn[transformers]'",
        ) from None
    if not {"q_length", "q_offset"} <= inspect.signature(sdpa_mask).parameters.keys():
        raise UnsupportedError(
            f"transformers {__version__}",
            "it gives a mask q_length and q_offset, as releases from 5.23 on do",
            "pip install 'flexattn[transformers]'",
        )
    AttentionInterface.register(name, attend_transformers)
    AttentionMaskInterface.register(name, model_mask)
    # Without a mask of its own: lengths say what each row sees.
    AttentionInterface.register(PAGED, attend_paged)
    accept(PAGED)


def serve_batches(model: Any) -> None:
    """Let a model's generate_batch run through this library: its attention becomes PAGED.

    Raises as `register`, which it calls. `model.set_attn_implementation` takes it back.
    """
    register()
    for each in model.modules():
        listed = getattr(each, "_compatible_flash_implementations", None)
        if listed is not None and PAGED not in listed:
            each._compatible_flash_implementations = [*listed, PAGED]
    model.set_attn_implementation(PAGED)


def model_mask(*, config: Any = None, **asked: Any) -> BlockMask | Tensor | None:
    """The mask of one forward: a BlockMask of `make_mask`, or the tensor that a model needs.

    config: the model's, whose class decides. asked: what transformers' mask interface asks for.
    """
    kind = "block" if config is None else mask_kind(type(config))
    if kind == "block":
        return make_mask(config=config, **asked)
    from transformers.masking_utils import eager_mask, sdpa_mask

    make = sdpa_mask if kind == "sdpa" else eager_mask
    made: Tensor | None = make(config=config, **asked)
    return made


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = catalogue.causal,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    config: object = None,
    **rest: object,
) -> BlockMask | None:
    """The BlockMask of one forward, as transformers' mask interface asks for it.

    mask_function(b, h, q_idx, kv_idx) takes positions in the sequence: row 0 stands at q_offset,
    key 0 at kv_offset. attention_mask [B, keys seen so far], bool: False where a key is padding.
    None where every row sees every key, as one new token does of a cache that grows by the token
    and of a window's worth of keys.
    """
    # A window ends at the newest key, a chunk may end anywhere but before its length.
    chunked = getattr(config, "attention_chunk_size", None) is not None
    local = kv_offset + kv_length if chunked else kv_length
    near = local_size is None or local <= local_size
    newest = False
    if allow_is_causal_skip and q_length == 1 and isinstance(q_offset, int):
        newest = near and q_offset + 1 == kv_offset + kv_length
    if newest and _asks(attention_mask, (batch_size, kv_offset + kv_length)):
        assert attention_mask is not None and isinstance(q_offset, int)
        seen = attention_mask[:, kv_offset:] if kv_offset else attention_mask
        if is_few(seen):
            return _contiguous(padded_mask(seen, q_offset))
        if not kv_offset:
            return _contiguous(decoding_mask(seen))
    compiling = torch.compiler.is_dynamo_compiling()  # a mask that is made in a graph stays there
    all_seen = allow_is_bidirectional_skip and local_size is None
    # A compiled step: transformers lets no mask be left out, of one row and of a cache that stays.
    step = not (allow_is_causal_skip or allow_is_bidirectional_skip)
    step = q_length == 1 and kv_length > 0 and (step or isinstance(q_offset, Tensor))
    if step and not compiling and not (all_seen and attention_mask is None):
        return _contiguous(static_mask(
            mask_function, batch_size, kv_length, q_offset, kv_offset, attention_mask, near,
            torch.device(device),
        ))  # fmt: skip
    if q_length > 1 and not compiling:
        check_again()
    padding = _padding(attention_mask, kv_offset, kv_length, whole=all_seen)
    if padding is None and (newest or all_seen):
        return None
    # A static cache gives the very tensor that it counts in, and counts on before the kernel runs.
    first = q_offset.clone() if isinstance(q_offset, Tensor) else q_offset
    mask_mod = and_padding(moved_mask(mask_function, first, kv_offset), padding)
    if q_length <= MOST_ROWS and kv_length and not compiling:
        return _contiguous(
            few_rows(mask_mod, batch_size, q_length, kv_length, torch.device(device))
        )
    mask = create_block_mask(mask_mod, batch_size, None, q_length, kv_length, device)
    if compiling:
        return mask
    if padding is None and q_length == kv_length and isinstance(q_offset, int):
        setattr(mask, _WINDOW, window_of(mask_function) if q_offset == kv_offset else None)
    return _contiguous(mask)


def attend_transformers(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    sinks: Tensor | None = None,
    attention_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **rest: object,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers' attention interface asks for it.

    query [B, Hq, L, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv]; attention_mask: of
    `model_mask`, or a tensor [B or 1, Hq or 1, L or 1, S or more], bool or added to the
    scores. s_aux or sinks: the layer's sinks, one of each head, or [B or 1, Hq, L, 1].
    position_bias, attention_bias: added to the scores, as such a tensor. indices int [B, L, any]:
    the keys that a row sees of those in the mask. Without a mask, rows see keys up to their own
    where the layer is causal and L is above 1.

    Returns out [B, L, Hq, Dv], and None for the weights. Raises as flex_attention does, and
    UnsupportedError for transformers' own paged cache and for other tensors and floats among
    `rest`. dropout: where the module trains.
    cu_seq_lens_q, cu_seq_lens_k: of one row of packed sequences, which attend each within itself
    by `varlen_attn` where the mask is a window, or there is none.
    """
    if s_aux is not None and sinks is not None:
        raise InputError("both s_aux and sinks", "a layer has one kind of sinks")
    sinks = s_aux if sinks is None else sinks
    of_rows = sinks is not None and sinks.numel() != query.shape[1]
    given: dict[str, Any] = {
        "scale": scaling, "enable_gqa": True,
        "sinks": None if sinks is None or of_rows else sinks.reshape(-1),
        "dropout_p": dropout if dropout and module.training else 0.0,
    }  # fmt: skip
    cu_q, cu_k = rest.get("cu_seq_lens_q"), rest.get("cu_seq_lens_k")
    if len(query) == 1 and isinstance(cu_q, Tensor) and isinstance(cu_k, Tensor):
        causal = _causes(module) if is_causal is None else is_causal
        window = _window(attention_mask, causal, sliding_window)
        plain = position_bias is attention_bias is indices is None and not of_rows
        if window is not None and plain:
            _refuse(module, rest, True)
            rows, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
            found = varlen_attn(
                rows, keys, values, cu_q, cu_k, score_mod=_score_mod(softcap, []), window=window,
                **given,
            )  # fmt: skip
            return found[None].contiguous(), None
    _refuse(module, rest, attention_mask is not None)
    biases = [
        _spread(each, query, key) for each in (position_bias, attention_bias) if each is not None
    ]
    mask = None
    if isinstance(attention_mask, BlockMask):
        mask = shared_mask(attention_mask)
    elif isinstance(attention_mask, Tensor):
        table = _spread(attention_mask, query, key)
        if table.dtype == torch.bool:
            mask = _mask_of(table, attention_mask.shape[1] > 1)
        else:
            biases.append(table)
    elif query.shape[2] > 1 and (_causes(module) if is_causal is None else is_causal):
        mask = _causal(query.shape[2], key.shape[2], sliding_window, query.device)
    if indices is not None:
        mask = _chosen(mask, indices, query, key)
    score_mod = _score_mod(softcap, biases)
    if of_rows:
        assert sinks is not None
        out, lse = flex_attention(query, key, value, score_mod, mask, return_lse=True, **given)
        out = _with_sinks(out, lse, sinks)
    else:
        out = flex_attention(query, key, value, score_mod, mask, **given)
    return out.transpose(1, 2).contiguous(), None


class _Mask(BlockMask):
    """A mask that `generate` may ask to be contiguous, as it asks those of a static cache."""

    def contiguous(self) -> BlockMask:
        """Itself: its lists are contiguous."""
        return self


def _contiguous(mask: BlockMask | None) -> BlockMask | None:
    if mask is not None:
        mask.__class__ = _Mask
    return mask


def _graphed(mask: Tensor) -> bool:
    """True where no number can be read back: a graph cannot hold the wait for a GPU."""
    return torch.compiler.is_dynamo_compiling() or (
        mask.is_cuda and torch.cuda.is_current_stream_capturing()
    )


def _asks(mask: Tensor | None, shape: tuple[int, int]) -> bool:
    """True of a bool mask of this shape whose values may be read now."""
    found = mask is not None and mask.shape == shape and mask.dtype == torch.bool
    return found and mask is not None and not _graphed(mask)


def _padding(mask: Tensor | None, offset: int, keys: int, whole: bool) -> Tensor | None:
    """The padding mask of these keys, or None where it is known to remove none of them.

    offset: the position of the first one; what stood before has left the cache. whole: whether
    rows see the keys behind the mask's end too, which it removes.
    """
    if mask is None:
        return None
    short = whole and mask.shape[-1] < offset + keys
    if not short and not _graphed(mask) and bool(mask[:, offset : offset + keys].all()):
        return None
    missing = offset + keys - mask.shape[-1]
    mask = torch.nn.functional.pad(mask, (0, missing)) if missing > 0 else mask
    return mask[:, offset:] if offset else mask


def _causes(module: torch.nn.Module) -> bool:
    """True where a layer without a mask is causal: of those that do not say it, only sdpa's."""
    known = getattr(module, "is_causal", None)
    config = getattr(module, "config", None)
    return bool((config is None or mask_kind(type(config)) == "sdpa") if known is None else known)


def _refuse(module: torch.nn.Module, rest: Mapping[str, Any], masked: bool) -> None:
    """Raise for what may change the result and is not used; masked: whether there is a mask."""
    if rest.get("cache") is not None:
        raise UnsupportedError(
            "the paged cache of generate_batch",
            "this implementation reads the contiguous caches of generate",
            "call serve_batches(model) before generate_batch",
        )
    known = _NO_PART | _IN_A_MASK if masked else _NO_PART
    for name, value in rest.items():
        if isinstance(value, (Tensor, float)) and name not in known:
            shape = f" {list(value.shape)}" if isinstance(value, Tensor) else ""
            raise UnsupportedError(
                f"{type(module).__name__} hands its attention {name}{shape}",
                "of tensors and numbers this implementation uses s_aux, sinks, position_bias, "
                "attention_bias, indices, softcap and sliding_window"
                + (", and sequences that are packed by a mask" if name in _IN_A_MASK else ""),
                f"call the model without {name}, or model.set_attn_implementation('eager')",
            )


def _window(
    mask: BlockMask | Tensor | None, causal: bool, sliding_window: int | None
) -> tuple[int, int] | None:
    """The window that a mask is known to be, or that a layer without one has; None of others."""
    if mask is not None:
        found: tuple[int, int] | None = getattr(mask, _WINDOW, None)
        return found
    return -1 if sliding_window is None else sliding_window - 1, 0 if causal else -1


def _chosen(mask: BlockMask | None, indices: Tensor, query: Tensor, key: Tensor) -> BlockMask:
    """The keys of a mask, or of all, that stand in indices [B, L, any]."""
    B, Hq, L, _ = query.shape
    table = torch.zeros(B, L, key.shape[2], dtype=torch.bool, device=query.device)
    table = table.scatter(-1, indices.long(), True)

    def chosen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        found = table[b, q_idx, kv_idx]
        return found if mask is None else found & mask.mask_mod(b, h, q_idx, kv_idx)

    heads = Hq if mask is not None and mask.shape[1] > 1 else None
    return create_block_mask(chosen, B, heads, L, key.shape[2], query.device)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """out [B, Hq, L, Dv] where each row has a sink of its own: [B or 1, Hq, L, 1]."""
    shape = (*lse.shape, 1)
    if sinks.dim() != 4 or any(
        got not in (1, size) for got, size in zip(sinks.shape, shape, strict=True)
    ):
        raise InputError(
            f"sinks of shape {tuple(sinks.shape)} for out {tuple(out.shape)}",
            "there is one of each head, or one of each row: [B, heads, rows, 1]",
        )
    return out * torch.sigmoid(lse[..., None] - sinks).to(out.dtype)


def _spread(table: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask or bias as a view of [B, Hq, L, S], where it is broadcast with strides of 0."""
    shape = (*query.shape[:3], key.shape[2])
    table = table[..., : shape[3]]
    if table.dim() != 4 or any(
        got not in (1, size) for got, size in zip(table.shape, shape, strict=True)
    ):
        raise InputError(
            f"a mask or bias of shape {tuple(table.shape)} for scores {shape}",
            "it has four dimensions, each the scores' or 1, and as many keys or more",
        )
    return table.expand(shape)


def _mask_of(table: Tensor, per_head: bool) -> BlockMask:
    def listed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[b, h if per_head else 0, q_idx, kv_idx]

    B, Hq, L, S = table.shape
    return create_block_mask(listed, B, Hq if per_head else None, L, S, table.device)


@lru_cache(maxsize=16)
def _causal(q_len: int, kv_len: int, window: int | None, device: torch.device) -> BlockMask:
    """Rows and keys counted from the same first position, as torch's is_causal has it."""

    mask_mod = catalogue.causal if window is None else catalogue.sliding_window(window - 1)
    return create_block_mask(mask_mod, None, None, q_len, kv_len, device)


def _score_mod(cap: float | None, biases: list[Tensor]) -> Callable[..., Tensor] | None:
    """Soft-capping, then what is added: None where there is neither."""
    if not biases:
        return None if cap is None else catalogue.softcap(cap)

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        for bias in biases:
            score = score + bias[b, h, q_idx, kv_idx]
        return score

    return biased


MaskKind = Literal["block", "sdpa", "eager"]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def mask_kind(config_class: type) -> MaskKind:
    """The kind of mask for models whose configs are of a class.

    "block", a BlockMask, where the model declares that it supports flex_attention, has its
    attention replaced, and handles no BlockMask in its own code. Else a tensor: "sdpa", bool, or
    "eager", added to scores, where the model has no sdpa, or always runs its own attention.
    Where no loaded model has such configs: "block".
    """
    return _kind(config_class)


@lru_cache(maxsize=256)
def _kind(config_class: Any) -> MaskKind:
    models: list[Any] = next(filter(None, map(_models_of, config_class.__mro__)), [])
    replaced = all(each._can_set_attn_implementation() for each in models)
    own = any(hasattr(sys.modules.get(each.__module__), "BlockMask") for each in models)
    if replaced and not own and all(each._supports_flex_attn for each in models):
        return "block"
    return "sdpa" if replaced and all(each._supports_sdpa for each in models) else "eager"


def _models_of(config_class: type) -> list[Any]:
    from transformers import PreTrainedModel

    return [each for each in _below(PreTrainedModel) if each.config_class is config_class]


def _below(base: Any) -> Iterator[Any]:
    for each in base.__subclasses__():
        yield each
        yield from _below(each)
