"""The two torch modes that are on while a mod runs under make_fx.

One rewrites indexing, which torch would answer by asking a traced position for its value; the
other refuses, at the user's line, what no expression can hold.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from flexattn.errors import UnsupportedError
from flexattn.mods.expr import MAX_NODES
from flexattn.mods.host_numbers import given, meets
from flexattn.mods.operators import (
    mark,
    meaning_of,
    nodes_of,
    of_prim,
    op_name,
    views,
    writes,
    written,
)
from flexattn.mods.ops import DETACH, OWN_GRADIENT
from flexattn.mods.refusal import (
    READS,
    WORDS,
    Asked,
    Refusal,
    asked,
    line_of_frame,
    part_written,
    read_in_python,
    too_long,
    unknown,
)

_TENSOR: Any = torch.Tensor
_SIZES = {
    torch.numel, _TENSOR.size, _TENSOR.numel, _TENSOR.nelement, _TENSOR.__len__,
    _TENSOR.shape.__get__, _TENSOR.nbytes.__get__,
}  # fmt: skip
_METHODS = "dim ndimension is_floating_point is_complex is_signed element_size type get_device"
_PROPERTIES = (
    "dtype device ndim itemsize layout is_cuda is_cpu is_meta is_xpu is_mps is_sparse "
    "is_quantized is_nested"
)
# What stays the same for tensors of one dtype, rank and kind of device.
_KEPT = {
    *(getattr(_TENSOR, name) for name in _METHODS.split()),
    *(getattr(_TENSOR, name).__get__ for name in _PROPERTIES.split()),
    *(torch.is_floating_point, torch.is_complex, torch.is_signed, torch.result_type),
}


class FunctionMode(TorchFunctionMode):
    """Indexes by 0-d tensors without reading them, and notes what the code asks about tensors.

    `sized`: the trace holds for the present sizes of captured tensors alone.
    `volatile`: what the trace depends on that cannot be remembered. `hooked`: the code gives
    a tensor a hook, which may change its gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hooked = False
        self.sized = False
        self.volatile = ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if meets(args, kwargs or {}):
            args, kwargs = given(func, args, kwargs or {})
        if func is torch.Tensor.__getitem__:
            return _getitem(*args)
        if func is torch.Tensor.__setitem__:
            try:
                args[0].zero_()  # which tells whose it is
            except Write as refusal:
                raise Write("x[...] = ...", refusal.captured) from None
            raise part_written("x[...] = ...")
        if func is torch.Tensor.register_hook:
            self.hooked = True
            return RemovableHandle(OrderedDict())
        if func in WORDS or func in READS:
            return asked(func, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in _SIZES:
            self.sized |= args[0].dim() > 0
        elif func == _TENSOR.grad.__get__ or (not _kept(func) and _tells(args, result)):
            self.volatile = f"it asks {getattr(func, '__name__', func)} of a tensor"
        return result


class DispatchMode(TorchDispatchMode):
    """Lets pass what is `known`; leaves the user's line on every node of the graph.

    A registered operator is replaced by what it is known to compute. A write passes where a mod
    made the tensor itself: `arguments` are others', and so is what is no fake tensor beside fake
    ones. running: the operator that failed. known: None where tensors have values. stops: whether
    nodes that autograd does not follow are marked, which a mod without grad mode has not.
    """

    def __init__(
        self,
        known: Callable[[Any], bool] | None,
        arguments: Iterable[torch.Tensor],
        *,
        stops: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.stops = stops
        self.arguments = list(arguments)
        self.views: list[torch.Tensor] = []  # of captured tensors
        self.running: Any = None
        self.calls = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        meaning = meaning_of(func)
        if meaning is not None:
            with self:
                return meaning(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        self.running = func
        self._check(func, args, kwargs)
        before = len(nodes_of())
        result = func(*args, **kwargs)
        if len(nodes_of()) > before:
            marks: dict[str, Any] = {"user_line": line_of_frame(sys._getframe(1))}
            if self.stops and not torch.is_grad_enabled():
                marks["stop"] = OWN_GRADIENT if _applied(sys._getframe(1)) else DETACH
            mark(before, marks)
        if views(func) and not all(isinstance(x, FakeTensor) for x in _tensors(args)):
            self.views += _tensors(result)
        self.running = None
        return result

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        name = op_name(func)
        self.calls += 1
        if self.calls > MAX_NODES:  # here, for a loop may have no end
            raise too_long(f"more than {MAX_NODES:,}")
        if of_prim(func):
            return
        if name == "_local_scalar_dense":
            if not isinstance(args[0], FakeTensor):
                raise read_in_python("item")
            if getattr(args[0], "constant", None) is None:
                raise Asked()
        elif torch.Tag.nondeterministic_seeded in func.tags:
            raise Refusal(
                f"draws random numbers ({name})",
                "a mod gives the same score for the same position each time",
                "draw them outside of the mod and capture the tensor",
                raises=UnsupportedError,
            )
        elif func._schema.is_mutable:
            for each in written(func, args, kwargs):
                captured = _shares(each, self.views)
                if self.known is not None and not isinstance(each, FakeTensor):
                    captured = True
                if captured or (writes(func) and _shares(each, self.arguments)):
                    raise Write(name, captured)
        elif self.known is not None and not self.known(func):
            raise unknown(func)


class Write(Refusal):
    """A mod writes to what is not its own."""

    def __init__(self, how: str, captured: bool) -> None:
        self.captured = captured
        if captured:
            super().__init__(
                f"writes to a captured tensor ({how})",
                "a mod is run for all positions at once, in no order, and only reads what it "
                "captures",
                "write to it between calls, outside of the mod: the next call reads what it holds "
                "then",
            )
        else:
            super().__init__(
                f"writes to one of its arguments in place ({how})",
                "a mod may write to tensors that it made, and not to its arguments or views of "
                "them: x.float() of a float32 x is x itself",
                "build a new value: score = score + x, not score += x; or write to score.clone()",
            )


def _shares(x: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """True if a tensor lies in the memory of another."""
    alias: Callable[..., bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
    return any(alias(x, each) for each in others)


def _applied(frame: FrameType | None) -> bool:
    """True if the mod's code is inside of an autograd Function, whose forward has no grad mode.

    The frames end where the mod was called: its caller may be inside of another Function.
    """
    while frame is not None and frame.f_globals.get("__name__") != "flexattn.mods.trace":
        if frame.f_code is torch.autograd.Function.apply.__code__:
            return True
        frame = frame.f_back
    return False


def _kept(func: Any) -> bool:
    """True if the answer stays the same for tensors of one dtype, rank and kind of device."""
    return func in _KEPT or of_prim(func)


def _tells(args: tuple[Any, ...], result: Any) -> bool:
    """True if Python learns something of a tensor, rather than gets one."""
    found = result if isinstance(result, (tuple, list)) else (result,)
    given = any(isinstance(each, torch.Tensor) for each in args)
    return given and not any(isinstance(each, torch.Tensor) for each in found)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def _getitem(x: torch.Tensor, position: Any) -> torch.Tensor:
    """x[position], where torch would ask a 0-d index for its value."""
    items = list(position) if isinstance(position, tuple) else [position]
    if not any(map(_is_place, items)):
        return x[position]
    at: list[torch.Tensor | None] = []
    for item, dims in zip(items, _dims(x, items), strict=True):
        at += [_whole(item)] if _is_place(item) else [None] * dims
    x = torch.ops.aten.index.Tensor(x, at)
    rest = tuple(item for item in items if not _is_place(item))
    return x[rest] if rest else x


def _is_place(item: Any) -> bool:
    """True if an entry of an index is a 0-d tensor of integers."""
    return isinstance(item, torch.Tensor) and item.dim() == 0 and item.dtype != torch.bool


def _whole(index: torch.Tensor) -> torch.Tensor:
    return index if index.dtype in (torch.int32, torch.int64) else index.long()


def _dims(x: torch.Tensor, items: Sequence[Any]) -> list[int]:
    """The number of dimensions of a tensor that each entry of an index takes up."""
    taken = [int(item is not None and not isinstance(item, bool)) for item in items]
    for place, item in enumerate(items):
        if isinstance(item, torch.Tensor) and item.dtype == torch.bool:
            taken[place] = item.dim()
    return [
        x.dim() - sum(taken) + 1 if item is Ellipsis else dims
        for item, dims in zip(items, taken, strict=True)
    ]
