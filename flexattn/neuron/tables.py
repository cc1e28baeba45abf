"""The tables of a kernel, made from the mods' captured tensors as they are now."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.errors import UnsupportedError
from flexattn.kernels.nki.printer import TABLE_LIMIT
from flexattn.kernels.nki.tables import NkiTable
from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import Bound
from flexattn.mods.expr import Expr, Mod, const, walk
from flexattn.mods.ops import is_float
from flexattn.mods.simplify import rebuilt
from flexattn.mods.site import interned
from flexattn.problem import Problem

# A table for every pair of row and key may have so many elements: 256 MiB of float32.
MOST_ELEMENTS = 2**26


def make_table(table: NkiTable, bound: Bound, problem: Problem, rows: int, target: str) -> Tensor:
    """The values of a table, [B or 1, H or 1, n], n by its kind.

    rows: BLOCK_M, over which a relative table repeats. Raises UnsupportedError where it would be
    too large, or holds integers that float32 does not.
    """
    packed = problem.structure.kind == "decode"
    B = problem.B if table.per_batch else 1
    H = problem.Hq if table.per_head or (packed and table.kind in ("row", "pair")) else 1
    L, S = problem.q_len, problem.kv_len
    env = {
        "b": torch.arange(B)[:, None, None, None],
        "h": torch.arange(H)[None, :, None, None],
        "q_idx": torch.arange(L)[None, None, :, None],
        "kv_idx": torch.arange(S)[None, None, None, :],
    }
    lanes = {"uniform": 1, "row": L, "key": S, "relative": (L + S - 1) * rows, "pair": L * S}
    if B * H * lanes[table.kind] > MOST_ELEMENTS:
        raise UnsupportedError(
            f"{_load(table.mod.expr)} as a table of {B} x {H} x {lanes[table.kind]} elements",
            f"{target} reads what depends on both q_idx and kv_idx from a table of at most "
            f"{MOST_ELEMENTS}",
            "write it as a function of q_idx - kv_idx, or of each alone",
        )
    mod = table.mod
    if table.kind == "relative":
        # A function of kv_idx - q_idx alone is what it is at q_idx = L - 1, moved.
        mod = _shifted(mod, L - 1)
        env["kv_idx"] = torch.arange(L + S - 1)[None, None, None, :]
    values = evaluate(mod, env, bound.tensors, bound.scalars)
    if (
        not is_float(mod.expr.dtype)
        and values.numel()
        and int(values.abs().max() if values.dtype != torch.bool else 1) > TABLE_LIMIT
    ):
        raise UnsupportedError(
            f"{_load(table.mod.expr)}, which reaches {int(values.abs().max())}",
            f"{target} computes in float32: integers of a table are at most {TABLE_LIMIT}",
            "number documents and the like from 0",
        )
    kept = values.dtype if values.dtype in (torch.bfloat16, torch.float16) else torch.float32
    values = values.to(kept)
    sizes = {
        "uniform": (1, 1),
        "row": (L, 1),
        "key": (1, S),
        "relative": (1, L + S - 1),
        "pair": (L, S),
    }
    values = values.expand(B, H, *sizes[table.kind])
    if packed and table.kind in ("row", "pair"):
        heads = problem.structure.packed_heads
        values = values.reshape(B, H // heads, heads * L, -1)
    if table.kind == "pair":
        return values.contiguous()
    if table.kind == "relative":
        return values.reshape(B, H, -1).repeat(1, 1, rows).contiguous()
    return values.reshape(*values.shape[:2], -1).contiguous()


def _shifted(mod: Mod, zero: int) -> Mod:
    query, position = Expr("var", "int64", (), "q_idx"), const(zero, "int64")
    expr = rebuilt(mod.expr, {query: position}.get)
    return interned(mod.kind, expr, mod.buffers, mod.scalars)


def _load(expr: Expr) -> str:
    op = next((node.op for node in walk(expr) if node.op == "load"), expr.op)
    return f"{op} of {expr.dtype}"
