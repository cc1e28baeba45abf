"""Which blocks of a mask are empty, partial or full: by interval where that decides, else exactly.

A causal mask of 32k x 32k has 65536 blocks, and all but 256 of them follow from their corners.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexattn.build import builder
from flexattn.device import detect
from flexattn.mods import Bound
from flexattn.mods.bounds import dtype_range
from flexattn.mods.expr import Expr, walk
from flexattn.mods.ops import is_int
from flexattn.problem import Captures
from flexattn.render.arguments import captured_values
from flexattn.render.source import render_block_mask
from flexattn.render.torch_printer import evaluate

__all__ = ["EMPTY", "FULL", "PARTIAL", "block_kinds"]

EMPTY, PARTIAL, FULL = 0, 1, 2
# Elements that the CPU path evaluates at a time.
_CHUNK = 2**22
# A sum of two such numbers does not wrap in 64 bits.
_LARGEST = 2**61

Interval = tuple[Tensor, Tensor]


def block_kinds(
    bound: Bound, sizes: tuple[int, int, int, int], block: tuple[int, int], device: torch.device
) -> Tensor:
    """Whether each block is EMPTY, PARTIAL or FULL: int8 [B, H, q_blocks, kv_blocks].

    A block that reaches past a length is never FULL, as in torch. On a GPU one kernel decides
    each block in registers; on the CPU interval arithmetic decides most of them, and the lanes
    of the others are evaluated a few blocks at a time.
    """
    B, H, q_len, kv_len = sizes
    shape = (B, H, -(-q_len // block[0]), -(-kv_len // block[1]))
    kinds = torch.empty(shape, dtype=torch.int8, device=device)
    if kinds.numel() == 0:
        return kinds
    if device.type == "cuda":
        _on_gpu(kinds, bound, sizes, block)
    else:
        for b in range(B):
            for h in range(H):
                _on_cpu(kinds[b, h], bound, (b, h), (q_len, kv_len), block)
    return kinds


def _on_gpu(
    kinds: Tensor, bound: Bound, sizes: tuple[int, int, int, int], block: tuple[int, int]
) -> None:
    device = kinds.device
    captures = Captures(bound.mod, tuple(t.stride()[-1:] == (1,) for t in bound.tensors))
    target = detect(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    kernel = builder().kernel(render_block_mask(captures, *block, target), target, index)
    captured = captured_values(captures, bound)
    fixed = [None, *sizes[1:], *kinds.shape[2:], *[None] * len(captured)]
    launcher = kernel.prepare(kinds.numel(), fixed, ())
    with torch.cuda.device(index):
        launcher.launch(torch.cuda.current_stream(index).cuda_stream, [kinds, *captured])


def _on_cpu(
    kinds: Tensor,
    bound: Bound,
    place: tuple[int, int],
    lengths: tuple[int, int],
    block: tuple[int, int],
) -> None:
    """One head's kinds [q_blocks, kv_blocks]."""
    firsts = [torch.arange(n) * size for n, size in zip(kinds.shape, block, strict=True)]
    lasts = [
        (first + size).clamp(max=length) - 1
        for first, size, length in zip(firsts, block, lengths, strict=True)
    ]
    ranges = {
        "b": (torch.tensor(place[0]),) * 2,
        "h": (torch.tensor(place[1]),) * 2,
        "q_idx": (firsts[0][:, None], lasts[0][:, None]),
        "kv_idx": (firsts[1][None, :], lasts[1][None, :]),
    }
    low, high = _truth(_interval(bound.mod.expr, ranges))
    whole = (firsts[0] + block[0] <= lengths[0])[:, None] & (firsts[1] + block[1] <= lengths[1])
    kinds.copy_(torch.where(high == 0, EMPTY, torch.where((low == 1) & whole, FULL, PARTIAL)))
    unsure = ((low == 0) & (high == 1)).expand(kinds.shape)
    where = torch.nonzero(unsure)
    lanes = [torch.arange(size) for size in block]
    for some in where.split(max(1, _CHUNK // (block[0] * block[1]))):
        q_idx = (some[:, 0] * block[0])[:, None, None] + lanes[0][None, :, None]
        kv_idx = (some[:, 1] * block[1])[:, None, None] + lanes[1][None, None, :]
        env = {"b": torch.tensor(place[0]), "h": torch.tensor(place[1])}
        env |= {"q_idx": q_idx, "kv_idx": kv_idx}
        keep = evaluate(bound.mod, env, bound.tensors, bound.scalars)
        tiles = keep & (q_idx < lengths[0]) & (kv_idx < lengths[1])
        found = tiles.any(2).any(1).to(torch.int8) + tiles.all(2).all(1).to(torch.int8)
        kinds[some[:, 0], some[:, 1]] = found


def _truth(found: Interval | None) -> Interval:
    return (torch.tensor(0), torch.tensor(1)) if found is None else found


def _interval(expr: Expr, ranges: dict[str, Interval]) -> Interval | None:
    """The least and the most that an integer or bool Expr is in every block; None: not known.

    As flexattn.mods.bounds for all blocks at once: bounds are tensors that broadcast to
    [q_blocks, kv_blocks]. Memory and scalars are not looked at.
    """
    found: dict[Expr, Interval | None] = {}
    for node in walk(expr):
        found[node] = _bound(node, [found[arg] for arg in node.args], ranges)
    return found[expr]


def _bound(
    node: Expr, args: list[Interval | None], ranges: dict[str, Interval]
) -> Interval | None:
    if node.dtype != "bool" and not is_int(node.dtype):
        return None
    if node.op == "const":
        value = int(node.value or 0)
        return (torch.tensor(value),) * 2 if abs(value) <= _LARGEST else None
    if node.op == "var":
        return ranges.get(str(node.value))
    if node.dtype == "bool" and node.op in ("and", "or", "where"):
        # The one known operand may decide; an operand that is not known may be either.
        args = [_truth(arg) for arg in args]
    elif node.op == "where":
        args = [_truth(args[0]), *args[1:]]
    rules = _TRUTHS if node.dtype == "bool" else _NUMBERS
    rule = rules.get(node.op)
    known = [arg for arg in args if arg is not None]
    if rule is None or len(known) < len(args):
        return None
    result = rule(*known)
    if result is None or node.dtype == "bool":
        return result
    limit = dtype_range(node.dtype)
    least, most = int(result[0].min()), int(result[1].max())
    if least < max(limit[0], -_LARGEST) or most > min(limit[1], _LARGEST):
        return None  # it may wrap
    return result


def _where(cond: Interval, x: Interval, y: Interval) -> Interval:
    low = torch.where(cond[1] == 0, y[0], torch.minimum(x[0], y[0]))
    high = torch.where(cond[1] == 0, y[1], torch.maximum(x[1], y[1]))
    return torch.where(cond[0] == 1, x[0], low), torch.where(cond[0] == 1, x[1], high)


def _multiply(x: Interval, y: Interval) -> Interval | None:
    if _magnitude(x) * _magnitude(y) > _LARGEST:
        return None
    return _hull([i * j for i in x for j in y])


def _divide(mode: str) -> Callable[[Interval, Interval], Interval | None]:
    def rule(x: Interval, y: Interval) -> Interval | None:
        if int(y[0].min()) <= 0:
            return None
        return _hull([torch.div(i, j, rounding_mode=mode) for i in x for j in y])

    return rule


def _remainder(x: Interval, y: Interval) -> Interval | None:
    """x mod one positive number: exact within a period, else the whole period."""
    if int(y[0].min()) <= 0 or not torch.equal(y[0], y[1]):
        return None
    size = y[0]
    one_period = x[0].div(size, rounding_mode="floor") == x[1].div(size, rounding_mode="floor")
    low = torch.where(one_period, x[0].remainder(size), 0)
    return low, torch.where(one_period, x[1].remainder(size), size - 1)


def _absolute(x: Interval) -> Interval:
    least = torch.where((x[0] <= 0) & (x[1] >= 0), 0, torch.minimum(x[0].abs(), x[1].abs()))
    return least, torch.maximum(x[0].abs(), x[1].abs())


def _hull(values: list[Tensor]) -> Interval:
    stacked = torch.stack(torch.broadcast_tensors(*values))
    return stacked.amin(0), stacked.amax(0)


def _magnitude(x: Interval) -> int:
    return max(abs(int(x[0].min())), abs(int(x[1].max())))


def _flag(low: Tensor, high: Tensor) -> Interval:
    return low.to(torch.int64), high.to(torch.int64)


def _equal(x: Interval, y: Interval) -> Interval:
    same = (x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0])
    return _flag(same, (x[0] <= y[1]) & (y[0] <= x[1]))


def _differ(x: Interval, y: Interval) -> Interval:
    low, high = _equal(x, y)
    return 1 - high, 1 - low


_NUMBERS: dict[str, Callable[..., Interval | None]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": _multiply,
    "neg": lambda x: (-x[1], -x[0]),
    "abs": _absolute,
    "minimum": lambda x, y: (torch.minimum(x[0], y[0]), torch.minimum(x[1], y[1])),
    "maximum": lambda x, y: (torch.maximum(x[0], y[0]), torch.maximum(x[1], y[1])),
    "where": _where,
    "floor_div": _divide("floor"),
    "trunc_div": _divide("trunc"),
    "floor_mod": _remainder,
    "trunc_mod": lambda x, y: _remainder(x, y) if int(x[0].min()) >= 0 else None,
    "cast": lambda x: x,
}
_TRUTHS: dict[str, Callable[..., Interval | None]] = {
    "lt": lambda x, y: _flag(x[1] < y[0], x[0] < y[1]),
    "le": lambda x, y: _flag(x[1] <= y[0], x[0] <= y[1]),
    "gt": lambda x, y: _flag(x[0] > y[1], x[1] > y[0]),
    "ge": lambda x, y: _flag(x[0] >= y[1], x[1] >= y[0]),
    "eq": _equal,
    "ne": _differ,
    "and": lambda x, y: (x[0] & y[0], x[1] & y[1]),
    "or": lambda x, y: (x[0] | y[0], x[1] | y[1]),
    "not": lambda x: (1 - x[1], 1 - x[0]),
    "where": _where,
    "cast": lambda x: _differ(x, (torch.tensor(0), torch.tensor(0))),
}
