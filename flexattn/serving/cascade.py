"""merge_states(): two attentions as one; CascadePlan: a prefix that requests share, read once."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexattn.device import detect
from flexattn.errors import BuildError, InputError
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.kernels.paged_decode.merges import (
    join_programs,
    merge_rows,
    render_join,
    render_merge_states,
)
from flexattn.problem import DTYPES
from flexattn.runtime.build import Launcher, builder
from flexattn.runtime.launch import launches
from flexattn.serving.cache import KVCache
from flexattn.serving.checks import gradients
from flexattn.serving.launching import Beside, launch_here
from flexattn.serving.plan import DecodePlan
from flexattn.serving.verified import check_cascade
from flexattn.settings import current, log
from flexattn.util.ambient import without_modes

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


# Launchers that a cascade remembers, one for each number of rows and of keys that may be read.
_REMEMBERED = 256
# What a run passes, by the names that the kernel has for it.
_JOINED = ("A", "LSE_A", "B", "LSE_B", "OUT", "LSE", "SEQ_LENS", "V_SCALE")


class Join:
    """The kernel that follows a run of `prefix`, a plan whose config says combine="launch".

    It reads the parts of the prefix where that run left them, so that no kernel merges them
    before, and adds them up in float32. It compiles when it is built.
    """

    def __init__(self, prefix: DecodePlan) -> None:
        assert prefix.form.prefix and prefix.config.combine == "launch"
        self._prefix = prefix
        kernels = prefix._kernels
        self.source = render_join(prefix.form, prefix.config, kernels.target)
        self._kernel = builder().kernel(self.source, kernels.target, kernels.gpu)
        self._launchers: dict[tuple[int, ...], Launcher] = {}

    def __call__(
        self,
        before: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        prefix_len: Tensor,
        v_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Launch on the current stream, behind the prefix's last run; returns (out, lse).

        before: what that run returned, of which units that one program walked whole are there.
        """
        rows = lse.numel() // lse.shape[-1]
        if rows == 0:
            return out, lse
        key = (rows, self._prefix.max_keys, 0 if v_scale is None else min(v_scale.numel() - 1, 1))
        launcher = self._launchers.get(key)
        if launcher is None:
            if len(self._launchers) >= _REMEMBERED:
                self._launchers.clear()
            launcher = self._launchers[key] = self._prepared(*key)
        given = (*before, *own, out, lse, prefix_len, v_scale)  # in the order of _JOINED
        launch_here(launcher, self._kernel.index, given)
        return out, lse

    def _prepared(self, q_rows: int, max_keys: int, stride_scale: int) -> Launcher:
        """A launcher that holds what shapes decide."""
        prefix = self._prefix
        fixed = {
            "WORKSPACE": prefix._owned["WORKSPACE"],
            "q_rows": q_rows,
            "max_keys": max_keys,
        }
        spare = () if prefix.form.scaled else ("V_SCALE",)
        if prefix.form.scaled:
            fixed["stride_scale"] = stride_scale
        programs = join_programs(prefix.form, prefix.config, q_rows)
        return self._kernel.prepare(programs, fixed, _JOINED, spare=spare)


