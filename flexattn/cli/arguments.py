"""How a command line names one problem: a mod, and the numbers of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flexattn.cli.mods import resolve
from flexattn.cli.offline import check_sizes, problem_of
from flexattn.cli.selection import kind_of
from flexattn.problem import Problem, Shape

LENGTH = 4096

ModName = Annotated[
    str, typer.Argument(metavar="MOD", help="A name of the catalogue, or package.module:function.")
]
ModArguments = Annotated[
    list[str] | None, typer.Option("--arg", help="An argument of a factory; repeatable.")
]
Role = Annotated[str | None, typer.Option("--as", help="score or mask, where arity cannot tell.")]
KindName = Annotated[str, typer.Option("--kind", help="prefill or decode.")]
HeadDim = Annotated[int, typer.Option(help="Head dimension of query and key.")]
HeadDimV = Annotated[
    int | None, typer.Option(help="Head dimension of value; the same by default.")
]
Dtype = Annotated[str, typer.Option(help="float16, bfloat16 or float32.")]
DeviceName = Annotated[str, typer.Option("--device", help="A name that `flexattn devices` lists.")]
QueryHeads = Annotated[int, typer.Option("--Hq", help="Query heads.")]
KeyHeads = Annotated[int, typer.Option("--Hkv", help="Key heads.")]
BlockSize = Annotated[int, typer.Option(help="Block size of a mask's BlockMask.")]
Batch = Annotated[int, typer.Option("--B", help="Batch; decode's splits depend on it.")]
QueryLength = Annotated[
    int | None, typer.Option(help=f"Query length; by default 1 for decode, else {LENGTH}.")
]
WorkloadFiles = Annotated[
    list[Path] | None, typer.Option("--workload", help="A workload file's problems; repeatable.")
]
Presets = Annotated[
    list[str] | None, typer.Option("--preset", help="A shipped workload, or all; repeatable.")
]
Only = Annotated[str | None, typer.Option(help="A regular expression that titles match.")]
DeviceHere = Annotated[
    str | None,
    typer.Option("--device", help="A device's name; the one that is here by default."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def named_problem(
    mod: str,
    arguments: Sequence[str] | None,
    role: str | None,
    kind: str,
    dtype: str,
    heads: tuple[int, int],
    head_dims: tuple[int, int | None],
    block_size: int,
    sizes: tuple[int, int | None, int] = (1, None, LENGTH),
) -> Problem:
    """The problem of the call that these arguments name, with its mask's blocks.

    heads: of queries and keys. head_dims: of keys and values. sizes: batch, query length (None:
    1 for decode, else 4096) and key length. Raises InputError that says what exists.
    """
    which = kind_of(kind)
    B, q_len, kv_len = sizes
    D, Dv = head_dims
    if q_len is None:
        q_len = 1 if which == "decode" else LENGTH
    shape = Shape(B, *heads, q_len, kv_len, D, D if Dv is None else Dv)
    check_sizes(dtype, shape, block_size)
    mods = resolve(mod, arguments or (), role, shape, dtype)
    return problem_of(which, dtype, shape, mods.score_mod, mods.mask_mod, block_size)
