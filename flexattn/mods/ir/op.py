"""Op: all that the tracer, the printers, the analyses and the backward know of one operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch

from flexattn.mods.ir.intervals import Interval

# Of (gradient of the result, *operands): values that have torch's operators and methods.
Gradient = Callable[..., Any]
EVERYWHERE = float("-inf")


@dataclass(frozen=True, slots=True)
class Op:
    """A pointwise operation: one row of flexattn.mods.ops.OPS.

    Operands share the result's dtype, but for a predicate's, and the condition of `where`.

    triton: its text, a format of the operands and of `tl`, the language's module. integers, gluon:
    the text for integers and bools, and in Gluon, where it is another.
    gradients: for each operand, its gradient by torch's conventions, or why there is none.
    called, kwargs: the function in torch that defines it, by default of its name, and its options.
    traced: aten's names that become it as they stand, by default `called` alone.
    result: its dtype. "same": the operands'. "float": integers become floats before. "rounded":
    integers stay what they are. "compared": bool. "classified": bool, and no integer has it.
    on_bool: the operation that torch computes on bools instead.
    commutes: swapping the operands changes no bit. mirrored: what gives the same on swapped ones.
    slow: it takes a kernel many instructions; of "float" nothing need be said.
    interval: which integers it can be; where there is one, the host computes it as a kernel does.
    rises: among floats it never falls in any operand where the first is above this number.
    symbol: Python's infix operator.
    """

    name: str
    triton: str
    gradients: tuple[Gradient | str, ...]
    _: KW_ONLY
    called: str = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    traced: tuple[str, ...] = ()
    result: Literal["same", "float", "rounded", "compared", "classified"] = "same"
    on_bool: str = ""
    commutes: bool = False
    mirrored: str = ""
    slow: bool = False
    interval: Interval | None = None
    rises: float | None = None
    symbol: str = ""
    integers: str = ""
    gluon: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "called", self.called or self.name)
        object.__setattr__(self, "traced", self.traced or (self.called,))

    @property
    def arity(self) -> int:
        """The number of operands."""
        return len(self.gradients)

    @property
    def predicate(self) -> bool:
        """Whether the result is bool whatever the operands are."""
        return self.result in ("compared", "classified")

    @property
    def function(self) -> Callable[..., torch.Tensor]:
        """torch's function, which takes `kwargs` beside the operands."""
        found: Callable[..., torch.Tensor] = getattr(torch, self.called)
        return found
