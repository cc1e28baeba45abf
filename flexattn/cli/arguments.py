"""How a command line names one problem: a mod, and the numbers of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any

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
KindName = Annotated[str, typer.Option("--kind", help="prefill, decode or backward.")]
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


@dataclass(frozen=True, slots=True)
class Call:
    """The call of a problem but for its keys: an argument or an option each (see `spread`)."""

    mod: ModName
    arg: ModArguments = None
    role: Role = None
    kind: KindName = "prefill"
    head_dim: HeadDim = 128
    head_dim_v: HeadDimV = None
    dtype: Dtype = "bfloat16"
    device: DeviceName = "nvidia-h200"
    hq: QueryHeads = 32
    hkv: KeyHeads = 8
    block_size: BlockSize = 128
    batch: Batch = 1
    q_len: QueryLength = None

    def problem(self, kv_len: int) -> Problem:
        """The problem with so many keys, and its mask's blocks; InputError says what exists."""
        kind = kind_of(self.kind)
        q_len = (1 if kind == "decode" else LENGTH) if self.q_len is None else self.q_len
        v_dim = self.head_dim if self.head_dim_v is None else self.head_dim_v
        shape = Shape(self.batch, self.hq, self.hkv, q_len, kv_len, self.head_dim, v_dim)
        check_sizes(self.dtype, shape, self.block_size)
        mods = resolve(self.mod, self.arg or (), self.role, shape, self.dtype)
        return problem_of(kind, self.dtype, shape, mods.score_mod, mods.mask_mod, self.block_size)


def spread(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb of a `call` as typer reads one: with the fields of a Call in its place."""
    fields = signature(Call, eval_str=True).parameters
    _, *others = signature(verb, eval_str=True).parameters.values()

    @wraps(verb)
    def spread_out(**given: Any) -> None:
        verb(Call(**{name: given.pop(name) for name in fields}), **given)

    spelled = Signature([*fields.values(), *others])
    spread_out.__signature__ = spelled  # type: ignore[attr-defined]
    return spread_out
