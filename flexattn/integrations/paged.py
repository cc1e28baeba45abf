"""generate_batch of transformers: attention over the pages of its PagedAttentionCache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flexattn import catalogue
from flexattn.errors import UnsupportedError
from flexattn.records.key import rounded
from flexattn.serving import DecodePlan

# Requests that plans are first made for: a step of more has plans of its own.
_FEW = 64


@dataclass(slots=True)
class _Batch:
    """What the layers of one kind have in common in a forward: written by the first of them.

    table [requests, width] int32: pages. lens [requests] int32: keys. rows [requests] int64: where
    the new key of a request goes, where pages alone say so.
    """

    table: Tensor
    lens: Tensor
    rows: Tensor | None = None


@dataclass(slots=True)
class _State:
    """Plans, outputs and tables of one cache."""

    plans: dict[Any, tuple[DecodePlan, Tensor]] = field(default_factory=dict)
    batches: dict[int, _Batch] = field(default_factory=dict)
    sinks: dict[int, Tensor] = field(default_factory=dict)


_states: WeakKeyDictionary[Any, _State] = WeakKeyDictionary()


def attend_paged(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    **batch: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer of generate_batch, as transformers' attention interface asks for it.

    query [1, Hq, L, D], key and value [1, Hkv, L, D]: the rows of all requests, chunks of prefill
    beside single tokens. cache: a PagedAttentionCache. batch: its lengths, and where keys are read
    and written. softcap, sliding_window and s_aux [Hq] (sinks): the layer's.

    A layer of full attention reads the cache's pages where they lie. One with a sliding window has
    its ring of keys copied out by the cache itself, as chunks overwrite what they still read.
    Returns out [1, L, Hq, D], and None for the weights. Raises UnsupportedError without a paged
    cache, and as DecodePlan does.
    """
    if cache is None:
        raise UnsupportedError(
            "a forward without a paged cache",
            "this implementation is for generate_batch alone",
            'elsewhere use attn_implementation="flexattn"',
        )
    state = _states.setdefault(cache, _State())
    layer: Any = module.layer_idx
    allocator = cache.layer_to_allocator[layer]
    first = layer == allocator.layer_indices[0]
    windowed = not allocator.supports_block_table
    requests = batch["cu_seq_lens_q"].shape[0] - 1
    if windowed:
        pages, step = _window(state, cache, allocator, first, key, value, layer, batch)
    else:
        pages, step = _pages(state, cache, allocator, first, key, value, layer, batch)
    single = batch["max_length_q"] == 1
    q = query[0].transpose(0, 1)
    about = {
        "heads": (query.shape[1], key.shape[1]), "head_dim": (query.shape[3], value.shape[3]),
        "dtype": query.dtype, "page_size": pages[0].shape[1], "scale": scaling,
        "score_mod": softcap, "mask_mod": sliding_window, "sinks": s_aux is not None,
        "batch": max(_FEW, rounded(requests)), "kv_len": step.table.shape[1] * pages[0].shape[1],
    }  # fmt: skip
    plan, out = _plan(state, about, single, cache.max_batch_tokens, query.device)
    given: dict[str, Any] = {"seq_lens": step.lens, "block_table": step.table}
    if single:
        q = q.unsqueeze(1)
    else:
        given["cu_seqlens_q"] = batch["cu_seq_lens_q"]
    if s_aux is not None:
        given["sinks"] = _sinks(state, layer, s_aux, first)
    out = out[: len(q)]
    plan.run(q, pages, out=out.view(*q.shape[:-1], -1), **given)
    return out.unsqueeze(0), None


def _plan(
    state: _State,
    about: Mapping[str, Any],
    single: bool,
    rows: int,
    device: torch.device,
) -> tuple[DecodePlan, Tensor]:
    """The plan of layers like this one, and the rows that it writes; made once."""
    key = (single, *about.values())
    found = state.plans.get(key)
    if found is None:
        cap, window = about["score_mod"], about["mask_mod"]
        mods = {
            "score_mod": None if cap is None else catalogue.softcap(cap),
            "mask_mod": catalogue.causal if window is None else catalogue.sliding_window(window - 1),
        }
        lengths = {"q_len": 1} if single else {"total_q": rows}
        plan = DecodePlan(device=device, **{**about, **mods, **lengths})
        heads, width = plan.maxima.Hq, plan.maxima.head_dim_v
        # Rows of nobody are never written: what stands there goes through the model's layers.
        out = torch.zeros(plan.maxima.rows, heads, width, dtype=about["dtype"], device=device)
        found = state.plans[key] = plan, out
    return found


