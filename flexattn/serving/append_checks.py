"""The problem that an AppendPlan is made for, and the checks of its runs' tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from flexattn.errors import InputError
from flexattn.kernels.cache_append.source import EIGHT_BITS, search_steps
from flexattn.problem import DTYPES, MAX_HEADS
from flexattn.problem.checks import MAX_HEAD_DIM
from flexattn.problem.serving import (
    KV_DTYPES,
    LAYOUTS,
    AppendForm,
    AppendProblem,
    CacheScales,
    RopeForm,
    Slots,
)
from flexattn.serving.cache import Scaled, asked_scales, cache_shape, steps_by_axis
from flexattn.serving.checks import (
    devices,
    ends_fit,
    gradients,
    numbers,
    pages_exist,
    present,
    table_fits,
)


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first `dim` columns of a key; the others stay.

    interleaved: pairs are neighbours (GPT-J); else column i and i + dim / 2 (NeoX, Llama). base:
    the angle of pair i is position x base^(-2 i / dim), in float32 as models compute it. None:
    runs are given tables cos and sin [positions, dim / 2] of dtype `table`, for any angles.

    Method: Su et al., RoFormer, arXiv 2104.09864.
    """

    dim: int
    interleaved: bool = False
    base: float | None = None
    table: torch.dtype = torch.float32

    def form(self, head_dim: int) -> RopeForm:
        """The part of it that decides a kernel; raises InputError for what no head of this width
        has.
        """
        if self.dim < 2 or self.dim % 2 or self.dim > head_dim:
            raise InputError(
                f"rope of {self.dim} columns, heads of {head_dim}",
                "an even number of columns is rotated, at most all of a head",
            )
        if self.base is not None and not self.base > 0:
            raise InputError(f"rope of base {self.base}", "a base is above 0")
        if self.table not in DTYPES:
            raise InputError(
                f"tables of {self.table}", f"cos and sin are of {', '.join(map(str, DTYPES))}"
            )
        return RopeForm(
            self.dim, bool(self.interleaved), "" if self.base is not None else DTYPES[self.table]
        )

    def inv_freq(self) -> Tensor:
        """Angles of position 1, float32 [dim / 2], as transformers computes them."""
        assert self.base is not None
        steps = torch.arange(0, self.dim, 2, dtype=torch.float32, device="cpu") / self.dim
        return 1.0 / (self.base**steps)


_SLOTS: dict[torch.dtype, Slots] = {torch.int64: "int64", torch.int32: "int32"}
# Arguments of `run` by the names that the kernel has for them.
RUN_NAMES = {
    "K": "k", "V": "v", "K_CACHE": "K of the cache", "V_CACHE": "V of the cache",
    "SLOTS": "slot_mapping", "POSITIONS": "positions", "TABLE": "block_table",
    "SEQ_LENS": "seq_lens", "CU_SEQLENS": "cu_seqlens_q", "K_SCALE": "k_scale",
    "V_SCALE": "v_scale", "COS": "cos", "SIN": "sin",
}  # fmt: skip


def append_problem(
    *,
    heads: int,
    head_dim: tuple[int, int],
    page: int,
    layout: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    scaled: Scaled,
    rope: Rope | None,
    slots: torch.dtype | None,
    ragged: bool,
) -> AppendProblem:
    """A plan's problem, by AppendPlan's names; raises InputError for what no kernel stores.

    head_dim: of keys, and of values, 0 where there are none.
    """
    asked = {
        "heads": heads, "head_dim": head_dim, "page_size": page, "layout": layout, "dtype": dtype,
        "kv_dtype": kv_dtype, "scaled": scaled, "slots": slots, "ragged": ragged,
    }  # fmt: skip
    said = asked_scales(scaled, page)
    scales: CacheScales = "tensor" if said.scaled else said.scales
    eight = KV_DTYPES.get(kv_dtype, "") in EIGHT_BITS
    D, Dv = head_dim
    rules = (
        (1 <= heads <= MAX_HEADS, f"heads are between 1 and {MAX_HEADS}"),
        (1 <= D <= MAX_HEAD_DIM, f"head_dim is between 1 and {MAX_HEAD_DIM}"),
        (0 <= Dv <= MAX_HEAD_DIM, f"head_dim is between 1 and {MAX_HEAD_DIM}"),
        (1 <= page < 2**31, "a page has at least one key"),
        (layout in LAYOUTS, f"layout is one of {', '.join(LAYOUTS)}"),
        (dtype in DTYPES, f"dtype is one of {', '.join(map(str, DTYPES))}"),
        (kv_dtype in KV_DTYPES, f"kv_dtype is one of {', '.join(map(str, KV_DTYPES))}"),
        (eight or not scales, "scales are of a cache of 8 bits"),
        (
            slots is None or slots in _SLOTS,
            "slots are int64 or int32, None with a block_table",
        ),
        (slots is None or not ragged, "ragged tells of a block_table's rows: slots is None"),
        (rope is None or isinstance(rope, Rope), "rope is a flexattn.serving.Rope"),
    )
    for kept, rule in rules:
        if not kept:
            told = ", ".join(f"{name}={value!r}" for name, value in asked.items())
            raise InputError(f"AppendPlan({told})", rule)
    sizes = [dim * each.itemsize for dim in head_dim for each in (dtype, kv_dtype)]
    by_table: Slots = "ragged table" if ragged else "table"
    form = AppendForm(
        dtype=DTYPES[dtype],
        kv_dtype=KV_DTYPES[kv_dtype],
        head_dim_qk=D,
        head_dim_v=Dv,
        heads=heads,
        page=page,
        slots=by_table if slots is None else _SLOTS[slots],
        scales=scales,
        rope=None if rope is None else rope.form(D),
        aligned=all(size % 16 == 0 for size in sizes),
    )
    return AppendProblem(form, layout)


