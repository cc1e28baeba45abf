"""Mods that no record knows and no cache holds, of every form that compiles to its own kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["first_calls"]

# Keys of a document, and that a window shows; any do.
DOCUMENT, WINDOW = 300, 700


def first_calls(kind: str, q: Any, k: Any, v: Any) -> dict[str, float]:
    """Seconds of the first call of each new mod, its block mask made before.

    q, k, v: as bench.cold_child has them. Of a prefill also D 64, by the first half of their
    columns.
    """
    import torch

    import flexattn

    found = {}
    for name, width, call in _calls(kind, q.shape[2], k.shape[2]):
        cut = [x[..., :width].contiguous() for x in (q, k, v)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        flexattn.flex_attention(*cut, enable_gqa=True, **call)
        torch.cuda.synchronize()
        found[name] = time.perf_counter() - begin
    return found


def _calls(kind: str, rows: int, keys: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    import torch

    import flexattn
    from flexattn.catalogue import causal

    def over(mask_mod: Callable[..., Any]) -> Any:
        return flexattn.create_block_mask(mask_mod, None, None, rows, keys, "cuda")

    def slope(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 0.75 * score + 0.01 * (kv_idx - q_idx)

    def leak(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(score > 0, score, 0.5 * score)

    if kind == "decode":
        yield "a score", 128, {"score_mod": leak}
        return
    ids = (torch.arange(keys, device="cuda") // DOCUMENT).int()
    table = torch.zeros(32, 2 * keys, device="cuda")

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= WINDOW)

    def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])

    def by_distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, q_idx - kv_idx + keys]

    mask = over(causal)
    yield "a slope", 128, {"score_mod": slope, "block_mask": mask}
    yield "a score", 128, {"score_mod": leak, "block_mask": mask}
    yield "a window", 128, {"block_mask": over(window)}
    yield "documents", 128, {"block_mask": over(documents)}
    yield "a table", 128, {"score_mod": by_distance, "block_mask": mask}
    yield "a mask at D 64", 64, {"block_mask": mask}
