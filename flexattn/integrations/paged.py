"""generate_batch of transformers: attention over the pages of its PagedAttentionCache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flexattn.errors import UnsupportedError
from flexattn.integrations.plans import Layer, Plans
from flexattn.problem import rounded
from flexattn.serving import DecodePlan

# Requests, and keys of one, that plans are first made for: a step of more has plans of its own.
_REQUESTS, _KEYS = 64, 8192
# Tokens of a page.
_LARGEST = 256


@dataclass(frozen=True, slots=True)
class _Place:
    """One layer in a forward. batch: what generate_batch says of its requests."""

    index: int
    cache: Any
    allocator: Any
    batch: Mapping[str, Any]

    @property
    def first(self) -> bool:
        """True of the first layer of its kind in this forward."""
        return bool(self.index == self.allocator.layer_indices[0])

    @property
    def begins(self) -> Tensor:
        """The offsets of each request's keys among those of all, and their end."""
        found: Tensor = self.batch["cu_seq_lens_k"][self.allocator.layer_type]
        return found

    @property
    def lens(self) -> Tensor:
        """Keys of each request."""
        return self.begins[1:] - self.begins[:-1]

    @property
    def longest(self) -> int:
        """Keys of the longest one."""
        return int(self.batch["max_length_k"][self.allocator.layer_type])


@dataclass(slots=True)
class _Batch:
    """The batch of a forward for the layers of one kind; the first of them writes it.

    table [requests, width] int32: pages. lens [requests] int32: keys. rows [requests] int64: where
    the new key of a request goes, where pages alone say so.
    """

    table: Tensor
    lens: Tensor
    rows: Tensor | None = None


@dataclass(slots=True)
class _State:
    """Plans, outputs and tables of one cache."""

    plans: Plans = field(default_factory=Plans)
    outs: dict[DecodePlan, Tensor] = field(default_factory=dict)
    batches: dict[int, _Batch] = field(default_factory=dict)


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
    index: Any = module.layer_idx
    layer = _Place(index, cache, cache.layer_to_allocator[index], batch)
    read = _pages if layer.allocator.supports_block_table else _window
    pages, step, slots = read(layer, state.batches, key, value)
    q = query[0].transpose(0, 1)
    page, requests = pages[0].shape[1], len(step.lens)
    single = batch["max_length_q"] == 1 and len(q) == requests
    kind = Layer(
        (query.shape[1], key.shape[1]), (query.shape[3], value.shape[3]), query.dtype,
        query.device, page, scale=scaling, softcap=softcap, window=sliding_window,
        sinks=s_aux is not None,
    )  # fmt: skip
    plan = state.plans.plan(
        kind.of_tokens if single else kind,
        batch=max(_REQUESTS, rounded(requests)),
        kv_len=max(_KEYS, rounded(step.table.shape[1] * page)),
        total_q=0 if single else cache.max_batch_tokens,
    )
    if slots is not None:
        new = key[0].transpose(0, 1), value[0].transpose(0, 1)
        state.plans.append(kind, slots.dtype).run(*new, pages, slot_mapping=slots)
    out = _outputs(state, plan)
    given: dict[str, Any] = {"seq_lens": step.lens, "block_table": step.table}
    if single:
        q = q.unsqueeze(1)
    else:
        given["cu_seqlens_q"] = batch["cu_seq_lens_q"]
    if s_aux is not None:
        given["sinks"] = s_aux.reshape(-1).float()
    out = out[: len(q)]
    plan.run(q, pages, out=out.view(*q.shape[:-1], -1), **given)
    return out.unsqueeze(0), None


def _outputs(state: _State, plan: DecodePlan) -> Tensor:
    """The rows that a plan writes."""
    found = state.outs.get(plan)
    if found is None:
        m = plan.problem
        # Rows of nobody are never written: what stands there goes through the model's layers.
        found = torch.zeros(m.rows, m.Hq, m.head_dim_v, dtype=m.out_dtype, device=plan.device)
        state.outs[plan] = found
    return found


# Pages, the batch that reads them, and where new keys go, where they are not written yet.
_Read: TypeAlias = tuple[tuple[Tensor, Tensor], _Batch, Tensor | None]


def _pages(layer: _Place, batches: dict[int, _Batch], key: Tensor, value: Tensor) -> _Read:
    """The pages of a layer of full attention."""
    allocator = layer.allocator
    pages = allocator.get_cache_for_block_table(layer.index)
    page = pages[0].shape[1]
    if page > _LARGEST:
        raise UnsupportedError(
            f"pages of {page} tokens",
            f"a page has at most {_LARGEST}",
            f"pass ContinuousBatchingConfig(page_size={_LARGEST})",
        )
    if layer.first:
        listed = layer.batch.get("block_table") is not None
        batches[allocator.index] = (_listed if listed else _gathered)(layer, page)
    step = batches[allocator.index]
    rows = layer.batch["write_index"][allocator.index] if step.rows is None else step.rows
    return pages, step, rows


def _listed(layer: _Place, page: int) -> _Batch:
    """A step of single tokens whose pages transformers lists."""
    table, lens = layer.batch["block_table"][layer.allocator.index], layer.lens
    last = (lens - 1).clamp_(min=0).long()
    rows = table.gather(1, last[:, None] // page)[:, 0].long() * page + last % page
    return _Batch(table, lens, torch.where(lens > 0, rows, layer.allocator.write_trash_index))


def _gathered(layer: _Place, page: int) -> _Batch:
    """Pages of each request, from where transformers would gather its tokens one by one."""
    tokens, begins = layer.batch["read_index"][layer.allocator.index], layer.begins
    if not tokens.shape[0]:  # nothing is cached yet: the keys are those that are written
        tokens = layer.batch["write_index"][layer.allocator.index]
        begins = layer.batch["cu_seq_lens_q"]
    steps = torch.arange(rounded(-(-layer.longest // page)), device=tokens.device) * page
    at = (begins[:-1, None] + steps).clamp_(max=tokens.shape[0] - 1)
    return _Batch((tokens[at] // page).to(torch.int32), layer.lens)


def _window(layer: _Place, batches: dict[int, _Batch], key: Tensor, value: Tensor) -> _Read:
    """The keys that a layer with a window may see, of all requests in a row, as pages of one."""
    if layer.first:
        steps = torch.arange(rounded(layer.longest), dtype=torch.int32, device=key.device)
        batches[layer.allocator.index] = _Batch(layer.begins[:-1, None] + steps, layer.lens)
    k, v = layer.cache.update(key, value, layer.index, dict(layer.batch))
    step = batches[layer.allocator.index]
    return (k[0].transpose(0, 1).unsqueeze(1), v[0].transpose(0, 1).unsqueeze(1)), step, None


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
    raise UnsupportedError(
        f"{name} called as a flash function", "its attention function is called"
    )
