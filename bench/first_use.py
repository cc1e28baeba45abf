"""The time of the check of a kernel's first launch, by kernels: `python -m bench.first_use`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import flexattn.frontend.plan as verified
import flexattn.serving.verified as plans
from bench.environment import describe
from bench.results import write
from flexattn import create_block_mask, flex_attention
from flexattn.catalogue import alibi, causal, relative_bias, softcap
from flexattn.serving import DecodePlan
from flexattn.settings import override


def calls(device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Twenty kernels or more: forward, backward and decode by head dimensions and mods, plans."""
    heads, table = 8, torch.zeros(8, 4096, device=device, requires_grad=True)
    mods = {
        "plain": None, "softcap": softcap(20.0), "alibi": alibi(heads, device),
        "learned bias": relative_bias(table, 2048),
    }  # fmt: skip
    for D, rows in ((64, 2048), (128, 2048), (128, 1), (256, 1024)):
        mask = create_block_mask(causal, None, None, rows, 2048, device=device)
        for name, mod in mods.items():
            q = torch.randn(2, heads, rows, D, device=device, dtype=torch.bfloat16)
            k, v = (torch.randn(2, 2, 2048, D, device=device, dtype=torch.bfloat16) for _ in "kv")
            about: dict[str, Any] = {"score_mod": mod, "block_mask": mask, "enable_gqa": True}
            yield f"D {D}, {rows} rows, {name}", lambda q=q, k=k, v=v, a=about: forward(q, k, v, a)
            if rows > 1:
                ways = [x.requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
                yield f"D {D}, backward, {name}", lambda w=ways, a=about: backward(w, a)
    for page in (0, 16):
        yield (
            f"plan, pages of {page}",
            lambda p=page: DecodePlan(
                batch=8, kv_len=8192, heads=(32, 8), head_dim=128, page_size=p, device=device
            ),
        )


def forward(q: Any, k: Any, v: Any, about: dict[str, Any]) -> None:
    with torch.no_grad():
        flex_attention(q, k, v, **about)


def backward(inputs: list[Any], about: dict[str, Any]) -> None:
    flex_attention(*inputs, **about).float().sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    spent: list[float] = []
    accepted = verified.accepted

    def timed(*arguments: Any) -> bool:
        begin = time.perf_counter()
        right = accepted(*arguments)
        spent.append(1e3 * (time.perf_counter() - begin))
        assert right
        return right

    verified.accepted = plans.accepted = timed  # type: ignore[assignment]
    rows = []
    with override(verify="always", strict=False):
        for name, call in calls(asked.device):
            # The first call compiles, and loads what torch needs; the second one is what a kernel
            # costs in a process that has verified another.
            for _ in range(2):
                spent.clear()
                call()
            rows.append({"kernel": name, "ms": round(sum(spent), 2), "checks": len(spent)})
            print(f"{name:32} {rows[-1]['ms']:8.1f} ms, {len(spent)} checks", flush=True)
    worst = max(row["ms"] / row["checks"] for row in rows)
    print(f"{len(rows)} rows, at most {worst:.1f} ms a kernel")
    if asked.out is not None:
        found = {"environment": describe(), "rows": rows, "most_ms": worst}
        write(found, asked.out)


if __name__ == "__main__":
    main()