def _pages(
    state: _State, cache: Any, allocator: Any, first: bool, key: Tensor, value: Tensor, layer: int,
    batch: Mapping[str, Any],
) -> tuple[tuple[Tensor, Tensor], _Batch]:  # fmt: skip
    """The pages of a layer of full attention, with the new keys and values in them."""
    pages = allocator.get_cache_for_block_table(layer)
    page = pages[0].shape[1]
    if page > 256:
        raise UnsupportedError(
            f"pages of {page} tokens",
            "a page has at most 256",
            "pass ContinuousBatchingConfig(page_size=256)",
        )
    table = batch.get("block_table")
    if first:
        if table is None:
            found = _table_of(cache, allocator, page, batch)
        else:
            found = _table_given(allocator, page, table[allocator.index], batch)
        state.batches[allocator.index] = found
    step = state.batches[allocator.index]
    rows = batch["write_index"][allocator.index] if step.rows is None else step.rows
    for pool, new in zip(pages, (key, value), strict=True):
        pool.view(-1, *pool.shape[2:]).index_copy_(0, rows, new[0].transpose(0, 1))
    return pages, step


def _lens(allocator: Any, batch: Mapping[str, Any]) -> Tensor:
    ends = batch["cu_seq_lens_k"][allocator.layer_type]
    return ends[1:] - ends[:-1]


def _table_given(allocator: Any, page: int, table: Tensor, batch: Mapping[str, Any]) -> _Batch:
    """A step of single tokens whose pages transformers lists."""
    lens = _lens(allocator, batch)
    last = (lens - 1).clamp_(min=0).long()
    rows = table.gather(1, last[:, None] // page)[:, 0].long() * page + last % page
    rows = torch.where(lens > 0, rows, allocator.write_trash_index)
    return _Batch(table, lens, rows)


def _table_of(cache: Any, allocator: Any, page: int, batch: Mapping[str, Any]) -> _Batch:
    """The pages of each request, from where transformers would gather its tokens one by one."""
    tokens = batch["read_index"][allocator.index]
    begins = batch["cu_seq_lens_k"][allocator.layer_type]
    longest = batch["max_length_k"][allocator.layer_type]
    if not tokens.shape[0]:  # nothing is cached yet: the keys are those that are written
        tokens, begins = batch["write_index"][allocator.index], batch["cu_seq_lens_q"]
    width = rounded(-(-longest // page))
    steps = torch.arange(0, width * page, page, device=tokens.device)
    at = (begins[:-1, None] + steps).clamp_(max=tokens.shape[0] - 1)
    return _Batch((tokens[at] // page).to(torch.int32), _lens(allocator, batch))


def _window(
    state: _State, cache: Any, allocator: Any, first: bool, key: Tensor, value: Tensor, layer: int,
    batch: Mapping[str, Any],
) -> tuple[tuple[Tensor, Tensor], _Batch]:  # fmt: skip
    """The keys that a layer with a window may see, of all requests in a row, as pages of one."""
    if first:
        begins = batch["cu_seq_lens_k"][allocator.layer_type]
        width = rounded(batch["max_length_k"][allocator.layer_type])
        steps = torch.arange(width, dtype=torch.int32, device=begins.device)
        state.batches[allocator.index] = _Batch(begins[:-1, None] + steps, _lens(allocator, batch))
    read = cache.update(key, value, layer, dict(batch))
    pages = tuple(x[0].transpose(0, 1).unsqueeze(1) for x in read)
    return pages, state.batches[allocator.index]  # type: ignore[return-value]


def _sinks(state: _State, layer: int, sinks: Tensor, first: bool) -> Tensor:
    """A layer's sinks in float32."""
    return sinks.reshape(-1).float()


def accept(name: str) -> None:
    """Let transformers take a name with "flash" in it for an implementation that is there.

    Continuous batching serves sdpa, eager and names with "flash" in them, whose package it then
    imports; where the name has a 2 or 3 behind it, steps of single tokens come with page tables.
    """
    from transformers import modeling_flash_attention_utils as utils

    imports = utils._lazy_imports
    if name in getattr(imports, "flexattn", ()):
        return

    def lazy_imports(implementation: str | None, *rest: Any, **more: Any) -> Any:
        if implementation == name:
            return (partial(_never, name),) * 5
        return imports(implementation, *rest, **more)

    lazy_imports.flexattn = {name, *getattr(imports, "flexattn", ())}  # type: ignore[attr-defined]
    utils._lazy_imports = lazy_imports


def _never(name: str, *given: object, **more: object) -> object:
    raise UnsupportedError(f"{name} called as a flash function", "its attention function is called")


def serve_batches(model: Any, name: str) -> None:
    """Let a model attend by `name` in generate_batch, also one that lists the flash it takes."""
    for each in model.modules():
        listed = getattr(each, "_compatible_flash_implementations", None)
        if listed is not None and name not in listed:
            each._compatible_flash_implementations = [*listed, name]
    model.set_attn_implementation(name)
