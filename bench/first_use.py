"""`python -m bench.first_use`: the time of the check of a kernel's first launch, by kernels."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

import flexattn.frontend.plan as calls
import flexattn.serving.verified as plans
from bench.command import main
from bench.peers import OURS
from bench.results import Gate
from bench.runner import Kind, Method, Uncounted, in_turns
from flexattn import create_block_mask, flex_attention
from flexattn.catalogue import alibi, causal, relative_bias, softcap
from flexattn.serving import DecodePlan
from flexattn.settings import override

METHOD = Method(rounds=3)
HEADS, KEYS = 8, 2048
MODS: dict[str, Callable[[str], Any]] = {
    "plain": lambda device: None,
    "softcap": lambda device: softcap(20.0),
    "alibi": lambda device: alibi(HEADS, device),
    "learned-bias": lambda device: relative_bias(
        torch.zeros(HEADS, 2 * KEYS, device=device, requires_grad=True), KEYS
    ),
}


@dataclass(frozen=True)
class UseRow(Uncounted):
    """The kernel of a call of so many queries, or of its gradients; without queries of a plan."""

    D: int = 128
    rows: int = 0
    mod: str = "plain"
    backward: bool = False
    page: int = 0
    group = "first-use"

    @property
    def name(self) -> str:
        """As --rows matches it."""
        if not self.rows:
            return f"plan-pages-of-{self.page}"
        return f"d{self.D}-{self.rows}-{self.mod}{'-backward' * self.backward}"


ROWS = [
    *(
        UseRow(D, rows, mod, backward)
        for D, rows in ((64, 2048), (128, 2048), (128, 1), (256, 1024))
        for mod in MODS
        for backward in (False, True)[: 1 + (rows > 1)]
    ),
    *(UseRow(page=page) for page in (0, 16)),
]


def _make(row: UseRow, method: Method) -> Callable[[], Any]:
    about: dict[str, Any] = {"device": method.device}
    if not row.rows:
        sizes = {"batch": 8, "kv_len": 8192, "heads": (32, 8), "head_dim": row.D}
        return partial(DecodePlan, **sizes, **about, page_size=row.page)
    mask = create_block_mask(causal, None, None, row.rows, KEYS, **about)
    q, k, v = (
        torch.randn(2, heads, n, row.D, dtype=method.dtype, requires_grad=row.backward, **about)
        for heads, n in ((HEADS, row.rows), (2, KEYS), (2, KEYS))
    )
    given = MODS[row.mod](method.device), mask

    def call() -> None:
        with torch.set_grad_enabled(row.backward):
            out: Any = flex_attention(q, k, v, *given, enable_gqa=True)
            if row.backward:
                out.float().sum().backward()

    return call


def check_us(call: Callable[[], Any]) -> float:
    """The mean microseconds of the checks of a call's kernels, as if it were their first one."""
    spent: list[float] = []
    accepted = calls.accepted

    def timed(*arguments: Any) -> bool:
        begin = time.perf_counter()
        right = accepted(*arguments)
        spent.append(1e6 * (time.perf_counter() - begin))
        assert right
        return right

    # The call before has compiled, and loaded what torch needs.
    with (
        override(verify="always", strict=False),
        patch.object(calls, "accepted", timed),
        patch.object(plans, "accepted", timed),
    ):
        call()
    return sum(spent) / max(1, len(spent))


FIRST_USE = Kind(
    _make,
    lambda call, x: Gate(True, "not judged"),
    lambda peer, x: x,
    grad=True,
    race=in_turns(check_us),
)
run = partial(main, "first_use", ROWS, METHOD, known={OURS: OURS}, kind=FIRST_USE)


if __name__ == "__main__":
    sys.exit(run())
