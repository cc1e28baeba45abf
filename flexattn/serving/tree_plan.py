"""TreePlan: what requests share at any level of a prefix tree is read once, where that pays."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from flexattn.device import usable
from flexattn.errors import ConfigError, InputError, InputTypeError
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.kernels.paged_decode.merges import merge_rows, render_merge_tree
from flexattn.runtime.build import Launcher, builder
from flexattn.serving.cache import KVCache
from flexattn.serving.checks import whole
from flexattn.serving.launching import Beside, launch_here
from flexattn.serving.plan import DecodePlan
from flexattn.serving.tree import (
    Places,
    PrefixTree,
    ReadCost,
    TreeReads,
    TreeTables,
    choose_reads,
    from_first,
    placed_mask,
    placed_score,
)
from flexattn.settings import current
from flexattn.util.ambient import without_modes

# What a run passes to its last launch, by the names that the kernel has for it.
_GIVEN = ("SHARED", "LSE_SHARED", "OWN", "LSE_OWN", "OUT", "LSE", "SLOTS")
# Estimates: of three launches more, 10 us at 3.2 TB/s; and of a tile's keys that a second tile of
# rows reads at about the same time, the half.
_LAUNCHES = 32_000_000
_AGAIN = 0.5


class TreePlan:
    """Decoding of requests whose first keys are paths of one prefix tree, or of several.

    batch, q_len, kv_len, page_size: as DecodePlan's, and so are the other arguments; the cache has
    pages. levels: the most shared reads of one request, each a state that is merged. cost: what
    reading costs; where None an estimate from the shapes. shared_config: ServingConfig of the
    launch over shared keys, config: of that over each request's own.

    `update(tree, block_table)` chooses what is read once and writes that to the device; `run`
    launches: the shared reads of all levels in one launch, beside it each request's own keys, and
    a merge of a query's states in the order of their keys, in float32. The choice is `reads`, and
    `explain()` says it. A tree is what requests share, not how long they are: while a tree stands,
    requests grow without an update, and a captured graph serves every tree that `update` writes
    between its replays.

    A mask_mod is evaluated over shared keys, which no window skips; of a request's own keys those
    outside its bounds are not read. A row's bits depend on the tree: batch_invariant is refused.
    Raises InputError, ConfigError, ModError and BuildError.
    Method: Ye et al., Cascade Inference, flashinfer.ai 2024, over a radix tree (Zheng et al.,
    SGLang, arXiv 2312.07104).
    """

    @without_modes()
    def __init__(
        self,
        *,
        batch: int,
        kv_len: int,
        page_size: int,
        q_len: int = 1,
        levels: int = 4,
        sinks: bool = False,
        score_mod: Any = None,
        mask_mod: Any = None,
        cost: ReadCost | None = None,
        shared_config: ServingConfig | None = None,
        config: ServingConfig | None = None,
        device: torch.device | str = "cuda",
        lengths: str = "",
        **common: Any,
    ) -> None:
        for name in ("lse", "total_q", "prefix", "offset"):
            if name in common:
                raise InputError(f"TreePlan({name}=...)", "it follows from the other arguments")
        if common.get("batch_invariant") is None:
            common["batch_invariant"] = current().batch_invariant
        if common["batch_invariant"]:
            raise ConfigError(
                "TreePlan with batch_invariant",
                "what a row's keys are split into depends on who shares them",
                "use a DecodePlan, which reads shared keys for each request",
            )
        device, levels = usable(device), whole("levels", levels)
        batch, q_len = whole("batch", batch), whole("q_len", q_len)
        if not 1 <= batch <= 2**12 or q_len < 1:
            raise InputError(
                f"TreePlan(batch={batch}, q_len={q_len})",
                "batch is between 1 and 4096, and q_len at least 1",
            )
        if whole("page_size", page_size) < 1 or levels < 1:
            raise InputError(
                f"TreePlan(page_size={page_size}, levels={levels})",
                "the cache has pages, and a tree at least one level",
            )
        self._tables = tables = TreeTables(batch, q_len, levels)
        common |= {"kv_len": kv_len, "page_size": page_size, "device": device, "lse": True}
        row = torch.tensor(tables.filled(TreeReads((), (), 0.0, 0.0)), dtype=torch.int32)
        # Written by updates and runs, which need not be in the inference mode that this may be in.
        with torch.inference_mode(False):
            self._row = row.to(device, copy=True)
            self._lens = torch.zeros(tables.batch, dtype=torch.int32, device=device)
        self._view = view = tables.views(self._row)
        # Only mods ask where a shared row stands.
        self._places = score_mod is not None or mask_mod is not None
        self.own = DecodePlan(
            batch=batch, q_len=q_len, sinks=sinks, score_mod=score_mod, config=config,
            mask_mod=from_first(view["starts"], mask_mod), lengths=lengths, **common,
        )  # fmt: skip
        places = Places(view["gather"], view["before"], self._lens, tables.q_len)
        self.shared = DecodePlan(
            batch=tables.reads, total_q=tables.rows, config=shared_config,
            score_mod=score_mod and placed_score(places, score_mod),
            mask_mod=from_first(view["begins"], mask_mod and placed_mask(places, mask_mod)),
            **common,
        )  # fmt: skip
        self.shared.places_rows = False
        m, where = self.shared.problem, self.own.device
        self.cost = cost or self._estimate()
        self.reads = TreeReads((), (), 0.0, 0.0)
        queries, pages = (tables.rows, m.Hq, m.head_dim_qk), -(-m.kv_len // m.page)
        with torch.inference_mode(False):
            self._rows = torch.empty(queries, dtype=m.dtype, device=where)
            self._table = torch.zeros((tables.reads, pages), dtype=torch.int32, device=where)
        assert self.own._lse is not None
        self._out, self._lse = torch.empty_like(self.own._out), torch.empty_like(self.own._lse)
        kernels = self.own._kernels
        dtype = self.own.form.out_dtype
        source = render_merge_tree(dtype, m.Hq, m.head_dim_v, levels, kernels.target)
        self._merge = builder().kernel(source, kernels.target, kernels.gpu)
        self._mergers: dict[int, Launcher] = {}
        self._beside = Beside(where) if where.type == "cuda" else None
        # Loaded here, so that no run or capture has to.
        self._gather(self._rows.new_zeros((tables.batch * tables.q_len, m.Hq, m.head_dim_qk)))
        # Places of a batch that was captured: a tree of more would gather queries past its end.
        self._captured = tables.batch

    def update(self, tree: PrefixTree, block_table: Tensor) -> TreeReads:
        """Choose what is read once of a tree, and write it to the device, on the current stream.

        tree: its requests are the first ones of later runs. block_table int32 [B, pages of a
        request]: all pages of each request, of which those of shared keys are kept: call it again
        where these move, where the tree changes, and before a request writes a shared page.
        Returns the choice. Raises InputError for a tree beyond the plan's maxima, or beyond the
        batch of a run that was captured.
        """
        if not isinstance(tree, PrefixTree) or not isinstance(block_table, Tensor):
            raise InputTypeError(
                f"tree is a {type(tree).__name__}, block_table a {type(block_table).__name__}",
                "they are a PrefixTree and a torch.Tensor",
            )
        m, tables = self.own.problem, self._tables
        most, ends = min(tables.batch, self._captured), tree.ends()
        if len(tree.requests) > most:
            raise InputError(
                f"a tree of {len(tree.requests)} requests",
                f"the plan, or the batch of its captured run, has {most}",
                "make a larger plan",
            )
        if max(ends, default=0) > m.kv_len:
            raise InputError(
                f"a path of {max(ends)} keys", f"a request has at most the plan's {m.kv_len}"
            )
        shape = list(block_table.shape)
        if block_table.dim() != 2 or shape[0] < len(tree.requests):
            raise InputError(
                f"block_table {shape} for {len(tree.requests)} requests", "it has a row for each"
            )
        width = min(self._table.shape[1], shape[1])
        if max(ends, default=0) > width * m.page:
            raise InputError(
                f"a path of {max(ends)} keys", f"block_table lists {width} pages of {m.page}"
            )
        found = choose_reads(tree, self.cost, tables.levels)
        firsts = torch.tensor(
            [each.requests[0] for each in found.shared], dtype=torch.int64, device="cpu"
        )
        pages = block_table[firsts.to(block_table.device), :width]
        if self._beside is not None:
            self._beside.follow()  # a run on another stream may still read the tree before
        self._table[: len(firsts), :width].copy_(pages)
        self._row.copy_(torch.tensor(tables.filled(found), dtype=torch.int32, device="cpu"))
        self.reads = found
        return found

    def explain(self) -> str:
        """The keys that are read once, for whom, and the estimate by which they were chosen."""
        return str(self.reads)

    @property
    def memory(self) -> int:
        """Bytes that the plan holds on its device."""
        held = (self._row, self._lens, self._rows, self._table, self._out, self._lse)
        return self.own.memory + self.shared.memory + sum(each.nbytes for each in held)

    def run(
        self,
        q: Tensor,
        kv_cache: KVCache,
        *,
        seq_lens: Tensor,
        block_table: Tensor,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Launch on the current stream; arguments are those of DecodePlan.run.

        q [B, q_len, Hq, D], seq_lens int32 [B], at least the keys of each request's path and q_len
        of its own, block_table int32 [B, pages of a request]. B is at least the tree's requests.
        Returns (out, lse) in memory that the next run overwrites. Raises InputError for tensors
        that do not fit the plan.
        """
        own_call: dict[str, Any] = {
            "seq_lens": seq_lens, "block_table": block_table, "sinks": sinks,
            "k_scale": k_scale, "v_scale": v_scale,
        }  # fmt: skip
        capturing = self._beside is not None and torch.cuda.is_current_stream_capturing()
        if not self.reads.shared and not capturing:
            if self._beside is not None:
                self._beside.follow()
            return _pair(self.own.run(q, kv_cache, **own_call))
        rows = self._check(q, seq_lens, capturing)
        if capturing:
            self._captured = min(self._captured, q.shape[0])
        if self._beside is not None:
            self._beside.begin()
        view = self._view
        self._gather(q.flatten(0, 1))
        if self._places:
            self._lens[: len(seq_lens)].copy_(seq_lens)
        shared = _pair(self.shared.run(
            self._rows, kv_cache, seq_lens=view["ends"], block_table=self._table,
            cu_seqlens_q=view["row_ends"], k_scale=k_scale, v_scale=v_scale,
        ))  # fmt: skip
        with self._beside or nullcontext():
            own = _pair(self.own.run(q, kv_cache, **own_call))
        out = self._out[:rows].view(own[0].shape)
        lse = self._lse[:rows].view(own[1].shape)
        launcher = self._mergers.get(rows)
        if launcher is None:
            launcher = self._mergers[rows] = self._merger(rows)
        launch_here(launcher, self._merge.index, (*shared, *own, out, lse, view["slots"]))
        return out, lse

    @torch.no_grad()
    def _gather(self, q: Tensor) -> None:
        """The shared launch's rows of the queries [requests x positions, Hq, D]."""
        torch.index_select(q, 0, self._view["gather"], out=self._rows)

    def _check(self, q: Tensor, seq_lens: Tensor, capturing: bool) -> int:
        """Rows of a run's queries; raises InputError where the gather would read past them."""
        m, requests = self.own.problem, len(self.reads.starts)
        batch = q.shape[0]
        fits = q.shape[1:] == (m.q_len, m.Hq, m.head_dim_qk) and q.dtype == m.dtype
        if not fits or not requests <= batch <= m.B or q.device != self.own.device:
            raise InputError(
                f"query {list(q.shape)} {q.dtype} on {q.device}",
                f"it is [{requests} to {m.B}, {m.q_len}, {m.Hq}, {m.head_dim_qk}] {m.dtype} "
                f"on {self.own.device}, a row for each request of the tree",
            )
        if seq_lens.shape != (batch,):
            raise InputError(f"seq_lens {list(seq_lens.shape)}", f"it is [{batch}], as q's")
        if current().check and not capturing:
            for b, (length, start) in enumerate(
                zip(seq_lens.tolist(), self.reads.starts, strict=False)
            ):
                if length < start + m.q_len:
                    raise InputError(
                        f"seq_lens[{b}] is {length}",
                        f"request {b} shares {start} keys, and has those of its {m.q_len} queries",
                        "update the tree where a request has ended",
                    )
        return batch * m.q_len

    def _merger(self, rows: int) -> Launcher:
        """A launcher that holds what shapes decide."""
        m = self.own.problem
        programs = -(-rows * m.Hq // merge_rows(m.head_dim_v))
        return self._merge.prepare(programs, {"num_rows": rows * m.Hq}, _GIVEN)

    def _estimate(self) -> ReadCost:
        m, config = self.own.problem, self.shared.config
        values = 0 if self.own.form.shared_kv else m.head_dim_v
        query, output = m.head_dim_qk * m.dtype.itemsize, m.head_dim_v * m.out_dtype.itemsize + 4
        return ReadCost(
            key=m.Hkv * (m.head_dim_qk + values) * m.kv_dtype.itemsize,
            state=2 * m.q_len * m.Hq * (query + output),
            rows=max(1, config.BLOCK_M // (m.Hq // m.Hkv * m.q_len)),
            again=_AGAIN,
            fixed=_LAUNCHES,
        )


def _pair(found: Any) -> tuple[Tensor, Tensor]:
    """The results of a plan with lse: (out, lse)."""
    out, lse = found
    return out, lse