def admitted(
    m: AppendProblem, given: Mapping[str, Tensor | None], device: torch.device
) -> dict[str, Any]:
    """Check a run's tensors; the numbers that its launch takes. Raises InputError."""
    form = m.structure
    present({RUN_NAMES[name]: each for name, each in given.items()}, _wanted(form))
    there = {RUN_NAMES[name]: each for name, each in given.items() if each is not None}
    devices(device, there)
    gradients({RUN_NAMES[name]: given[name] for name in ("K", "V", "K_CACHE", "V_CACHE")})
    tensors = [("K", form.head_dim_qk)] + [("V", form.head_dim_v)] * (form.head_dim_v > 0)
    keys_at, heads_at = LAYOUTS[m.cache_layout]
    for name in ("K", "K_CACHE"):
        if not (each := cast(Tensor, given[name])).dim():
            raise InputError(f"{RUN_NAMES[name]} is {list(each.shape)}", "it has tokens, or pages")
    tokens, pages = cast(Tensor, given["K"]).shape[0], cast(Tensor, given["K_CACHE"]).shape[0]
    found = {"num_tokens": tokens, "num_pages": pages}
    for name, dim in tensors:
        new, cache = cast(Tensor, given[name]), cast(Tensor, given[f"{name}_CACHE"])
        sizes = [*cache_shape(m.cache_layout, pages, form.page, form.heads), dim]
        _shaped(RUN_NAMES[name], new, [tokens, form.heads, dim], m.dtype, form.aligned)
        _shaped(RUN_NAMES[f"{name}_CACHE"], cache, sizes, m.kv_dtype, form.aligned)
        axes = {"t": new.stride(0), "h": new.stride(1), "cp": cache.stride(0)}
        axes |= {"cn": cache.stride(keys_at), "ch": cache.stride(heads_at)}
        found |= {f"stride_{name.lower()}{axis}": step for axis, step in axes.items()}
    if pages < 1 or tokens * form.heads >= 2**31 or pages >= 2**31:
        raise InputError(
            f"{tokens} tokens of {form.heads} heads, {pages} pages",
            "a cache has a page, and rows and pages are counted in 32 bits",
        )
    found |= _places(m, given, tokens)
    found |= _scales(m, given, pages)
    if form.rope is not None and form.rope.table:
        cos, sin = cast(Tensor, given["COS"]), cast(Tensor, given["SIN"])
        for name, each in (("cos", cos), ("sin", sin)):
            right = each.dim() == 2 and each.shape[1] == form.rope.dim // 2 and each.shape[0] > 0
            if not right or DTYPES.get(each.dtype) != form.rope.table or each.stride(1) != 1:
                raise InputError(
                    f"{name} is {each.dtype} {list(each.shape)} with strides {each.stride()}",
                    f"it is {form.rope.table} [positions, {form.rope.dim // 2}], contiguous in "
                    "the last dimension",
                )
        if cos.shape != sin.shape or cos.stride() != sin.stride():
            raise InputError("cos and sin differ in shape or strides", "they are two alike")
        found |= {"stride_cos": cos.stride(0), "num_positions": cos.shape[0]}
    return found


def inspect_append(m: AppendProblem, given: Mapping[str, Tensor | None]) -> None:
    """Checked mode: raise InputError for slots and pages that the kernel leaves out.

    What is left out on purpose is no fault: negative slots, and tokens before a request's first
    key. It waits for the device, so a stream that is being captured is not inspected.
    """
    page = m.structure.page
    k, cache, slots = given["K"], given["K_CACHE"], given["SLOTS"]
    assert k is not None and cache is not None
    if k.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if slots is None:
        _inspect_pages(page, given, k.shape[0], cache.shape[0])
        return
    found, count = slots.cpu(), cache.shape[0] * page
    wrong = (found >= count).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise InputError(
            f"slot_mapping[{place}] is {int(found[place])}",
            f"the cache has slots 0 to {count - 1}",
        )
    cos, positions = given["COS"], given["POSITIONS"]
    if cos is not None and positions is not None and bool((found >= 0).any()):
        low, high = (int(each) for each in positions.cpu()[found >= 0].aminmax())
        if low < 0 or high >= cos.shape[0]:
            raise InputError(
                f"positions from {low} to {high}", f"cos and sin have {cos.shape[0]} rows"
            )


