"""What tensors of a run must be: shapes, dtypes, strides and devices, held to the plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flexattn.errors import InputError, InputTypeError, UnsupportedError
from flexattn.kernels.paged_decode.config import ServingForm
from flexattn.mods import Bound
from flexattn.serving.cache import Cache
from flexattn.serving.request import Maxima


def requests(m: Maxima, seq_lens: Tensor, cu_seqlens: Tensor | None, prefix: bool) -> int:
    """How many requests a run has; raises InputError for lengths that are not as they must be."""
    numbers("seq_lens", seq_lens, 1)
    found = seq_lens.shape[0]
    if prefix:
        if found != 1:
            raise InputError(
                f"prefix length of shape {list(seq_lens.shape)}", "it has one element"
            )
        return m.batch
    if found > m.batch:
        raise InputError(f"seq_lens of {found} requests", f"the plan serves {m.batch} at most")
    if (cu_seqlens is None) != (m.total_q == 0):
        raise InputError(
            f"cu_seqlens_q is {'missing' if cu_seqlens is None else 'given'}",
            "a plan with total_q is given cu_seqlens_q, one with q_len is not",
        )
    if cu_seqlens is not None:
        numbers("cu_seqlens_q", cu_seqlens, 1)
        if cu_seqlens.shape[0] != found + 1:
            raise InputError(
                f"cu_seqlens_q has {cu_seqlens.shape[0]} elements, seq_lens {found}",
                "it has one more than there are requests",
            )
    return found


def rows(m: Maxima, q: Tensor, requests: int, form: ServingForm) -> tuple[int, tuple[int, int]]:
    """Query positions of each request, and the steps between rows and heads of q."""
    shape = f"query {list(q.shape)} {q.dtype}"
    if q.dtype != m.dtype:
        raise InputError(shape, f"the plan is for {m.dtype}", "make a plan for this dtype")
    heads = (m.Hq, m.head_dim_qk)
    if m.total_q:
        if q.dim() != 3 or q.shape[1:] != heads or q.shape[0] > m.total_q:
            raise InputError(shape, f"it is [at most {m.total_q}, {m.Hq}, {m.head_dim_qk}]")
        q_len, step = 1, q.stride(0)
    else:
        if q.dim() != 4 or q.shape[2:] != heads or not 1 <= q.shape[1] <= m.q_len:
            flat = q.dim() == 3 and q.shape[1:] == heads  # as FlashInfer and vLLM have a token
            raise InputError(
                shape,
                f"it is [B, at most {m.q_len}, {m.Hq}, {m.head_dim_qk}]",
                "pass query[:, None]" if flat else "",
            )
        if q.shape[0] > m.batch or (q.shape[0] != requests and not form.prefix):
            raise InputError(
                f"{shape} for {requests} requests",
                f"it has a row for each request, at most {m.batch}",
            )
        q_len, step = q.shape[1], q.stride(0) if q.shape[1] == 1 else q.stride(1)
        if q.shape[0] > 1 and q.stride(0) != q_len * step:
            raise InputError(
                f"query with strides {q.stride()}",
                "its rows are evenly spaced over requests and positions",
                "pass query.contiguous()",
            )
    wide = 16 // q.element_size()
    misplaced = q.data_ptr() % 16 or step % wide or q.stride(-2) % wide
    far = max(q.stride()) >= 2**31 or (m.Hq - 1) * q.stride(-2) >= 2**32
    if q.stride(-1) != 1 or (form.aligned and misplaced) or far:
        raise InputError(
            f"query at {q.data_ptr():#x} with strides {q.stride()}",
            "the head dimension has stride 1, other strides are multiples of 16 bytes and below "
            "2**31 elements, and all heads of a row lie within 2**32",
            "pass query.contiguous()",
        )
    return q_len, (step, q.stride(-2))


def keys(m: Maxima, table: Tensor | None, cache: Cache, requests: int) -> int:
    """How many keys of one request the cache has room for."""
    if (table is None) != (m.page == 0):
        raise InputError(
            f"block_table is {'missing' if table is None else 'given'}",
            "a plan with page_size is given block_table, one for a contiguous cache is not",
        )
    if table is None:
        if cache.pages < requests:
            raise InputError(
                f"a cache of {cache.pages} requests for {requests}", "each request has its keys"
            )
        return cache.keys
    numbers("block_table", table, 2)
    if table.shape[0] < requests:
        raise InputError(
            f"block_table {list(table.shape)} for {requests} requests", "it has a row for each"
        )
    return table.shape[1] * m.page


def extras(
    m: Maxima,
    form: ServingForm,
    given: Mapping[str, Tensor | None],
    device: torch.device,
    batch: int,
) -> None:
    """That what the plan was built to take is given, and nothing else; raises InputError.

    given: by the names that `run` has for it. batch: requests whose rows q has.
    """
    scaled = form.scaled or form.scales != ""
    for name, wanted in (
        ("sinks", form.sinks),
        ("k_scale", scaled),
        ("v_scale", scaled),
        ("kv_start", form.offset),
        ("row_lens", form.prefix),
    ):
        tensor = given[name]
        if (tensor is not None) != wanted:
            raise InputError(
                f"{name} is {'missing' if wanted else 'given'}",
                "a run is given what its plan was built for",
                "say so when the plan is made",
            )
        if tensor is not None:
            devices(device, {name: tensor})
    for name in ("kv_start", "row_lens"):
        if (each := given[name]) is not None:
            numbers(name, each, 1)
            if each.shape[0] < batch:
                raise InputError(
                    f"{name} has {each.shape[0]} elements for {batch} requests",
                    "it has one for each",
                )
    sinks = given["sinks"]
    if sinks is not None and (
        sinks.dtype != torch.float32 or not sinks.is_contiguous() or sinks.numel() != m.Hq
    ):
        raise InputError(
            f"sinks is {sinks.dtype} {list(sinks.shape)}",
            f"it is contiguous float32 of {m.Hq} elements",
        )


def gradients(named: dict[str, Tensor | None]) -> None:
    """That no gradient is asked for; raises UnsupportedError."""
    for name, tensor in named.items() if torch.is_grad_enabled() else ():
        if tensor is not None and tensor.requires_grad:
            raise UnsupportedError(
                f"{name} requires grad",
                "a plan's kernels have no backward",
                f"run it under torch.no_grad(), or give it {name}.detach()",
            )


def devices(device: torch.device, named: dict[str, Tensor]) -> None:
    """That tensors are on the plan's device, as they lie in memory; raises InputError."""
    for name, tensor in named.items():
        if tensor.device != device:
            raise InputError(f"{name} is on {tensor.device}", f"the plan is on {device}")
        if tensor.numel() and not tensor.data_ptr():
            raise InputError(
                f"{name} is a {type(tensor).__name__}, which has no memory of its own",
                "kernels read memory as it is",
                f"pass the tensor that it wraps, as {name}.to_local() of a DTensor",
            )
        if tensor.is_neg():
            raise InputError(
                f"{name} is a view that negates its memory",
                "kernels read memory as it is",
                f"pass {name}.resolve_neg()",
            )


