"""SGLang's attention over this library: page tables of its token pool, and the layers' attention.

The contract was read in SGLang 0.5.23: sglang/srt/layers/attention/base_attn_backend.py, and
radix_attention.py beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_exec, get_schedule, max_prefill_buffer_tokens
from torch import Tensor

from flexattn.errors import UnsupportedError
from flexattn.integrations.plans import Layer, LayerPlans, Plans
from flexattn.problem import rounded


class FlexattnBackend(AttentionBackend):
    """--attention-backend flexattn: decoders without MLA and without speculation.

    A batch's lengths and pages stand in buffers that are made with the backend, so that eager
    forwards and CUDA graphs read the same ones. New keys and values are written by SGLang's pool.
    """

    # Lengths are read on the device.
    needs_cpu_seq_lens: bool = False
    extend_dummy_seqs_capped_by_req_pool: bool = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.kv_index_translator = model_runner.kv_index_translator
        _refuse({
            "MLA": model_runner.use_mla_backend,
            "--enable-unified-memory": self.kv_index_translator.is_translating,
        })  # fmt: skip
        self.device = torch.device(model_runner.device)
        self.page_size = model_runner.page_size
        tokens = self.req_to_token_pool.req_to_token
        self._first_of_page, self._kv_len = tokens[:, :: self.page_size], tokens.shape[1]
        self._windows = isinstance(self.token_to_kv_pool, SWAKVPool)
        schedule = get_schedule()
        chunk = max_prefill_buffer_tokens() or max(schedule.max_prefill_tokens or 0, self._kv_len)
        self._rows = chunk + self.req_to_token_pool.size  # requests that decode beside the chunk
        self._invariant = True if get_exec().deterministic.enable_deterministic_inference else None
        self._plans = Plans()
        self._ready: dict[int, LayerPlans] = {}
        self._paged: dict[int, tuple[Any, tuple[Tensor, Tensor]]] = {}
        self._allocate(self.req_to_token_pool.size, self._rows)

    def _allocate(self, requests: int, tokens: int) -> None:
        numbers: Any = {"dtype": torch.int32, "device": self.device}
        self._requests = requests
        self._lens = torch.zeros(requests, **numbers)
        self._ends = torch.zeros(requests + 1, **numbers)
        self._table = torch.zeros(requests, self._first_of_page.shape[1], **numbers)
        # Of the pool that layers with windows have, in its own numbers.
        self._window_table = torch.zeros_like(self._table) if self._windows else None
        self._window_slots = torch.zeros(
            tokens * self._windows, dtype=torch.int64, device=self.device
        )
        # Of a chunk that is longer than any is planned to be, which no graph holds.
        self._more_slots: Tensor | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers for the largest batch that is captured; those that there are where they do."""
        if max_bs > self._requests or max_num_tokens > self._rows:
            self._rows = max(self._rows, max_num_tokens)
            self._allocate(max(max_bs, self._requests), self._rows)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Keys of a request that pads a captured batch: it reads SGLang's reserved row 0."""
        return 1

    def init_forward_metadata_out_graph(
        self, forward_batch: Any, in_capture: bool = False
    ) -> None:
        """Lengths and pages of the batch, written into the buffers; before a graph's capture and
        each of its replays, and in eager forwards through `init_forward_metadata`."""
        mode = forward_batch.forward_mode
        _refuse({
            "speculative decoding": forward_batch.spec_info is not None
            or mode.is_target_verify() or mode.is_draft_extend_v2(),
            "an encoder": forward_batch.encoder_lens is not None,
        })  # fmt: skip
        n = forward_batch.batch_size
        self._lens[:n].copy_(forward_batch.seq_lens[:n])
        if not mode.is_decode_or_idle():
            lens = forward_batch.extend_seq_lens[:n]
            torch.cumsum(lens, 0, dtype=torch.int32, out=self._ends[1 : n + 1])
        table, rows = self._table[:n], forward_batch.req_pool_indices[:n]
        torch.index_select(self._first_of_page, 0, rows, out=table)
        if self._window_table is not None:
            moved = self.token_to_kv_pool.translate_loc_from_full_to_swa(table)
            self._window_table[:n].copy_(moved // self.page_size)
            slots = self.kv_index_translator.write_ids(forward_batch, IdSpaceKind.SLIDING_WINDOW)
            self._more_slots = None
            if slots is None:  # slot 0 is nobody's
                self._window_slots.zero_()
            elif len(slots) > len(self._window_slots):
                self._more_slots = slots
            else:
                self._window_slots[: len(slots)].copy_(slots)
        table.floor_divide_(self.page_size)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> Tensor:
        """Attention of one layer: q [rows, Hq D]; returns [rows, Hq Dv].

        The rows are a token of each request where the batch decodes, else chunks of requests.
        """
        sinks = extra.pop("sinks", None)
        named = {name: value is not None and value is not False for name, value in extra.items()}
        _refuse(named | {
            "attention that is not causal": layer.is_cross_attention
            or layer.attn_type != AttentionType.DECODER,
            "chunked local attention": layer.use_irope,
            "a temperature by length": layer.xai_temperature_len > 0,
        })  # fmt: skip
        if save_kv_cache and k is not None:
            # A layer of a pool with windows has its own slots.
            slots = None
            if self._windows:
                slots = self._window_slots if self._more_slots is None else self._more_slots
                slots = slots[: len(k)]
            where = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=slots)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        pages = self._pages(layer.layer_id)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        n = forward_batch.batch_size
        table = self._table
        if (
            self._window_table is not None
            and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]
        ):
            table = self._window_table
        given: dict[str, Any] = {"seq_lens": self._lens[:n], "block_table": table[:n]}
        if sinks is not None:
            given["sinks"] = sinks.float()
        if layer.k_scale is not None and pages[0].dtype.itemsize == 1:
            given |= {"k_scale": layer.k_scale.float(), "v_scale": layer.v_scale.float()}
        out = q.new_empty(*q.shape[:-1], layer.v_head_dim)
        single, chunks, _ = self._plan(layer, q, pages, given)
        if forward_batch.forward_mode.is_decode():
            single.run(q.unsqueeze(1), pages, out=out.unsqueeze(1), **given)
        else:
            chunks.run(q, pages, out=out, cu_seqlens_q=self._ends[: n + 1], **given)
        return out.view(len(q), -1)

    forward_decode = forward_extend

    def _plan(
        self, layer: Any, q: Tensor, pages: tuple[Tensor, Tensor], given: dict[str, Any]
    ) -> LayerPlans:
        """The layer's plans, for single tokens and for chunks; both are made in its first forward,
        which SGLang runs before it captures or serves."""
        found = self._ready.get(layer.layer_id)
        if found is None or len(q) > found[1].problem.total_q:
            rows = self._rows if len(q) <= self._rows else rounded(len(q))
            kind = Layer(
                (layer.tp_q_head_num, layer.tp_k_head_num), (layer.qk_head_dim, layer.v_head_dim),
                q.dtype, self.device, self.page_size, pages[0].dtype, layer.scaling,
                layer.logit_cap or None,
                layer.sliding_window_size + 1 if layer.sliding_window_size >= 0 else None,
                sinks="sinks" in given, scaled="k_scale" in given, name=f"layers.{layer.layer_id}",
            )  # fmt: skip
            found = self._ready[layer.layer_id] = self._plans.of(
                kind, rows, batch=self._requests, kv_len=self._kv_len,
                batch_invariant=self._invariant,
            )  # fmt: skip
        return found

    def _pages(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer as [pages, page, Hkv, D]; the pool has a row a token, or HND pages.

        These views are made once a buffer: plans know them again.
        """
        k, v = self.token_to_kv_pool.get_kv_buffer(layer_id)
        same = k.data_ptr(), v.data_ptr(), k.shape, k.stride()
        found = self._paged.get(layer_id)
        if found is None or found[0] != same:
            one, two = (
                each.unflatten(0, (-1, self.page_size))
                if each.dim() == 3
                else each.transpose(1, 2)
                for each in (k, v)
            )
            found = self._paged[layer_id] = same, (one, two)
        return found[1]


def _refuse(found: dict[str, bool]) -> None:
    """Raise UnsupportedError for the first that is there."""
    for name, there in found.items():
        if there:
            raise UnsupportedError(
                f"{name} with SGLang's attention backend flexattn",
                "it serves decoders with a cache of keys and values, one token or chunk at a time",
                "take another --attention-backend",
            )
