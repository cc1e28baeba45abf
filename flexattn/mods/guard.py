"""The two torch modes that are on while a mod runs under make_fx.

One rewrites indexing, which torch would answer by asking a traced position for its value; the
other refuses, at the user's line, what no expression can hold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flexattn.errors import UnsupportedError
from flexattn.mods.asked import READS, WORDS, Asked, asked, read_in_python
from flexattn.mods.host_numbers import given, meets
from flexattn.mods.refusal import Refusal, line_of_frame, unknown
from flexattn.mods.registered import meaning_of

_SHAPE: Any = torch.Tensor.shape
_SIZES: frozenset[Any] = frozenset(
    (torch.Tensor.size, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.__len__)
) | {_SHAPE.__get__}
_BYTES: Any = torch.Tensor.nbytes
_SIZES |= {_BYTES.__get__, torch.numel}
# What stays the same for tensors of one dtype, rank and kind of device.
_KEPT = frozenset(
    (
        *(
            getattr(torch.Tensor, name)
            for name in (
                "dim", "ndimension", "is_floating_point", "is_complex", "is_signed",
                "element_size", "type", "get_device",
            )
        ),
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                "dtype", "device", "ndim", "itemsize", "layout", "is_cuda", "is_cpu", "is_meta",
                "is_xpu", "is_mps", "is_sparse", "is_quantized", "is_nested",
            )
        ),
        *(
            getattr(torch, name)
            for name in ("is_floating_point", "is_complex", "is_signed", "result_type")
        ),
    )
)  # fmt: skip
_GRAD: Any = torch.Tensor.grad
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad


def op_name(op: Any) -> str:
    """The key of an operator in the tables: aten's and prims' short name, else the full one."""
    if op.namespace in ("aten", "prims"):
        return str(op.overloadpacket.__name__)
    return str(op)


class Indexing(TorchFunctionMode):
    """Indexes by 0-d tensors without reading them, and notes what the code asks about tensors.

    `asked`: attributes of captured tensors for whose present values alone the trace holds.
    `volatile`: the trace depends on something that cannot be remembered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()
        self.volatile = False

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
            raise _writes(args[0], "x[...] = ...")
        if func in WORDS or func in READS:
            return asked(func, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in _SIZES:
            self.asked |= {"shape"} if args[0].dim() > 0 else set()
        elif func == _REQUIRES_GRAD.__get__:
            self.asked.add("requires_grad")
        elif func == _GRAD.__get__ or (func not in _KEPT and _tells(args, result)):
            self.volatile = True
        return result


class Guard(TorchDispatchMode):
    """Lets pass what `known` holds; leaves the user's line on every node of the graph.

    A registered operator is replaced by what it is known to compute.
    """

    def __init__(self, known: Container[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known

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
        self._check(func, args)
        proxies = get_proxy_mode()
        nodes: Any = proxies.tracer.graph.nodes if proxies else ()
        before = len(nodes)
        result = func(*args, **(kwargs or {}))
        if len(nodes) > before:
            line = line_of_frame(sys._getframe(1))
            for node, _ in zip(reversed(nodes), range(len(nodes) - before), strict=False):
                node.meta["user_line"] = line
        return result

    def _check(self, func: Any, args: tuple[Any, ...]) -> None:
        name = op_name(func)
        if func.namespace == "prim":  # a question about metadata, such as x.device
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
        elif func._schema.is_mutable and not (
            name == "squeeze_" and isinstance(args[0], FakeTensor)
        ):
            raise _writes(args[0], name)
        elif name not in self.known:
            raise unknown(func)


def _tells(args: tuple[Any, ...], result: Any) -> bool:
    """Whether Python learns something of a tensor, rather than gets one."""
    found = result if isinstance(result, (tuple, list)) else (result,)
    given = any(isinstance(each, torch.Tensor) for each in args)
    return given and not any(isinstance(each, torch.Tensor) for each in found)


def _writes(x: object, how: str) -> Refusal:
    if isinstance(x, FakeTensor):
        return Refusal(
            f"writes in place ({how})",
            "a mod may not change its inputs or captured tensors",
            "build a new value: score = score + x, not score += x",
        )
    return Refusal(
        f"writes to a captured tensor ({how})",
        "a mod is run for all positions at once, in no order, and only reads what it captures",
        "write to it between calls, outside of the mod: the next call reads what it holds then",
    )


def _getitem(x: torch.Tensor, position: Any) -> torch.Tensor:
    items = list(position) if isinstance(position, tuple) else [position]
    if not any(isinstance(item, torch.Tensor) and item.dim() == 0 for item in items):
        return x[position]
    rest: list[Any] = []
    dim = 0
    for place, item in enumerate(items):
        if isinstance(item, torch.Tensor) and item.dim() == 0 and item.dtype != torch.bool:
            at = item if item.dtype in (torch.int32, torch.int64) else item.long()
            x = torch.ops.aten.index.Tensor(x, [*[None] * dim, at])
            continue
        rest.append(item)
        if item is Ellipsis:
            dim = x.dim() - sum(_consumed(after) for after in items[place + 1 :])
        else:
            dim += _consumed(item)
    return x[tuple(rest)] if rest else x


def _consumed(item: Any) -> int:
    """How many dimensions of a tensor one entry of an index takes up."""
    if item is None or isinstance(item, bool):
        return 0
    if isinstance(item, torch.Tensor) and item.dtype == torch.bool:
        return item.dim()
    return 1
