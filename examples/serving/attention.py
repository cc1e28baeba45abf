"""Attention of a step over the paged cache: one DecodePlan, and a CascadePlan behind a prefix.

Requests that share pages read them like any others: the pages stand in several block tables, and
that costs nothing. A cascade reads a shared prefix once for all of its members, in three launches
where there was one, so it is for steps in which it saves many reads: on an H200 32 requests behind
8192 keys take 38 µs with it and 158 µs without, 0.5 ns for each key less (docs/benchmarks.md), and
three more launches with what gathers and puts back their rows are taken for 15 µs: CASCADE_FROM.
It cuts keys where the prefix ends, so that bits depend on who shares it: with batch_invariant
there is none.
"""

import logging

import torch
from torch import Tensor

from examples.serving.inputs import Inputs
from examples.serving.model import Shape
from examples.serving.request import Limits
from flexattn.catalogue import causal
from flexattn.serving import AppendPlan, CascadePlan, DecodePlan
from flexattn.serving.verified import verified_by

log = logging.getLogger(__name__)

CASCADE_FROM = 32_768


def new_cache(
    shape: Shape, limits: Limits, device: torch.device, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """(K, V) of each layer, [pages, page, Hkv, D]."""
    size = (limits.pages, limits.page, shape.heads[1], shape.head_dim)
    make = lambda: torch.zeros(size, device=device, dtype=dtype)  # noqa: E731
    return [(make(), make()) for _ in range(shape.layers)]


class PlanAttention:
    """What a server uses: the library's plans, made once; their runs allocate nothing.

    Their kernels are verified before the first request: a wrong one gives way to the next.
    With `cascades` a step may have members of a cascade, a row each.
    """

    def __init__(
        self,
        shape: Shape,
        limits: Limits,
        device: torch.device,
        dtype: torch.dtype,
        *,
        batch_invariant: bool = False,
        cascades: bool = False,
    ) -> None:
        self._limits = limits
        self._cache = new_cache(shape, limits, device, dtype)
        common = {
            "batch": limits.batch, "heads": shape.heads, "head_dim": shape.head_dim,
            "dtype": dtype, "device": device, "page_size": limits.page,
        }  # fmt: skip
        self._plan = DecodePlan(
            total_q=limits.rows, kv_len=limits.longest, mask_mod=causal,
            batch_invariant=batch_invariant, **common,
        )  # fmt: skip
        self._append = AppendPlan(
            heads=shape.heads[1], head_dim=shape.head_dim, page_size=limits.page, dtype=dtype,
            slots=torch.int32, device=device,
        )  # fmt: skip
        log.info("attention's kernels are verified %s", verified_by(self._plan))
        # A row a member, at its last key: it sees every key, so no mask is needed.
        self._cascade = (
            CascadePlan(prefix_len=limits.longest, own_len=limits.longest, **common)
            if cascades
            else None
        )
        size = (limits.rows + 1, *shape.heads[:1], shape.head_dim)
        self._out = torch.zeros(size, device=device, dtype=dtype)

    def attend(
        self, inputs: Inputs, layer: int, q: Tensor, k: Tensor, v: Tensor, shared: bool
    ) -> Tensor:
        """[R, Hq, D] of the step's rows; shared: some of them are members of a cascade."""
        cache, on = self._cache[layer], inputs.on
        self._append.run(k, v, cache, slot_mapping=on["slots"][: len(k)])
        out = self._out[: len(q)]
        self._plan.run(
            q, cache, seq_lens=on["lens"], block_table=on["table"], cu_seqlens_q=on["ends"],
            out=out,
        )  # fmt: skip
        if shared:
            found, _ = self._cascade.run(
                q[on["gather"].long(), None], cache, prefix_len=on["prefix_len"],
                prefix_table=on["prefix"], seq_lens=on["lens_c"], block_table=on["own"],
                kv_start=on["start_c"],
            )  # fmt: skip
            # Where there is no member, the row behind all others is written.
            self._out.index_copy_(0, on["scatter"].long(), found[:, 0])
        return out
