"""The CUDA driver's calls made here: its version, load a kernel, launch it, describe a tensor.

Triton's own driver module is compiled by a C compiler on first use; these need nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from flexattn.errors import DriverError

# CUtensorMapDataType by Triton's signature type.
# The copy engine's names of types; eight bits are bytes to it.
_ELEMENTS = {"fp8e4nv": 0, "fp8e5": 0, "fp16": 6, "fp32": 7, "bf16": 9}
INVALID_CONTEXT = 201
_L2_PROMOTION_128B = 2
_PROGRAMMATIC_STREAM_SERIALIZATION, _EDGES_SINCE = 6, 12030
_MAX_THREADS, _MAX_DYNAMIC_SHARED = 0, 8
_PREFER_SHARED = 1
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_TOO_MANY_THREADS = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
# What a block may use without asking.
_STATIC_SHARED = 48 * 1024


def load_function(code: bytes, name: str, shared: int, threads: int, index: int) -> int:
    """Load a cubin onto a GPU; returns its CUfunction.

    shared, threads: bytes of dynamic shared memory and threads of a block that a launch will ask
    for. Raises DriverError with the driver's own word for what is wrong.
    """
    with _on(index):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(module), code)
        _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        if shared > _STATIC_SHARED:
            _call("cuFuncSetCacheConfig", function, _PREFER_SHARED)
            _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared)
        # A driver that loads lazily does it now, not inside the capture of a CUDA graph.
        most = ctypes.c_int()
        _call("cuFuncGetAttribute", ctypes.byref(most), _MAX_THREADS, function)
        if most.value < threads:  # its registers leave room for fewer: a launch would fail
            raise DriverError(f"{name} for {threads} threads of {most.value}", _TOO_MANY_THREADS)
    assert function.value is not None
    return function.value


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, of whose values of up to 64 bytes this is a number."""

    _fields_ = [
        ("id", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 7),
    ]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


def pdl_attribute() -> LaunchAttribute | None:
    """Programmatic dependent launch: a kernel may begin while the one before it in its stream
    runs, for whose end it waits itself. None before CUDA 12.3, whose graphs hold no such edge.
    """
    if version() < _EDGES_SINCE:
        return None
    return LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 1)


def launch_kernel() -> Any:
    """cuLaunchKernelEx, which takes `pointer`s: a LaunchConfig, function, parameters, extra.

    Four arguments, where cuLaunchKernel takes eleven, that are converted before the call: with
    argtypes each would be converted in each launch, for 0.05 to 0.1 us.
    """
    return _cuda().cuLaunchKernelEx


def address_argument(address: int | None) -> Any:
    """An address as an argument of `launch_kernel`; it keeps nothing alive."""
    return ctypes.c_void_p.from_param(address)


def make_current(index: int) -> None:
    """Give this thread the context that torch uses on a GPU, where it has none yet."""
    _call("cuCtxSetCurrent", _primary(index))


def encode_descriptor(
    at: int,
    element: str,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block: tuple[int, ...],
    swizzle: int,
) -> int:
    """Write a CUtensorMap at an address; returns the driver's status.

    shape, strides (in elements, the last is 1) and block: outermost first.
    """
    status: int = _cuda().cuTensorMapEncodeTiled(
        at, _ELEMENTS[element], len(shape), address, *_arrays(element, shape, strides, block),
        0, swizzle, _L2_PROMOTION_128B, 0,
    )  # fmt: skip
    return status


@lru_cache(maxsize=1024)
def _arrays(
    element: str, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
) -> tuple[Any, ...]:
    """Sizes, strides in bytes, box and steps, innermost first; an output needs them every call."""
    rank, itemsize = len(shape), {"fp8e4nv": 1, "fp8e5": 1, "fp32": 4}.get(element, 2)
    return (
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * (rank - 1))(*(each * itemsize for each in strides[-2::-1])),
        (ctypes.c_uint32 * rank)(*reversed(block)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
    )


def version() -> int:
    """The CUDA version that the driver speaks, 1000 major + 10 minor; 0 without a driver.

    It asks the library alone: no context is made, and no GPU needs to be there.
    """
    found = ctypes.c_int()
    try:
        status = _cuda().cuDriverGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        return 0
    return 0 if status else found.value


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Lets this thread allocate and wait on another stream while one is captured."""
    mode = ctypes.c_int(_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


@contextmanager
def _on(index: int) -> Iterator[None]:
    _call("cuCtxPushCurrent_v2", _primary(index))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@lru_cache(maxsize=64)
def _primary(index: int) -> ctypes.c_void_p:
    """The context of a GPU that the CUDA runtime, and so torch, works in."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_cuda(), name)(*arguments)
    if status:
        raise DriverError(name, _word(status))


def _word(status: int) -> str:
    text = ctypes.c_char_p()
    _cuda().cuGetErrorName(status, ctypes.byref(text))
    return (text.value or b"CUDA error %d" % status).decode()


@lru_cache(maxsize=1)
def _cuda() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    encode = getattr(library, "cuTensorMapEncodeTiled", None)  # CUDA 11's has none
    if encode is not None:
        number, pointer = ctypes.c_uint, ctypes.c_void_p
        encode.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    return library