def _inspect_pages(page: int, given: Mapping[str, Tensor | None], tokens: int, pages: int) -> None:
    """Raises InputError if a request's last keys, which are stored, have no pages."""
    lengths, table = (cast(Tensor, given[name]).cpu() for name in ("SEQ_LENS", "TABLE"))
    count = len(lengths)
    room = table.shape[1] * page
    long = (lengths > room).nonzero()
    if len(long):
        b = int(long[0])
        raise InputError(
            f"seq_lens[{b}] is {int(lengths[b])}", f"block_table has room for {room} keys"
        )
    ends = given["CU_SEQLENS"]
    if ends is None:
        new = torch.full_like(lengths, tokens // max(1, count))
    else:
        new = ends.cpu().clamp(0, tokens).diff()
    cos, longest = given["COS"], int(lengths[new > 0].amax()) if bool((new > 0).any()) else 0
    if cos is not None and longest > cos.shape[0]:
        raise InputError(f"a request of {longest} keys", f"cos and sin have {cos.shape[0]} rows")
    first = (lengths - new).clamp(min=0)
    place = torch.arange(table.shape[1], device="cpu")
    used = (place >= (first // page)[:, None]) & (place * page < lengths[:, None])
    used &= (new > 0)[:, None]
    pages_exist(table[:count], used, pages)


def _wanted(form: AppendForm) -> dict[str, bool]:
    """The arguments of `run` by name, each True if a plan was built to take it."""
    tables = form.rope is not None and form.rope.table != ""
    values = form.head_dim_v > 0
    wanted = {
        "K": True, "V": values, "K_CACHE": True, "V_CACHE": values, "SLOTS": not form.by_table,
        "POSITIONS": form.rope is not None and not form.by_table, "TABLE": form.by_table,
        "SEQ_LENS": form.by_table, "CU_SEQLENS": form.slots == "ragged table",
        "K_SCALE": form.scales != "", "V_SCALE": form.scales != "" and values, "COS": tables,
        "SIN": tables,
    }  # fmt: skip
    return {RUN_NAMES[name]: each for name, each in wanted.items()}


def _shaped(
    name: str, tensor: Tensor, shape: list[int], dtype: torch.dtype, aligned: bool
) -> None:
    if tensor.dtype != dtype or list(tensor.shape) != shape:
        raise InputError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}", f"it is {dtype} {shape}"
        )
    wide = 16 // tensor.element_size()
    misplaced = tensor.data_ptr() % 16 or any(step % wide for step in tensor.stride()[:-1])
    if (tensor.stride(-1) != 1 and shape[-1] > 1) or (aligned and misplaced):
        raise InputError(
            f"{name} at {tensor.data_ptr():#x} with strides {tensor.stride()}",
            "the last dimension has stride 1, and other strides are multiples of 16 bytes",
            "pass a contiguous tensor, or slices of whole heads",
        )


def _places(m: AppendProblem, given: Mapping[str, Tensor | None], tokens: int) -> dict[str, Any]:
    """The arguments that say where tokens go; raises InputError for wrong ones."""
    form = m.structure
    if not form.by_table:
        for name in ("SLOTS", "POSITIONS"):
            each = given[name]
            if each is not None and (
                each.dtype != m.slots or each.shape != (tokens,) or not each.is_contiguous()
            ):
                raise InputError(
                    f"{RUN_NAMES[name]} is {each.dtype} {list(each.shape)}",
                    f"it is contiguous {m.slots} [{tokens}]",
                )
        return {}
    table, lengths = cast(Tensor, given["TABLE"]), cast(Tensor, given["SEQ_LENS"])
    numbers("seq_lens", lengths, 1)
    requests = lengths.shape[0]
    table_fits(table, requests)
    if tokens and not requests:
        raise InputError(f"{tokens} tokens of 0 requests", "each token is a request's")
    found = {"stride_table": table.stride(0), "table_width": table.shape[1]}
    found["num_requests"] = requests
    if form.slots == "ragged table":
        ends_fit(cast(Tensor, given["CU_SEQLENS"]), requests)
        return found | {"steps": search_steps(requests)}
    if requests and tokens % requests:
        raise InputError(
            f"{tokens} tokens of {requests} requests",
            "without cu_seqlens_q each request has as many",
        )
    return found | {"q_len": max(1, tokens // max(1, requests))}


def _scales(m: AppendProblem, given: Mapping[str, Tensor | None], pages: int) -> dict[str, Any]:
    """The steps between scales."""
    named = {
        RUN_NAMES[name]: each
        for name in ("K_SCALE", "V_SCALE")
        if (each := given[name]) is not None
    }
    if not named:
        return {}
    form = m.structure
    found = steps_by_axis(named, form.scales, m.cache_layout, (pages, form.page, form.heads))
    return {f"stride_s{axis}": step for axis, step in found.items()}
