"""SGLang's attention over this library: page tables of its token pool, and the layers' attention.

The contract was read in SGLang 0.5.17 to 0.5.23: sglang/srt/layers/attention/base_attn_backend.py,
and radix_attention.py beside it.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import UnsupportedError
from flexattn.integrations.plans import DraftTrees, Layer, LayerPlans, Plans, user_mods
from flexattn.problem import rounded
from flexattn.serving import DecodePlan

try:
    from sglang.srt import runtime_context
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
except ImportError as error:
    raise UnsupportedError(
        f"SGLang lacks what flexattn's backend is made of: {error}",
        "SGLang 0.5.17 to 0.5.23 were read",
        "install one of them, or take another --attention-backend",
    ) from error


class FlexattnBackend(AttentionBackend):
    """--attention-backend flexattn: decoders without MLA, and drafts that they verify.

    A batch's lengths and pages stand in buffers that are made with the backend, so that eager
    forwards and CUDA graphs read the same ones.
    """

    # Lengths are read on the device.
    needs_cpu_seq_lens: bool = False
    extend_dummy_seqs_capped_by_req_pool: bool = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = pool = model_runner.token_to_kv_pool
        # From 0.5.19 on.
        self.kv_index_translator: Any = getattr(model_runner, "kv_index_translator", None)
        parts = (pool, getattr(pool, "full_kv_pool", pool))
        _refuse({
            "MLA": model_runner.use_mla_backend,
            "a draft model, for which --speculative-draft-attention-backend names another,":
            model_runner.is_draft_worker,
            "--enable-unified-memory": getattr(self.kv_index_translator, "is_translating", False),
            "a cache of 4 bits or of scaled blocks": any(
                getattr(each, "is_quantized_kv_cache", False) for each in parts
            ),
        })  # fmt: skip
        self.device = torch.device(model_runner.device)
        self.page_size = model_runner.page_size
        tokens = self.req_to_token_pool.req_to_token
        self._first_of_page, self._kv_len = tokens[:, :: self.page_size], tokens.shape[1]
        self._windows = isinstance(pool, SWAKVPool)
        schedule = runtime_context.get_schedule()
        # From 0.5.18 on.
        most = getattr(runtime_context, "max_prefill_buffer_tokens", None)
        chunk = most() if most else max(schedule.chunked_prefill_size or 0, 0)
        chunk = chunk or max(schedule.max_prefill_tokens or 0, self._kv_len)
        self._rows = chunk + self.req_to_token_pool.size  # requests that decode beside the chunk
        exact = runtime_context.get_exec().deterministic.enable_deterministic_inference
        self._invariant = True if exact else None
        self._drafted = runtime_context.get_spec().speculative_num_draft_tokens or 0
        self._plans = Plans()
        self._ready: dict[int, LayerPlans] = {}
        self._verify: dict[int, DecodePlan] = {}
        self._paged: dict[int, tuple[Any, tuple[Tensor, Tensor]]] = {}
        self._allocate(self.req_to_token_pool.size, self._rows)

    def _allocate(self, requests: int, tokens: int) -> None:
        numbers: Any = {"dtype": torch.int32, "device": self.device}
        self._requests = requests
        self._ready.clear()
        self._verify.clear()
        self._trees = DraftTrees.empty(requests, self._drafted, self.device)
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
        mode, spec = forward_batch.forward_mode, forward_batch.spec_info
        verify = mode.is_target_verify()
        _refuse({
            "drafts of another number of tokens than --speculative-num-draft-tokens": verify
            and getattr(spec, "draft_token_num", self._drafted) != self._drafted,
            "an encoder": forward_batch.encoder_lens is not None,
        })  # fmt: skip
        n = forward_batch.batch_size
        self._lens[:n].copy_(forward_batch.seq_lens[:n])
        if verify:
            self._trees.fill(forward_batch.seq_lens[:n], getattr(spec, "custom_mask", None))
            self._lens[:n] += self._drafted
        elif not mode.is_decode_or_idle():
            lens = forward_batch.extend_seq_lens[:n]
            torch.cumsum(lens, 0, dtype=torch.int32, out=self._ends[1 : n + 1])
        table, rows = self._table[:n], forward_batch.req_pool_indices[:n]
        torch.index_select(self._first_of_page, 0, rows, out=table)
        if self._window_table is not None:
            moved = self.token_to_kv_pool.translate_loc_from_full_to_swa(table)
            self._window_table[:n].copy_(moved // self.page_size)
            slots = self._slots_of_windows(forward_batch)
            self._more_slots = None
            if slots is None:  # slot 0 is nobody's
                self._window_slots.zero_()
            elif len(slots) > len(self._window_slots):
                self._more_slots = slots
            else:
                self._window_slots[: len(slots)].copy_(slots)
        table.floor_divide_(self.page_size)

    def _slots_of_windows(self, forward_batch: Any) -> Tensor | None:
        """Slots of new tokens in the pool that layers with windows have, as each release says."""
        translator, slots = self.kv_index_translator, forward_batch.out_cache_loc
        if hasattr(translator, "write_ids"):  # from 0.5.22 on
            kinds = import_module("sglang.srt.mem_cache.kv_loc_plan").IdSpaceKind
            found: Tensor | None = translator.write_ids(forward_batch, kinds.SLIDING_WINDOW)
            return found
        if slots is None:
            return None
        moved: Tensor = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
        return moved

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
        pages = self._pages(layer.layer_id)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        scales: dict[str, Any] = {}
        if layer.k_scale is not None and pages[0].dtype.itemsize == 1:
            scales = {"k_scale": layer.k_scale.float(), "v_scale": layer.v_scale.float()}
        plans = self._plan(layer, q, pages, sinks is not None, bool(scales))
        n, table, slots = forward_batch.batch_size, self._table, forward_batch.out_cache_loc
        window = self._window_table
        if window is not None and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]:
            # A layer of a pool with windows has its own slots.
            table = window
            slots = self._window_slots if self._more_slots is None else self._more_slots
        if save_kv_cache and k is not None and v is not None:
            k = k.reshape(len(q), -1, layer.qk_head_dim)
            v = v.reshape(len(q), -1, layer.v_head_dim)
            plans.append.run(k, v, pages, slot_mapping=slots[: len(q)], **scales)
        given = {"seq_lens": self._lens[:n], "block_table": table[:n], **scales}
        if sinks is not None:
            given["sinks"] = sinks.float()
        out = q.new_empty(*q.shape[:-1], layer.v_head_dim)
        mode = forward_batch.forward_mode
        if mode.is_decode():
            plans.single.run(q.unsqueeze(1), pages, out=out.unsqueeze(1), **given)
        elif mode.is_target_verify():
            plan = self._verify[layer.layer_id]
            plan.run(q.unflatten(0, (n, -1)), pages, out=out.unflatten(0, (n, -1)), **given)
        else:
            plans.chunks.run(q, pages, out=out, cu_seqlens_q=self._ends[: n + 1], **given)
        return out.view(len(q), -1)

    forward_decode = forward_extend

    def _plan(
        self, layer: Any, q: Tensor, pages: tuple[Tensor, Tensor], sinks: bool, scaled: bool
    ) -> LayerPlans:
        """The layer's plans, made in its first forward, which SGLang runs before it captures."""
        found = self._ready.get(layer.layer_id)
        if found is None or len(q) > found.chunks.problem.total_q:
            rows = self._rows if len(q) <= self._rows else rounded(len(q))
            kind = Layer(
                (layer.tp_q_head_num, layer.tp_k_head_num), (layer.qk_head_dim, layer.v_head_dim),
                q.dtype, self.device, self.page_size, pages[0].dtype, layer.scaling,
                layer.logit_cap or None,
                layer.sliding_window_size + 1 if layer.sliding_window_size >= 0 else None,
                sinks=sinks, scaled=scaled, name=f"layers.{layer.layer_id}",
            )  # fmt: skip
            maxima = {
                "batch": self._requests, "kv_len": self._kv_len,
                "batch_invariant": self._invariant,
            }  # fmt: skip
            found = self._ready[layer.layer_id] = self._plans.of(kind, rows, **maxima)
            if self._drafted:
                kind = replace(kind, spans=self._trees)
                self._verify[layer.layer_id] = self._plans.plan(
                    kind, user_mods(kind), q_len=self._drafted, **maxima
                )
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
                "it serves decoders with a cache of keys and values, and drafts to verify",
                "take another --attention-backend",
            )
