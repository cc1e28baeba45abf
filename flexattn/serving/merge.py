"""merge_states(): two attentions of the same queries over different keys, as one."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.device import detect
from flexattn.errors import InputError
from flexattn.kernels.paged_decode.merges import merge_rows, render_merge_states
from flexattn.problem import DTYPES
from flexattn.runtime.build import Launcher, builder
from flexattn.runtime.launch import launches
from flexattn.serving.checks import gradients
from flexattn.serving.launching import launch_here
from flexattn.settings import current

# Bytes: the kernel reads and writes as many at once.
_ALIGNED = 16
# What a launch passes, by the names that the kernel has for it.
_GIVEN = ("A", "LSE_A", "B", "LSE_B", "OUT", "LSE")


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the keys of two calls, from the output and log-sum-exp of each.

    out_a, out_b [..., D] in one dtype; lse_a, lse_b [...] float32, natural log, -inf where a row
    saw no key: what stands in its output is not read then. Associative and commutative, so states
    of any number of calls, devices or shared prefixes merge in any order. out, lse: where to
    write, contiguous; new tensors otherwise. Count an attention sink in one of the states alone.

    Returns (out, lse). Raises InputError for tensors that do not match, and UnsupportedError where
    a gradient is asked for of what a kernel merges.
    Method: the rescaling of online softmax (Milakov and Gimelshein, arXiv 1805.02867).
    """
    _check(out_a, lse_a, out_b, lse_b)
    if out_a.device.type == "cpu" and not current().interpret:
        merged, total = _plain(out_a, lse_a, out_b, lse_b)
        return (
            merged if out is None else out.copy_(merged),
            total if lse is None else lse.copy_(total),
        )
    gradients({"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b})
    a, b, la, lb = (_as_read(x) for x in (out_a, out_b, lse_a, lse_b))
    out = torch.empty_like(a) if out is None else out
    lse = torch.empty_like(la) if lse is None else lse
    if not (out.shape == a.shape and lse.shape == la.shape and out.dtype == a.dtype):
        raise InputError(
            f"out {list(out.shape)}, lse {list(lse.shape)}", "they are as out_a, lse_a"
        )
    if not (out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32):
        raise InputError("out or lse with gaps", "they are contiguous, and lse is float32")
    if out.device != a.device or lse.device != a.device or out.data_ptr() % _ALIGNED:
        raise InputError(
            f"out on {out.device} at {out.data_ptr():#x}, lse on {lse.device}",
            f"both are on {a.device}, and out's address is a multiple of {_ALIGNED} bytes",
        )
    if a.numel():
        launcher = _launcher(DTYPES[a.dtype], a.shape[-1], la.numel(), a.device)
        given = (a, la, b, lb, out, lse)  # in the order of _GIVEN
        launch_here(launcher, a.get_device(), given)
    return out, lse


def _as_read(x: Tensor) -> Tensor:
    """A tensor as the kernel reads it: dense, aligned, and no view that negates its memory."""
    x = x.resolve_neg().contiguous()
    return x.clone() if x.data_ptr() % _ALIGNED else x


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    if out_a.shape != out_b.shape or out_a.dtype != out_b.dtype or out_a.dtype not in DTYPES:
        raise InputError(
            f"outputs {out_a.dtype} {list(out_a.shape)} and {out_b.dtype} {list(out_b.shape)}",
            f"they have one shape, and one dtype of {', '.join(map(str, DTYPES))}",
        )
    for name, each in (("lse_a", lse_a), ("lse_b", lse_b)):
        if each.shape != out_a.shape[:-1] or each.dtype != torch.float32:
            raise InputError(
                f"{name} is {each.dtype} {list(each.shape)}",
                f"it is float32 {list(out_a.shape[:-1])}",
            )
    if len({x.device for x in (out_a, lse_a, out_b, lse_b)}) > 1:
        raise InputError("states on several devices", "both states are on one device")


def _plain(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The same in torch, for the CPU."""
    total = torch.logaddexp(lse_a, lse_b)
    safe = torch.where(total == -torch.inf, 0.0, total)
    merged = torch.zeros_like(out_a, dtype=torch.float32)
    for values, part in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.exp(part - safe)[..., None]
        merged += torch.where(weight > 0, values.float() * weight, 0.0)
    return merged.to(out_a.dtype), total


def _launcher(dtype: str, head_dim: int, rows: int, device: torch.device) -> Launcher:
    key = "merge", dtype, head_dim, rows, device
    found: Launcher | None = launches.get(key)
    if found is None:
        target = detect(device)
        index = device.index if device.type == "cuda" else -1
        kernel = builder().kernel(render_merge_states(dtype, head_dim, target), target, index)
        programs = -(-rows // merge_rows(head_dim))
        found = kernel.prepare(programs, {"num_rows": rows}, _GIVEN)
        launches.put(key, found)
    return found
