"""Gluon's functions by one name each, whatever Triton's release calls them (3.6 to 3.9)."""

from __future__ import annotations

import atexit
from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon import language
from triton.experimental.gluon.language import _core, _semantic
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Release 3.9 keeps the old names, as functions that raise.
_RENAMED = hasattr(tma, "async_load")
load = tma.async_load if _RENAMED else tma.async_copy_global_to_shared
copy_async = async_copy.async_load if _RENAMED else async_copy.async_copy_global_to_shared
arrive_copied = async_copy.mbarrier_arrive
store = tma.async_store if _RENAMED else tma.async_copy_shared_to_global
barrier = language.barrier if hasattr(language, "barrier") else language.thread_barrier
_PLACE = language.shared_memory_descriptor
reinterpret = _PLACE.reinterpret if hasattr(_PLACE, "reinterpret") else _PLACE._reinterpret


@_core.builtin  # type: ignore[untyped-decorator]
def _reduce_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    # Release 3.6 has the operation, and no function for it.
    at = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, at, src.handle)


atomic_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _reduce_add


@atexit.register
def _forget_builder() -> None:
    """Let go of the compiler's builder, which an exiting process would report as leaked.

    Release 3.9 keeps Gluon's classes of layouts in C++ and never gives them back. Through them
    live the annotations of GluonSemantic, the builder's type in those, and all its functions:
    nanobind writes pages about them. Nothing reads the annotations.
    """
    semantic = _semantic.GluonSemantic
    for annotated in (semantic, semantic.__init__):
        annotated.__annotations__.pop("builder", None)
    vars(_semantic).pop("GluonOpBuilder", None)
