"""The problem of the call that a command line names."""

from __future__ import annotations

from flexattn.cli.arguments import LENGTH, CallOptions
from flexattn.cli.mods import resolve
from flexattn.cli.offline import check_sizes, problem_of
from flexattn.cli.selection import dtype_named, kind_of
from flexattn.problem import Problem, Shape


def problem_called(call: CallOptions, kv_len: int) -> Problem:
    """The problem with so many keys, and its mask's blocks; InputError says what exists."""
    kind, dtype = kind_of(call.kind), dtype_named(call.dtype)
    q_len = (1 if kind == "decode" else LENGTH) if call.q_len is None else call.q_len
    v_dim = call.head_dim if call.head_dim_v is None else call.head_dim_v
    shape = Shape(call.batch, call.hq, call.hkv, q_len, kv_len, call.head_dim, v_dim)
    check_sizes(dtype, shape, call.block_size)
    mods = resolve(call.mod, call.arg or (), call.role, shape, dtype)
    return problem_of(kind, dtype, shape, mods.score_mod, mods.mask_mod, call.block_size)
