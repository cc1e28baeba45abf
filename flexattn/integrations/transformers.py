"""register(): "flexattn" as an attention implementation of Hugging Face transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn import catalogue
from flexattn.block_mask.create import create_block_mask
from flexattn.block_mask.few_rows import MOST_ROWS, few_rows
from flexattn.errors import InputError, UnsupportedError
from flexattn.frontend.attention import flex_attention
from flexattn.integrations.padded_step import check_again, is_few, padded_mask, shared_mask
from flexattn.integrations.padding import decoding_mask
from flexattn.integrations.paged import accept, attend_paged
from flexattn.integrations.static_step import MaskFunction, static_mask

_NAME = "flexattn"
# Continuous batching takes no name without "flash" in it.
PAGED = "flexattn_flash2"

_capped = lru_cache(maxsize=64)(catalogue.softcap)


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
    AttentionMaskInterface.register(name, make_mask)
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

    def placed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_function(b, h, q_idx + first, kv_idx + kv_offset)

    def padded(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert padding is not None
        place = kv_idx + kv_offset
        return mask_function(b, h, q_idx + first, place) & padding[b, place]

    mask_mod = placed if padding is None else padded
    if q_length <= MOST_ROWS and kv_length and not compiling:
        return _contiguous(
            few_rows(mask_mod, batch_size, q_length, kv_length, torch.device(device))
        )
    mask = create_block_mask(mask_mod, batch_size, None, q_length, kv_length, device)
    return mask if compiling else _contiguous(mask)


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
    **rest: object,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers' attention interface asks for it.

    query [B, Hq, L, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv]; attention_mask: of
    `make_mask`, or a tensor [B or 1, Hq or 1, L or 1, S or more], bool or added to the
    scores. s_aux [Hq]: the layer's sinks. position_bias: added to the scores, as such a tensor.
    Without a mask, rows see keys up to their own where the layer is causal and L is above 1.

    Returns out [B, L, Hq, Dv], and None for the weights. Raises as flex_attention does, and
    UnsupportedError for transformers' own paged cache. dropout: where the module trains.
    """
    _refuse(rest)
    biases = [] if position_bias is None else [_spread(position_bias, query, key)]
    mask = None
    if isinstance(attention_mask, BlockMask):
        mask = shared_mask(attention_mask)
    elif isinstance(attention_mask, Tensor):
        table = _spread(attention_mask, query, key)
        if table.dtype == torch.bool:
            mask = _mask_of(table, attention_mask.shape[1] > 1)
        else:
            biases.append(table)
    elif query.shape[2] > 1:
        causes = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causes:
            mask = _causal(query.shape[2], key.shape[2], sliding_window, query.device)
    out = flex_attention(
        query, key, value, _score_mod(softcap, biases), mask, scaling, enable_gqa=True,
        sinks=None if s_aux is None else s_aux.reshape(-1),
        dropout_p=dropout if dropout and module.training else 0.0,
    )  # fmt: skip
    assert isinstance(out, Tensor)
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
    """Whether no number can be read back now: a graph cannot hold the wait for a GPU."""
    return torch.compiler.is_dynamo_compiling() or (
        mask.is_cuda and torch.cuda.is_current_stream_capturing()
    )


def _asks(mask: Tensor | None, shape: tuple[int, int]) -> bool:
    """Whether a mask is bool, of this shape, and may be asked what it removes."""
    found = mask is not None and mask.shape == shape and mask.dtype == torch.bool
    return found and mask is not None and not _graphed(mask)


def _padding(mask: Tensor | None, offset: int, keys: int, whole: bool) -> Tensor | None:
    """The padding mask up to the last key, or None where it is known to remove none of these keys.

    offset: the position of the first of them; what stood before has left the cache. whole: whether
    rows see the keys behind the mask's end too, which it removes.
    """
    if mask is None:
        return None
    short = whole and mask.shape[-1] < offset + keys
    if not short and not _graphed(mask) and bool(mask[:, offset : offset + keys].all()):
        return None
    missing = offset + keys - mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, missing)) if missing > 0 else mask


def _refuse(rest: dict[str, Any]) -> None:
    if rest.get("cache") is not None:
        raise UnsupportedError(
            "the paged cache of generate_batch",
            "this implementation reads the contiguous caches of generate",
            "call serve_batches(model) before generate_batch",
        )


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
        # Dynamo sees through a cache, and warns of it.
        make = catalogue.softcap if torch.compiler.is_dynamo_compiling() else _capped
        return None if cap is None else make(cap)

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        for bias in biases:
            score = score + bias[b, h, q_idx, kv_idx]
        return score

    return biased
