"""DecodePlan: compiles and allocates when it is built; its runs launch, and do nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexattn.device import usable
from flexattn.kernels.base.arguments import captured_values
from flexattn.kernels.base.config import Config
from flexattn.kernels.choose.options import asks_gluon
from flexattn.kernels.hopper.ragged import prefills_from, streaming_sms
from flexattn.kernels.paged_decode.config import ServingConfig, part_slots, workspace
from flexattn.kernels.paged_decode.engines import UNWRITTEN
from flexattn.kernels.paged_decode.source import stepped_axes, tied
from flexattn.mods import bind
from flexattn.problem import captures_of
from flexattn.problem.checks import check_scale
from flexattn.runtime.build import InOrder, Launcher, Scratch
from flexattn.runtime.launch import box_of
from flexattn.runtime.ragged import RaggedKernels
from flexattn.serving import checks
from flexattn.serving.cache import (
    KVCache,
    Scaled,
    cache_box,
    cache_boxes,
    describe_cache,
    split_cache,
    steps,
)
from flexattn.serving.checks import check_choices, inspect, pair, refuse_types, whole
from flexattn.serving.kernels import Kernels, build, plan_problem
from flexattn.serving.launching import (
    NOTHING,
    Beside,
    GivenUp,
    Seen,
    Streams,
    facts,
    launch_here,
    see,
)
from flexattn.serving.verified import is_right
from flexattn.settings import current
from flexattn.util.ambient import without_modes

# Launches that a plan remembers, one for each set of shapes and strides that it was given.
_REMEMBERED = 256
# What a run may give its launches, by the names that kernels have for it.
_TENSORS = (
    "Q", "K", "V", "OUT", "LSE", "SINKS", "V_SCALE", "SEQ_LENS", "KV_START", "CU_SEQLENS", "TABLE",
    "ROW_LENS", "K_SCALE", "INDICES",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Ready(InOrder):
    """Kernels that hold what shapes and strides decide, and the plan's own outputs for them.

    They are given what `_TENSORS` names. prefills: what lists the tiles of prefills,
    attends, and merges; they are given `out` a second time.
    """

    out: Tensor
    lse: Tensor | None
    keys: int
    pages: int
    prefills: tuple[Launcher, ...] | None = None


class DecodePlan:
    """Attention of a batch of requests over a key-value cache, for all batches up to its m.

    batch, q_len, kv_len: the most requests, query positions of a request and keys of a request.
    total_q: instead of q_len, rows of all requests, which cu_seqlens_q then cuts: chunks of
    prefill and decoding requests in one call. heads: (Hq, Hkv). head_dim: D, or (D, Dv).
    page_size: 0 for a contiguous cache. layout: "NHD" or "HND". kv_dtype: dtype where None.
    score_mod, mask_mod: as flex_attention's; `b` is the request, and q_idx and kv_idx are
    positions in the request: the last query of a request stands at its last key. No mask_mod
    means that every query sees every key. sinks: `run` is given a logit for each query head that
    joins the softmax and has no value. scaled: `run` is given k_scale and v_scale:
    True, [1] or [Hkv], or "page" [pages], "page_head" [pages, Hkv], "token" [pages, page] or
    "token_head" [pages, page, Hkv] ("HND": [pages, Hkv, page]; contiguous: B and keys for pages).
    shared_kv: V is the first Dv columns of K (MLA). selection: (k, unit): `run` is given, for each
    request and KV head, the at most k units of so many keys that its rows read: 1 of tokens, or a
    page. lse: the runs return the log-sum-exp too.
    config: ServingConfig; where None the one of a tuned record, looked for now, or the static
    default, and `origin` says which. lengths: "uniform" or "ragged", the class of batches whose
    record is wanted, "" for the best there is. prefix, offset: this plan is the first or
    the second pass of a CascadePlan, whose runs give row_lens or kv_start. What the first returns
    is whole with combine="last" alone; of "launch" the cascade merges the parts. batch_invariant:
    what a row gives depends on its own query and keys alone, bit for bit; the setting of
    FLEXATTN_BATCH_INVARIANT where None. Raises ConfigError where no kernel is so. On a Hopper GPU
    requests of more than 16 queries may run on Hopper's forward, beside the others; with a config
    given, or where that kernel lacks something, one kernel serves all. kernel_options: with
    BACKEND "GLUON" prefills run on the forward in Gluon of a Hopper or Blackwell GPU, or the plan
    is refused.

    Its runs share a workspace and, unless `out` is given, the output: a run on another stream
    waits for what the stream of the last one holds. Replays of a captured run, and runs of several
    threads, are for the caller to order. seq_lens stay as they are while a run reads them, and
    after a launch that was cut short a new plan is needed: the workspace is as each run must find
    it when the one before has ended.
    A cache is known by its tensors: while these live, their sizes and strides stay what they were.
    No tensor of a run is given another dtype or device by `.data = ...`, and what mods capture is
    read where it lay when the plan was made: change it in place.
    Raises InputError, ConfigError, ModError and BuildError.
    Method: split-KV decoding (Dao et al., Flash-Decoding) with the splits cut as in stream-K
    (Osama et al., arXiv 2301.03598) over all requests, from their lengths on the device.
    """

    @without_modes()
    def __init__(
        self,
        *,
        batch: int,
        kv_len: int,
        heads: tuple[int, int],
        head_dim: int | tuple[int, int],
        q_len: int = 1,
        total_q: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        page_size: int = 0,
        layout: str = "NHD",
        kv_dtype: torch.dtype | None = None,
        score_mod: Any = None,
        mask_mod: Any = None,
        scale: float | None = None,
        sinks: bool = False,
        scaled: Scaled = False,
        shared_kv: bool = False,
        lse: bool = False,
        config: ServingConfig | None = None,
        lengths: str = "",
        prefix: bool = False,
        offset: bool = False,
        batch_invariant: bool | None = None,
        kernel_options: Mapping[str, Any] | None = None,
        selection: tuple[int, int] | None = None,
    ) -> None:
        Hq, Hkv = pair("heads", heads, "(query heads, KV heads)")
        both = head_dim if isinstance(head_dim, (tuple, list)) else (head_dim, head_dim)
        D, Dv = pair("head_dim", both, "D, or (D of queries and keys, D of values)")
        check_choices(config, {
            "sinks": sinks, "shared_kv": shared_kv, "lse": lse, "prefix": prefix,
            "offset": offset, "batch_invariant": batch_invariant or False,
        })  # fmt: skip
        if batch_invariant is None:
            batch_invariant = current().batch_invariant
        gluon = asks_gluon(kernel_options)
        self.scale = check_scale(scale, D)
        problem = plan_problem(
            batch=whole("batch", batch), kv_len=whole("kv_len", kv_len), heads=(Hq, Hkv),
            head_dim=(D, Dv), q_len=whole("q_len", q_len), total_q=whole("total_q", total_q),
            dtype=dtype, kv_dtype=kv_dtype, page=whole("page_size", page_size), layout=layout,
            sinks=sinks, scaled=scaled, shared_kv=shared_kv, lse=lse, prefix=prefix, offset=offset,
            positive_scale=self.scale > 0, batch_invariant=batch_invariant, lengths=lengths,
            selection=(0, 0) if selection is None else pair("selection", selection, "(k, unit)"),
        )  # fmt: skip
        self.device = usable(device)
        self._score, self._mask = (
            bind(mod, kind, self.device)
            for mod, kind in ((score_mod, "score"), (mask_mod, "mask"))
        )
        for bound in (self._score, self._mask):
            checks.check_captured(bound, self.device)
        score, mask = captures_of(self._score), captures_of(self._mask)
        self.form = replace(problem.structure, score=score, mask=mask)
        self.problem = replace(problem, structure=self.form)
        # A TreePlan gives rows their places itself.
        mods = self.form.score is not None or self.form.mask is not None
        self.places_rows = mods and not prefix
        while True:
            self._prepare(build(self.problem, self.device, config, gluon))
            if is_right(self, self._kernels):
                break
        self._forget()

    def _prepare(self, kernels: Kernels) -> None:
        """Take kernels, and allocate what their runs share."""
        m = self.problem
        self._kernels = kernels
        self.config, self.origin, self._gpu = kernels.config, kernels.choice.origin, kernels.gpu
        where, rows = self.device, m.rows
        self._slots = part_slots(
            self.form, self.config, kernels.target, kernels.row_tiles, m.kv_len
        )
        words = 0  # without the serving kernel
        if kernels.attend is not None:
            words = workspace(self.form, self.config, kernels.target, self._slots)
        # Nobody has left a part yet; who awaits one leaves its words so again.
        empty = torch.full((words,), UNWRITTEN, dtype=torch.int32, device=where)
        self._workspace = empty.view(torch.float32)
        self._given_up = GivenUp() if self.config.combine == "await" else None
        # Each merge leaves its counter at zero, for the launch that comes next.
        self._count = (
            torch.zeros(self._kernels.programs, dtype=torch.int32, device=where)
            if self._given_up is None
            else self._given_up.word
        )
        self._out = torch.empty((rows, m.Hq, m.head_dim_v), dtype=m.out_dtype, device=where)
        self._lse = None
        if self.form.lse:
            self._lse = torch.empty((rows, m.Hq), dtype=torch.float32, device=where)
        prefills = kernels.prefills
        self._names: tuple[str, ...] = _TENSORS
        self._listed: dict[str, Tensor] = {}
        if prefills is not None:
            # In a batch without a prefill the first one is a tile of some request.
            shared = (*prefills.scratch, Scratch("PREFILLS", (m.B,), torch.int32))
            self._listed = {
                each.name: torch.zeros(each.shape, dtype=each.dtype, device=where)
                for each in shared
            }
            # Programs that await parts of others give up where prefills hold the SMs for long.
            alone = kernels.attend is None or self._given_up is not None
            self._beside = None if alone or where.type != "cuda" else Beside(where)
            # By how many SMs a run shares out the work of its prefills: 1 keeps all of them.
            self._num_sms = kernels.target.num_sms
            own: Any = prefills.choice.config
            self._prefills_from = prefills_from(self.form, own, rows)
            # Tiles of rows that end within a request are stored by address.
            self._names = (*_TENSORS, "OUT_ROWS")
        # What never changes between runs is packed into the launches once.
        self._owned: dict[str, Any] = {"WORKSPACE": self._workspace, "COUNT": self._count}
        if kernels.chooser is not None:
            for name, sizes in (("LISTED", (self.form.chosen,)), ("LISTED_NUM", ())):
                shape = (m.B, m.Hkv, *sizes)
                self._listed[name] = torch.empty(shape, dtype=torch.int32, device=where)
            self._owned |= self._listed
        for captures, bound in ((self.form.score, self._score), (self.form.mask, self._mask)):
            self._owned |= captured_values(captures, bound)
        self._owned = self._addresses(self._owned)
        self._forget()

    def _addresses(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values as launches on the plan's device are given them."""
        if self.device.type != "cuda":
            return dict(values)
        return {
            name: value.data_ptr() if isinstance(value, Tensor) else value
            for name, value in values.items()
        }

    def _forget(self) -> None:
        """Know no run, as before the first one."""
        self._streams = Streams(self._gpu)
        self._ready: dict[Any, _Ready] = {}
        self._last: tuple[Any, _Ready | None] = None, None
        self._caches: dict[int, Seen] = {}
        self._batches: dict[int, Seen] = {}
        self._cache = self._batch = NOTHING

    def run(
        self,
        q: Tensor,
        kv_cache: KVCache,
        *,
        seq_lens: Tensor,
        block_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        kv_start: Tensor | None = None,
        row_lens: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        selection: Tensor | None = None,
        least_q: int = 0,
    ) -> Tensor | Any:
        """Launch on the current stream, on tensors of the plan's device.

        q [B, q_len, Hq, D], or [total_q, Hq, D] with cu_seqlens_q int32 [B + 1]. kv_cache: (K, V),
        each [pages or B, keys, Hkv, D] ("HND": heads before keys), or one tensor with K and V at
        [:, 0] and [:, 1], or MLA's one. seq_lens int32 [B]: keys of each request, those of this
        call's queries included; 0 leaves zeros. block_table int32 [B, pages of a request].
        sinks fp32 [Hq]; k_scale, v_scale fp32, as the plan's `scaled` says. selection int32
        [B, Hkv, k]: units by their number in a request; those below 0, past its keys or given
        twice are left out, never read. The host reads none of it. least_q: no request with
        queries has fewer, as the caller knows; if all are prefills, decodes have no kernel.

        Returns out, as q with Dv for D; with lse also the natural log-sum-exp fp32, as out without
        its last dimension, sinks included. Both are the plan's own, which the next run overwrites,
        unless `out` and `lse` are given. Rows behind the last request are not written. Raises
        InputError for tensors that do not fit the plan; see FLEXATTN_CHECK for their contents.
        StalledError where an earlier run, or a replay of its graph, gave up waiting for its parts.
        """
        table = block_table
        if self._given_up is not None:
            self._given_up.check()
        try:
            k, v = kv_cache if isinstance(kv_cache, tuple) else split_cache(kv_cache, self.problem)
            cache, batch = self._cache, self._batch
            if cache.first() is not k or cache.second() is not v:
                cache = self._cache = see(self._caches, k, v)
            if batch.first() is not seq_lens or batch.second() is not table:
                batch = self._batch = see(self._batches, seq_lens, table)
            extras: tuple[Any, ...] | None = None
            if not (
                cu_seqlens_q is sinks is k_scale is v_scale is kv_start is row_lens is selection
                is None
            ):  # fmt: skip
                optional = (cu_seqlens_q, sinks, k_scale, v_scale, kv_start, row_lens, selection)
                extras = tuple([None if each is None else facts(each) for each in optional])
            # Lengths and tables may be resized in place, as by torch's `out=`; a cache is not.
            key = (
                type(q), q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % 16, q.is_neg(),
                (q.requires_grad or k.requires_grad or v.requires_grad)
                and torch.is_grad_enabled(), cache.facts,
                batch.facts, seq_lens.shape, seq_lens.stride(),
                None if table is None else (table.shape, table.stride()), extras,
            )  # fmt: skip
        except (AttributeError, TypeError, ValueError):
            refuse_types(
                kv_cache, q=q, seq_lens=seq_lens, block_table=table, cu_seqlens_q=cu_seqlens_q,
                sinks=sinks, k_scale=k_scale, v_scale=v_scale, kv_start=kv_start,
                row_lens=row_lens, selection=selection,
            )  # fmt: skip
            raise
        # Compared, most of it is the same objects; looked up, it would be hashed.
        last_key, last = self._last
        ready = last if last_key == key else self._ready.get(key)
        if ready is None:
            ready = self._admit(q, k, v, seq_lens, table, {
                "cu_seqlens_q": cu_seqlens_q, "sinks": sinks, "k_scale": k_scale,
                "v_scale": v_scale, "kv_start": kv_start, "row_lens": row_lens,
                "selection": selection,
            })  # fmt: skip
            if len(self._ready) >= _REMEMBERED:
                self._ready.clear()
            self._ready[key] = ready
        if ready is not last:
            self._last = key, ready
        if current().check:
            # What was looked at is what the launch reads, whatever others write meanwhile.
            seq_lens, table, cu_seqlens_q, kv_start = inspect(
                self.problem, ready.keys, ready.pages, seq_lens, table, cu_seqlens_q, kv_start,
                self.places_rows, least_q,
            )  # fmt: skip
        if out is None and lse is None:
            out, lse = ready.out, ready.lse
        else:
            out, lse = self._outputs(ready, out, lse)
        # In the order of _TENSORS.
        tensors = (
            q, k, v, out, lse, sinks, v_scale, seq_lens, kv_start, cu_seqlens_q, table, row_lens,
            k_scale, selection,
        )  # fmt: skip
        if ready.prefills is None:
            launch_here(ready, self._gpu, tensors, self._streams)
        else:
            self._launch_both(ready, ready.prefills, (*tensors, out), least_q)
        return out if lse is None else (out, lse)

    @property
    def memory(self) -> int:
        """Bytes that the plan holds on its device: its workspace, its counters and its outputs."""
        held = [self._workspace, self._count, self._out, self._lse, *self._listed.values()]
        return sum(each.nbytes for each in held if each is not None)

    @property
    def prefill_config(self) -> Config | None:
        """The config of the kernel of prefills; None where `config` serves all requests."""
        prefills = self._kernels.prefills
        return None if prefills is None else prefills.choice.config

    @property
    def max_keys(self) -> int:
        """The most keys that the last run could read of a request."""
        ready = self._last[1]
        return 0 if ready is None else min(self.problem.kv_len, ready.keys)

    def _outputs(
        self, ready: _Ready, out: Tensor | None, lse: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The tensors that a run writes: given by the caller, or the plan's own."""
        if out is None:
            out = ready.out
        elif not checks.output_fits(out, ready.out):
            raise checks.output_misfit("out", out, ready.out)
        if ready.lse is None or lse is None:
            return out, ready.lse
        if not checks.output_fits(lse, ready.lse):
            raise checks.output_misfit("lse", lse, ready.lse)
        return out, lse

    def _admit(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_lens: Tensor,
        table: Tensor | None,
        more: dict[str, Tensor | None],
    ) -> _Ready:
        """Check shapes, dtypes and strides, and compute what they decide; allocates nothing."""
        m, form = self.problem, self.form
        cu_seqlens = more["cu_seqlens_q"]
        checks.gradients({"query": q, "K": k, "V": v, "sinks": more["sinks"]})
        cache = describe_cache(k, v, m, self.config.BLOCK_N)
        requests = checks.requests(m, seq_lens, cu_seqlens)
        q_rows, spaced = checks.rows(m, q, requests)
        keys = checks.keys(m, table, cache, 1 if form.prefix else requests)
        batch = q.shape[0] if form.prefix else requests
        checks.extras(m, more, self.device, batch)
        given = {"query": q, "K": k, "V": v, "seq_lens": seq_lens}
        listed = {"block_table": table, "cu_seqlens_q": cu_seqlens}
        given |= {name: each for name, each in listed.items() if each is not None}
        checks.devices(self.device, given)
        rows = q.shape[0] * q.shape[1] if q.dim() == 4 else q.shape[0]
        fixed = {
            **self._owned,
            "stride_om": m.Hq * m.head_dim_v,
            "num_requests": 1 if form.prefix else requests,
            "max_keys": min(m.kv_len, keys),
            "stride_qm": spaced[0],
            "stride_qh": spaced[1],
            "softmax_scale": self.scale,
            **steps(m, cache.pages, cache.keys, more),
        }
        rows_of = rows if form.prefix or form.ragged else q_rows
        fixed["total_q" if form.ragged else "q_rows"] = rows_of
        if form.prefix:
            fixed["q_len_each"] = q_rows
        if form.split_keys:
            fixed["part_slots"] = self._slots
        if form.page:
            fixed["stride_table"] = 0 if table is None else table.stride(0)
            fixed["num_pages"] = cache.pages
        axes, boxes = stepped_axes(form, self.config.boxed(form)), {}
        read = ("K", k, cache.steps_k), ("V", v, cache.steps_v)
        for name, tensor, by_axis in read[: 1 if tied(form) else 2]:
            fixed |= {f"stride_{name.lower()}{a}": by_axis["pnh".index(a)] for a in axes}
            if self.config.boxed(form):
                boxes[name] = cache_box(name, tensor, m)
        shape = (*q.shape[:-1], m.head_dim_v)
        lse = None if self._lse is None else self._lse[:rows].view(shape[:-1])
        out = self._out[:rows].view(shape)
        kernels, names = self._kernels, self._names
        ready: list[Launcher] = []
        prefills = None
        if kernels.prefills is not None:
            prefills = self._prepare_prefills(kernels.prefills, q, k, v, out, fixed)
            if form.ragged:
                fixed |= self._addresses({"PREFILLS": self._listed["PREFILLS"]})
        if kernels.chooser is not None:
            choice = {
                "NUM": fixed["LISTED_NUM"], "IDX": fixed["LISTED"], "Hq": m.Hkv, "heads": m.Hkv,
                "rows": 1, "k": form.chosen, "kv_blocks": -(-fixed["max_keys"] // form.unit),
                "q_len": 1, "kv_len": fixed["max_keys"],
            }  # fmt: skip
            programs = max(1, requests) * m.Hkv
            ready.append(kernels.chooser.prepare(programs, choice, names, spare=names))
        if kernels.attend is not None:
            ready.append(kernels.attend.prepare(kernels.programs, fixed, names, boxes, names))
        if kernels.combine is not None:
            # It takes some of what the other one takes.
            every = (*fixed, *names)
            ready.append(kernels.combine.prepare(kernels.merges, fixed, names, spare=every))
        return _Ready(tuple(ready), out, lse, keys, cache.pages, prefills)

    def _launch_both(
        self, ready: _Ready, prefills: tuple[Launcher, ...], tensors: tuple[Any, ...], least_q: int
    ) -> None:
        """Launch the prefills, and the decodes beside them: each fills SMs that others leave."""
        decodes = ready.kernels and least_q < self._prefills_from
        launch_here(prefills[0], self._gpu, tensors, self._streams)
        if decodes and self._beside is not None:
            self._beside.begin()
        for each in prefills[1:]:
            launch_here(each, self._gpu, tensors)
        if decodes and self._beside is not None:
            self._beside.launch(ready, tensors)
        elif decodes:
            launch_here(ready, self._gpu, tensors)

    def _prepare_prefills(
        self, kernels: RaggedKernels, q: Tensor, k: Tensor, v: Tensor, out: Tensor, fixed: Any
    ) -> tuple[Launcher, ...]:
        """The launches of the prefills; fixed: the values of the decodes'."""
        m, names = self.problem, self._names
        own = fixed | self._addresses(self._listed)
        own |= {
            "num_sms": self._num_sms, "Hq": m.Hq, "stride_oh": m.head_dim_v,
            "streaming_sms": streaming_sms(self._kernels.target) if self._beside else 0,
            "group": self.form.group, "sm_scale": self.scale,
        }  # fmt: skip
        rows, heads = {"Q": q.flatten(0, -3), "OUT": out.flatten(0, -3)}, (m.Hkv, self.form.group)
        boxes = {name: box_of(x.unflatten(1, heads).transpose(0, 1)) for name, x in rows.items()}
        boxes |= cache_boxes(k, v, m)
        return kernels.prepare(own["num_requests"], own, names, boxes)
