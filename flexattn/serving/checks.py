"""Checks of a plan's arguments and of its runs' tensors; in checked mode of their contents."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import InputError, InputTypeError, UnsupportedError
from flexattn.kernels.paged_decode.config import check_config
from flexattn.mods import Bound
from flexattn.problem.serving import ServingProblem
from flexattn.serving.cache import Cache


def whole(name: str, value: Any) -> int:
    """An integer argument; raises InputTypeError for what is none."""
    try:
        return operator.index(value)
    except TypeError:
        do = f"pass {name} as an int"
        raise InputTypeError(f"{name} is {value!r:.80}", f"{name} is an integer", do) from None


def pair(name: str, value: Any, meaning: str) -> tuple[int, int]:
    """Two integers; raises InputTypeError for what is something else."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        do = f"pass {name} as a tuple"
        raise InputTypeError(f"{name} is {value!r:.80}", f"{name} is {meaning}", do)
    return whole(name, value[0]), whole(name, value[1])


def check_choices(config: object, flags: Mapping[str, object]) -> None:
    """Raises InputError if the choices that a plan is made with are not choices but, say,
    tensors.
    """
    for name, flag in flags.items():
        if not isinstance(flag, (bool, int)):
            raise InputTypeError(
                f"{name} is a {type(flag).__name__}",
                f"{name} says whether the plan's kernels have it: True or False",
                "give the tensors to run()" if isinstance(flag, Tensor) else "",
            )
    if config is not None:
        check_config(config)


def refuse_types(
    kv_cache: object, needed: Collection[str] = ("q", "seq_lens"), **named: object
) -> None:
    """Raise InputTypeError for the first of a run's arguments that is no tensor.

    needed: of the others those that may not be None.
    """
    cache = kv_cache if isinstance(kv_cache, tuple) else (kv_cache,)
    two = not isinstance(kv_cache, tuple) or len(kv_cache) == 2
    if not two or not all(isinstance(each, Tensor) for each in cache):
        kinds = ", ".join(type(each).__name__ for each in cache)
        raise InputTypeError(
            f"kv_cache is a {type(kv_cache).__name__}"
            + (f" of {kinds}" if isinstance(kv_cache, tuple) else ""),
            "it is a tuple (K, V) of tensors, or one tensor",
            "pass (K, V)",
        )
    for name, each in named.items():
        if not isinstance(each, Tensor) and (name in needed or each is not None):
            raise InputTypeError(
                f"{name} is a {type(each).__name__}",
                "it is a torch.Tensor on the plan's device",
                f"make it once with torch.tensor({name}, device=...), and change it in place",
            )


def requests(m: ServingProblem, seq_lens: Tensor, cu_seqlens: Tensor | None) -> int:
    """The number of requests of a run; raises InputError for wrong lengths."""
    numbers("seq_lens", seq_lens, 1)
    found = seq_lens.shape[0]
    if m.structure.prefix:
        if found != 1:
            raise InputError(
                f"prefix length of shape {list(seq_lens.shape)}", "it has one element"
            )
        return m.B
    if found > m.B:
        raise InputError(f"seq_lens of {found} requests", f"the plan serves {m.B} at most")
    if (cu_seqlens is None) != (m.total_q == 0):
        raise InputError(
            f"cu_seqlens_q is {'missing' if cu_seqlens is None else 'given'}",
            "a plan with total_q is given cu_seqlens_q, one with q_len is not",
        )
    if cu_seqlens is not None:
        ends_fit(cu_seqlens, found)
    return found


def ends_fit(cu_seqlens: Tensor, requests: int) -> None:
    """Raises InputError if cu_seqlens_q does not cut rows of so many requests."""
    numbers("cu_seqlens_q", cu_seqlens, 1)
    if cu_seqlens.shape[0] != requests + 1:
        raise InputError(
            f"cu_seqlens_q has {cu_seqlens.shape[0]} elements, seq_lens {requests}",
            "it has one more than there are requests",
        )


def table_fits(table: Tensor, requests: int) -> None:
    """Raises InputError if a block_table has fewer rows than there are requests."""
    numbers("block_table", table, 2)
    if table.shape[0] < requests:
        raise InputError(
            f"block_table {list(table.shape)} for {requests} requests", "it has a row for each"
        )


