"""Mods that print every operation of the table, in every place that a kernel computes something.

A new row of flexattn.mods.ops.OPS is in them without a change here.
"""

from functools import reduce

import torch

from flexattn.mods.ops import OPS

DTYPES = ("float32", "bfloat16", "int32", "int64", "bool")
LENGTH = 8192


def takes(op, dtype):
    """Whether torch has the operation for tensors of a dtype."""
    sample = torch.ones(2, dtype=getattr(torch, dtype))
    try:
        applied(op, sample, sample)
    except (RuntimeError, TypeError):
        return False
    return True


def applied(op, x, y):
    if op.name == "where":
        return op.function(x > y, x, y)
    if op.arity == 1:
        return op.function(x, **op.kwargs)
    if op.name in ("shl", "shr"):
        y = y & 7
    if op.name == "pow" and not x.is_floating_point():
        y = 4  # integers are raised to constants alone
    return op.function(x, y, **op.kwargs)


def _pair(place, dtype):
    """x and y of a place, as functions of score, q_idx and kv_idx."""
    table = torch.ones(LENGTH, dtype=getattr(torch, dtype))
    return {
        "score": lambda s, q, k: (s, s * 0.5),
        "positions": lambda s, q, k: ((q - k).to(table.dtype), (k + 1).to(table.dtype)),
        "key": lambda s, q, k: (table[k], table[k + 1]),
        "row": lambda s, q, k: (table[q], table[q + 1]),
        "row and key": lambda s, q, k: (table[q], table[k]),
        "diagonal": lambda s, q, k: (table[q - k + 4096], table[q - k + 4095]),
    }[place]


PLACES = ("score", "positions", "key", "row", "row and key", "diagonal")
CASES = [
    (kind, place, dtype)
    for kind in ("score_mod", "mask_mod")
    for place in PLACES
    for dtype in DTYPES
    if place != "score" or (kind == "score_mod" and dtype == "float32")
]
# Every place, every dtype: a third of the cases.
OFTEN = CASES[::3]


def mod(kind, place, dtype, ops=tuple(OPS)):
    """The score_mod or mask_mod of a place that computes every operation its dtype has."""
    pair, chosen = _pair(place, dtype), [OPS[name] for name in ops if takes(OPS[name], dtype)]

    def score_mod(score, b, h, q_idx, kv_idx):
        x, y = pair(score, q_idx, kv_idx)
        return reduce(lambda total, op: total + applied(op, x, y).float(), chosen, score)

    def mask_mod(b, h, q_idx, kv_idx):
        x, y = pair(None, q_idx, kv_idx)
        return reduce(lambda kept, op: kept ^ (applied(op, x, y) > 0), chosen, q_idx >= kv_idx)

    return score_mod if kind == "score_mod" else mask_mod


def everywhere(kind, name):
    """The score_mod or mask_mod that computes one operation in every place and of every dtype."""
    cases = [case[1:] for case in CASES if case[0] == kind]
    mods = [mod(kind, *case, (name,)) for case in cases]

    def score_mod(score, b, h, q_idx, kv_idx):
        return reduce(lambda total, each: each(total, b, h, q_idx, kv_idx), mods, score)

    def mask_mod(b, h, q_idx, kv_idx):
        return reduce(lambda kept, each: kept ^ each(b, h, q_idx, kv_idx), mods, q_idx > kv_idx)

    return score_mod if kind == "score_mod" else mask_mod