class CascadePlan:
    """Decoding of requests whose first keys are one shared prefix in a paged or contiguous cache.

    batch, q_len: as DecodePlan's; prefix_len, own_len: the most keys of the prefix, and of one
    request behind it. The other arguments are DecodePlan's; with sinks, they count once. A
    mask_mod is evaluated over the prefix, which no window skips. It compiles and allocates when it
    is built; its runs do neither. On a GPU the two passes run side by side: the second in a stream
    of the plan's own, which begins and ends with the caller's, also where that is captured. The
    last launch merges the prefix's parts and both states at once.

    Method: the rows of all requests form one tall tile over the prefix, and the two states merge
    (Ye et al., Cascade Inference, flashinfer.ai 2024).
    """

    @without_modes()
    def __init__(
        self,
        *,
        batch: int,
        prefix_len: int,
        own_len: int,
        q_len: int = 1,
        sinks: bool = False,
        prefix_config: ServingConfig | None = None,
        config: ServingConfig | None = None,
        **shared: Any,
    ) -> None:
        for name in ("lse", "total_q", "prefix", "offset", "kv_len"):
            if name in shared:
                raise InputError(f"CascadePlan({name}=...)", "it follows from the other arguments")
        common = {"batch": batch, "q_len": q_len, "lse": True, **shared}
        self.prefix = DecodePlan(kv_len=prefix_len, prefix=True, config=prefix_config, **common)
        self.own = DecodePlan(kv_len=own_len, offset=True, sinks=sinks, config=config, **common)
        assert self.own._lse is not None
        self._out = torch.empty_like(self.own._out)
        self._lse = torch.empty_like(self.own._lse)
        self._beside = Beside(self.own.device) if self.own.device.type == "cuda" else None
        # Who finishes last of a unit has merged its parts already.
        self._join = self._joined(prefix_config, {"kv_len": prefix_len, **common})
        if self._join is None:
            # Compiled here, so that no run does.
            merge_states(self._out, self._lse, self._out, self._lse, out=self._out, lse=self._lse)
        check_cascade(self, None if self._join is None else self._join.source)

    def _joined(self, asked: ServingConfig | None, arguments: dict[str, Any]) -> Join | None:
        """The kernel that merges the prefix's parts and both states; None where `merge_states`
        does.

        Where it does not build, the prefix's own kernel merges its parts, unless the caller's
        config says otherwise.
        """
        if self.prefix.config.combine != "launch":
            return None
        try:
            return Join(self.prefix)
        except BuildError as error:
            if asked is not None or current().strict:
                raise
            log.warning(
                "the last launch of a cascade does not build, merge_states serves: %s", error.got
            )
        config = replace(self.prefix.config, combine="last")
        self.prefix = DecodePlan(prefix=True, config=config, **arguments)
        return None

    def run(
        self,
        q: Tensor,
        kv_cache: KVCache,
        *,
        prefix_len: Tensor,
        seq_lens: Tensor,
        prefix_table: Tensor | None = None,
        block_table: Tensor | None = None,
        prefix_cache: KVCache | None = None,
        kv_start: Tensor,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        prefix_scales: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Launch on the current stream: the prefix, each request's own keys, and the merge.

        q [B, q_len, Hq, D]. prefix_len int32 [1]: keys of the prefix. kv_start int32 [B]: the same
        for each request, the position of its first own key. seq_lens int32 [B]: keys of each
        request, the prefix included. prefix_table int32 [1, pages] lists the prefix's pages, and
        block_table int32 [B, pages] those of each request's own keys. prefix_cache: where the
        prefix lies, kv_cache otherwise; [1, keys, Hkv, D] where the cache is contiguous.
        prefix_scales: its k_scale and v_scale where they are others: with a prefix_cache whose
        pages or tokens have scales of their own.

        Returns (out, lse), as DecodePlan.run, in memory that the next run overwrites.
        """
        scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
        first = scales if prefix_scales is None else dict(zip(scales, prefix_scales, strict=True))
        if self.own.form.scales and (prefix_cache is None) != (prefix_scales is None):
            raise InputError(
                f"prefix_scales is {'missing' if prefix_scales is None else 'given'}",
                f"a prefix_cache brings scales of its own where scaled={self.own.form.scales!r}",
                "give prefix_cache and prefix_scales together, or neither",
            )
        if self._beside is not None:
            self._beside.begin()
        before = self.prefix.run(
            q, kv_cache if prefix_cache is None else prefix_cache, seq_lens=prefix_len,
            block_table=prefix_table, row_lens=seq_lens, **first,
        )  # fmt: skip
        with self._beside or nullcontext():
            own = self.own.run(
                q, kv_cache, seq_lens=seq_lens, block_table=block_table, kv_start=kv_start,
                sinks=sinks, **scales,
            )  # fmt: skip
        rows = own[0].shape[0] * own[0].shape[1]
        out = self._out[:rows].view(own[0].shape)
        lse = self._lse[:rows].view(own[1].shape)
        if self._join is None:
            return merge_states(*before, *own, out=out, lse=lse)
        assert isinstance(before, tuple) and isinstance(own, tuple)
        return self._join(before, own, out, lse, prefix_len, first["v_scale"])