def rows(m: ServingProblem, q: Tensor, requests: int) -> tuple[int, tuple[int, int]]:
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
        if q.shape[0] > m.B or (q.shape[0] != requests and not m.structure.prefix):
            raise InputError(
                f"{shape} for {requests} requests",
                f"it has a row for each request, at most {m.B}",
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
    if q.stride(-1) != 1 or (m.structure.aligned and misplaced) or far:
        raise InputError(
            f"query at {q.data_ptr():#x} with strides {q.stride()}",
            "the head dimension has stride 1, other strides are multiples of 16 bytes and below "
            "2**31 elements, and all heads of a row lie within 2**32",
            "pass query.contiguous()",
        )
    return q_len, (step, q.stride(-2))


def keys(m: ServingProblem, table: Tensor | None, cache: Cache, requests: int) -> int:
    """The number of keys of one request for which the cache has room; raises InputError."""
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
    table_fits(table, requests)
    return table.shape[1] * m.page


def present(given: Mapping[str, Tensor | None], wanted: Mapping[str, bool]) -> None:
    """Raises InputError if a run lacks an argument of its plan, or is given another one."""
    for name, needed in wanted.items():
        if (given[name] is not None) != needed:
            raise InputError(
                f"{name} is {'missing' if needed else 'given'}",
                "a run is given what its plan was built for",
                "say so when the plan is made",
            )


def extras(
    m: ServingProblem,
    given: Mapping[str, Tensor | None],
    device: torch.device,
    batch: int,
) -> None:
    """Raises InputError if a run lacks an argument of its plan, or is given another one.

    given: by the names that `run` has for it. batch: requests whose rows q has.
    """
    form = m.structure
    scaled = form.scaled or form.scales != ""
    wanted = {
        "sinks": form.sinks != "", "k_scale": scaled, "v_scale": scaled, "kv_start": form.offset,
        "row_lens": form.prefix, "selection": form.unit > 0,
    }  # fmt: skip
    present(given, wanted)
    devices(device, {name: each for name in wanted if (each := given[name]) is not None})
    for name in ("kv_start", "row_lens"):
        if (each := given[name]) is not None:
            numbers(name, each, 1)
            if each.shape[0] < batch:
                raise InputError(
                    f"{name} has {each.shape[0]} elements for {batch} requests",
                    "it has one for each",
                )
    chosen = given["selection"]
    if chosen is not None:
        numbers("selection", chosen, 3)
        if chosen.shape != (batch, m.Hkv, form.chosen) or not chosen.is_contiguous():
            raise InputError(
                f"selection has shape {list(chosen.shape)} and strides {chosen.stride()}",
                f"it is contiguous [{batch}, {m.Hkv}, {form.chosen}], -1 where less is chosen",
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
    """Raises UnsupportedError if an input requires grad."""
    for name, tensor in named.items() if torch.is_grad_enabled() else ():
        if tensor is not None and tensor.requires_grad:
            raise UnsupportedError(
                f"{name} requires grad",
                "a plan's kernels have no backward",
                f"run it under torch.no_grad(), or give it {name}.detach()",
            )


def devices(device: torch.device, named: dict[str, Tensor]) -> None:
    """Raises InputError if a tensor is not on the plan's device, or has no memory to read as it
    lies.
    """
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
    """Raises InputError if a tensor does not hold int32 numbers without gaps."""
    spaced = tensor.dim() == rank and tensor.shape[-1] > 1 and tensor.stride(-1) != 1
    if tensor.dtype != torch.int32 or tensor.dim() != rank or spaced:
        raise InputError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}",
            f"it is int32 of {rank} dimension{'s' * (rank > 1)}, the last one contiguous",
            f"keep it as {name}.int()" if tensor.dtype == torch.int64 else "",
        )


def check_captured(bound: Bound | None, device: torch.device) -> None:
    """Raises InputError if runs cannot read what a mod captures where it lies."""
    for tensor in () if bound is None else bound.tensors:
        if tensor.device != device or tensor.is_neg():
            raise InputError(
                f"a mod captures a tensor of shape {list(tensor.shape)} on {tensor.device}"
                + (", a view that negates its memory" if tensor.is_neg() else ""),
                f"a plan's runs read what mods capture as it lies on {device}",
                f"capture tensor.to('{device}').resolve_neg()",
            )


