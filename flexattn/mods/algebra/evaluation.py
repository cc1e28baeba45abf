"""verdicts(): a mod's bounds on many tiles at once, with torch, on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flexattn.mods.algebra.lower import Bounds
from flexattn.mods.algebra.tables import Extremes
from flexattn.mods.expr import Expr, walk
from flexattn.mods.ops import OPS, dtype_of


def verdicts(
    bounds: Bounds,
    corners: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    scalars: Sequence[int | float | bool],
    tables: Sequence[Extremes],
) -> tuple[Tensor, Tensor]:
    """Whether every element of each tile is kept, and whether any may be.

    corners: int64 tensors named as in flexattn.mods.algebra.lower, which broadcast against one
    another. The results are bool, with the dimensions that they depend on.
    """
    device = next(iter(corners.values())).device
    found: dict[Expr, Tensor] = {}
    for node in walk(bounds.must, bounds.may):
        args = [found[arg] for arg in node.args]
        if node.op == "var":
            found[node] = corners[str(node.value)]
        elif node.op == "const":
            found[node] = torch.tensor(node.value, dtype=dtype_of(node.dtype), device=device)
        elif node.op == "scalar":
            number = scalars[int(node.value or 0)]
            found[node] = torch.tensor(number, dtype=dtype_of(node.dtype), device=device)
        elif node.op == "size":
            slot, dim = map(int, str(node.value).split("."))
            found[node] = torch.tensor(tensors[slot].shape[dim], device=device)
        elif node.op in ("table_min", "table_max"):
            number = int(node.value or 0)
            searched = bounds.tables[number].dim
            read = _read(tables[number], args, searched, node.op == "table_max")
            found[node] = read.to(dtype_of(node.dtype))
        elif node.op == "cast":
            found[node] = args[0].to(dtype_of(node.dtype))
        else:
            op = OPS[node.op]
            found[node] = op.function(*args, **op.kwargs)
    return found[bounds.must], found[bounds.may]


def _read(table: Extremes, places: list[Tensor], searched: int, greatest: bool) -> Tensor:
    values = table.most if greatest else table.least
    if searched < 0:
        return _at(values[0], places)
    *places, last = places
    first = places.pop(searched) >> table.shift
    last = last >> table.shift
    # Two runs of 2**level pieces cover the range from both ends.
    level = torch.frexp((last - first + 1).double()).exponent.long() - 1
    level = level.clamp(0, table.levels - 1)
    second = torch.maximum(last - (1 << level) + 1, first)
    ends = [_at(values, [level, *places, at]).to(torch.int64) for at in (first, second)]
    return torch.maximum(*ends) if greatest else torch.minimum(*ends)


def _at(values: Tensor, places: list[Tensor]) -> Tensor:
    if not places:
        return values
    found: Tensor = torch.ops.aten.index.Tensor(values, torch.broadcast_tensors(*places))
    return found
