"""Prints an Expr as plain torch, and runs it: the form a person can check, and the oracle's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.mods import Bound
from flexattn.mods.expr import Expr, MaskMod, Mod, ScoreMod, walk
from flexattn.mods.ops import OPS
from flexattn.mods.outside import read_places
from flexattn.util.locks import Lru

_compiled: Lru[str, Callable[..., torch.Tensor]] = Lru(256)


def to_torch(expr: Expr, *, wide: bool = False) -> str:
    """The source of `mod(score, b, h, q_idx, kv_idx, buffers, scalars)`, an assignment a node.

    It calls nothing but torch, math and `load(buffer, *index)`. wide: what is float32 becomes
    float64, as an oracle computes it.
    """
    names: dict[Expr, str] = {}
    lines = ["def mod(score, b, h, q_idx, kv_idx, buffers, scalars):"]
    for node in walk(expr):
        text = _text(node, [names[arg] for arg in node.args])
        if wide:
            text = text.replace("torch.float32", "torch.float64")
        if node.op == "var":
            names[node] = text
        else:
            names[node] = f"t{len(lines) - 1}"
            lines.append(f"    {names[node]} = {text}")
    lines.append(f"    return {names[expr]}")
    return "\n".join(lines) + "\n"


def evaluate(
    mod: Mod,
    env: Mapping[str, torch.Tensor],
    tensors: Sequence[torch.Tensor],
    scalars: Sequence[int | float | bool],
    *,
    wide: bool = False,
) -> torch.Tensor:
    """The mod on tensors for its variables, which broadcast against one another.

    A negative index wraps once, as in torch; one out of range reads 0 and never raises.
    Variables that the mod does not use may be missing from `env`; what it does not depend on
    has no dimension in the result. wide: as in `to_torch`. May run under torch.vmap.
    """
    name = mod.fingerprint + " wide" * wide
    function = _compiled.get(name)
    if function is None:
        scope: dict[str, Any] = {"torch": torch, "math": math, "load": _load}
        source = to_torch(mod.expr, wide=wide)
        exec(compile(source, f"<mod {mod.fingerprint[:12]}>", "exec"), scope)
        function = scope["mod"]
        _compiled.put(name, function)
    device = next((x.device for x in env.values()), torch.device("cpu"))
    inputs = [env.get(name) for name in ("score", "b", "h", "q_idx", "kv_idx")]
    with torch.device(device):
        return function(*inputs, tensors, scalars)


def score_callable(bound: Bound | None) -> ScoreMod | None:
    """A score_mod as torch's callable, in float64 where the score is; None for None."""
    if bound is None:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        env = {"score": score, "b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx}
        wide = score.dtype == torch.float64
        return evaluate(bound.mod, env, bound.tensors, bound.scalars, wide=wide)

    return score_mod


def mask_callable(bound: Bound | None) -> MaskMod | None:
    """A mask_mod as torch's callable, in the dtypes that the kernel has: it decides as it does."""
    if bound is None:
        return None

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        env = {"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx}
        return evaluate(bound.mod, env, bound.tensors, bound.scalars)

    return mask_mod


def _load(buffer: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
    return read_places(buffer, index)[0]


def _text(node: Expr, args: list[str]) -> str:
    if node.op == "var":
        return str(node.value)
    if node.op == "const":
        return f"torch.tensor({_number(node.value)}, dtype=torch.{node.dtype})"
    if node.op == "scalar":
        return f"torch.tensor(scalars[{node.value}], dtype=torch.{node.dtype})"
    if node.op == "load":
        return f"load({', '.join([f'buffers[{node.value}]', *args])})"
    if node.op == "cast":
        return f"{args[0]}.to(torch.{node.dtype})"
    op = OPS[node.op]
    options = [f"{name}={value!r}" for name, value in op.kwargs.items()]
    return f"torch.{op.called}({', '.join([*args, *options])})"


def _number(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "math.nan" if math.isnan(value) else f"{'-' if value < 0 else ''}math.inf"
    return repr(value)