def output_fits(got: object, wanted: Tensor) -> bool:
    """True if a run can write to a tensor in place of the plan's own output."""
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


def inspect(
    m: ServingProblem,
    keys: int,
    pages: int,
    seq_lens: Tensor,
    block_table: Tensor | None,
    cu_seqlens: Tensor | None,
    kv_start: Tensor | None,
    placed: bool,
    least_q: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Raise InputError for what the kernels would clamp: they never read outside the cache.

    keys: of one request that the table, or the contiguous cache, has room for. placed: mods read
    the positions of rows, of which the last stands at the last key. least_q: of each request, as
    the caller knows it. It waits for the device, so a stream that is being captured is not
    inspected. Returns copies of seq_lens, block_table, cu_seqlens and kv_start as they were looked
    at, in their strides.
    """
    if seq_lens.is_cuda and torch.cuda.is_current_stream_capturing():
        return seq_lens, block_table, cu_seqlens, kv_start
    seq_lens = _copied(seq_lens)
    block_table, cu_seqlens, kv_start = (
        None if each is None else _copied(each) for each in (block_table, cu_seqlens, kv_start)
    )
    lengths = seq_lens.cpu()
    starts = torch.zeros_like(lengths) if kv_start is None else kv_start.cpu()[: len(lengths)]
    own = lengths - starts
    _within("seq_lens", lengths, 0, 2**31 - 1, "lengths are not negative")
    _within("kv_start", starts, 0, 2**31 - 1, "a prefix is not negative")
    _within("seq_lens", own, 0, m.kv_len, f"a request has at most the plan's {m.kv_len} keys")
    if block_table is None:
        _within("seq_lens", own, 0, keys, f"the cache has {keys} keys for a request")
    else:
        width = block_table.shape[1]
        _within("seq_lens", own, 0, keys, f"block_table lists {width} pages of {m.page} keys")
        used = torch.arange(width, device="cpu") < -(-own[:, None] // m.page)
        table = block_table.cpu()[: len(own)]
        pages_exist(table, used, pages)
    if cu_seqlens is not None:
        ends = cu_seqlens.cpu()
        _within("cu_seqlens_q", ends, 0, m.total_q, f"the plan has {m.total_q} rows")
        if bool((ends[1:] < ends[:-1]).any()) or int(ends[0]) != 0:
            raise InputError(f"cu_seqlens_q {ends.tolist()[:9]}", "it starts at 0 and never falls")
        short = [n for n in ends.diff().tolist() if 0 < n < least_q]
        if short:
            rule = f"each request that has any has least_q={least_q} at least"
            raise InputError(f"a request of {short[0]} queries", rule, "pass least_q=0")
    if placed:
        ends = torch.arange(len(lengths) + 1) * m.q_len if cu_seqlens is None else cu_seqlens.cpu()
        rows = ends.diff()[: len(lengths)]
        early = (lengths > 0) & (lengths < rows)
        if bool(early.any()):
            b = int(early.nonzero()[0])
            raise InputError(
                f"request {b} has {int(rows[b])} rows and {int(lengths[b])} keys",
                "the last row stands at the last key, and mods are given no position below 0",
                "give a request no more rows than keys: cu_seqlens_q cuts them",
            )
    return seq_lens, block_table, cu_seqlens, kv_start


def pages_exist(table: Tensor, used: Tensor, pages: int) -> None:
    """Raises InputError if the used entries of a table name pages that the cache does not have."""
    wrong = (((table < 0) | (table >= pages)) & used).nonzero()
    if len(wrong):
        b, place = (int(each) for each in wrong[0])
        raise InputError(
            f"block_table[{b}, {place}] is {int(table[b, place])}",
            f"the cache has pages 0 to {pages - 1}",
        )


def _copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides, also where these leave gaps."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    copy = tensor.as_strided((span,), (1,)).clone()
    return copy.as_strided(tensor.shape, tensor.stride())


def _within(name: str, values: Tensor, low: int, high: int, rule: str) -> None:
    wrong = (values < low) | (values > high)
    if bool(wrong.any()):
        b = int(wrong.nonzero()[0])
        raise InputError(f"{name}[{b}] leads to {int(values[b])}", rule, "make a larger plan")