def numbers(name: str, tensor: Tensor, rank: int) -> None:
    """That a tensor holds int32 numbers without gaps; raises InputError."""
    spaced = tensor.dim() == rank and tensor.shape[-1] > 1 and tensor.stride(-1) != 1
    if tensor.dtype != torch.int32 or tensor.dim() != rank or spaced:
        raise InputError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}",
            f"it is int32 of {rank} dimension{'s' * (rank > 1)}, the last one contiguous",
            f"keep it as {name}.int()" if tensor.dtype == torch.int64 else "",
        )


def check_captured(bound: Bound | None, device: torch.device) -> None:
    """That runs can read what a mod captures where it lies; raises InputError."""
    for tensor in () if bound is None else bound.tensors:
        if tensor.device != device or tensor.is_neg():
            raise InputError(
                f"a mod captures a tensor of shape {list(tensor.shape)} on {tensor.device}"
                + (", a view that negates its memory" if tensor.is_neg() else ""),
                f"a plan's runs read what mods capture as it lies on {device}",
                f"capture tensor.to('{device}').resolve_neg()",
            )


def output_fits(got: object, wanted: Tensor) -> bool:
    """Whether a run can write to a tensor in place of the plan's own output."""
    if not isinstance(got, Tensor):
        return False
    same = got.shape == wanted.shape and got.dtype == wanted.dtype and got.device == wanted.device
    return same and got.is_contiguous() and got.data_ptr() % 16 == 0


def output_misfit(name: str, got: object, wanted: Tensor) -> InputError:
    """The error of an output that does not fit."""
    if not isinstance(got, Tensor):
        return InputTypeError(f"{name} is a {type(got).__name__}", "it is a torch.Tensor")
    return InputError(
        f"{name} is {got.dtype} {list(got.shape)} at {got.data_ptr():#x} on {got.device}",
        f"it is {wanted.dtype} {list(wanted.shape)} on {wanted.device}, contiguous and aligned",
    )
