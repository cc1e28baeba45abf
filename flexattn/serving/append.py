"""AppendPlan: one kernel that stores new keys and values in a paged cache, compiled ahead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.device import detect, usable
from flexattn.errors import InputError, UnsupportedError
from flexattn.kernels.cache_append.source import append_programs, render_append
from flexattn.problem.serving import LAYOUTS
from flexattn.runtime.build import Launcher, builder
from flexattn.serving.append_checks import (
    RUN_NAMES,
    Rope,
    admitted,
    append_problem,
    inspect_append,
)
from flexattn.serving.cache import KVCache, Scaled, halves
from flexattn.serving.checks import pair, refuse_types, whole
from flexattn.serving.launching import facts, kept_plans, launch_here, making
from flexattn.serving.verified import check_append
from flexattn.settings import current
from flexattn.util.ambient import without_modes

# Launches that a plan remembers, one for each set of shapes and strides that it was given.
_REMEMBERED = 256
# What a plan has for shapes that it does not know; of no tokens it has None.
_UNKNOWN: Any = object()


class AppendPlan:
    """Stores new keys and values in a paged cache: rotated, divided by scales, and rounded.

    heads: of K and V. head_dim: D, or (D, Dv). dtype: of what is stored, float16, bfloat16 or
    float32; kv_dtype: the cache's, dtype where None, or float8_e4m3fn or float8_e5m2. layout:
    "NHD" or "HND". page_size: keys of a page; a contiguous cache [B, keys, Hkv, D] is one whose
    pages have `keys` of them. shared_kv: there is no V (MLA). slots: dtype of `slot_mapping`,
    int64 or int32; None where `run` is given a block_table and seq_lens, and with ragged
    cu_seqlens_q. rope: how keys are rotated before they are stored; None: they are already.
    scaled: what the cache has scales of, as DecodePlan's. Those of a tensor, head or page are
    given; a page's before its first key is stored, since keys that are stored keep theirs. Those
    of a token, or of each head of it, are computed and stored: the largest number that is finite
    over 448 (57344 in e5m2), at least 2^-100.

    Numbers are rotated and multiplied by the inverse of their scale in float32, then rounded to
    nearest, ties to even; to 8 bits what is too large becomes the largest number, and NaN stays
    NaN. It compiles when it is built, its runs launch and do nothing else, so they may be captured
    in a CUDA graph. Raises InputError, ConfigError, UnsupportedError and BuildError.
    """

    @without_modes()
    def __init__(
        self,
        *,
        heads: int,
        head_dim: int | tuple[int, int],
        page_size: int,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        layout: str = "NHD",
        scaled: Scaled = False,
        rope: Rope | None = None,
        slots: torch.dtype | None = torch.int64,
        ragged: bool = False,
        shared_kv: bool = False,
        device: torch.device | str = "cuda",
    ) -> None:
        both = head_dim if isinstance(head_dim, (tuple, list)) else (head_dim, head_dim)
        D, Dv = pair("head_dim", both, "D, or (D of keys, D of values)")
        self.problem = append_problem(
            heads=whole("heads", heads), head_dim=(D, 0 if shared_kv else Dv),
            page=whole("page_size", page_size), layout=layout, dtype=dtype,
            kv_dtype=kv_dtype or dtype, scaled=scaled, rope=rope, slots=slots, ragged=ragged,
        )  # fmt: skip
        self.form = self.problem.structure
        self.device = usable(device)
        if self.device.type == "cpu" and not current().interpret:
            raise UnsupportedError(
                "an AppendPlan for tensors on the CPU",
                "its kernel runs on a GPU, or in Triton's interpreter",
                "set FLEXATTN_INTERPRET=1 before flexattn is imported",
            )
        target = detect(self.device)
        self._gpu = self.device.index if self.device.type == "cuda" else -1
        source = render_append(self.form, target)
        self._kernel = builder().kernel(source, target, self._gpu)
        self._fixed: dict[str, Any] = {}
        if rope is not None and rope.base is not None:
            self._inv_freq = rope.inv_freq().to(self.device)
            on_gpu = self.device.type == "cuda"
            self._fixed["INV_FREQ"] = self._inv_freq.data_ptr() if on_gpu else self._inv_freq
        self._ready: dict[Any, Launcher | None] = {}
        check_append(self, source, target, rope)
        self._ready.clear()

    def run(
        self,
        k: Tensor,
        v: Tensor | None,
        kv_cache: KVCache,
        *,
        slot_mapping: Tensor | None = None,
        positions: Tensor | None = None,
        block_table: Tensor | None = None,
        seq_lens: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> None:
        """Store k and v [tokens, Hkv, D] on the current stream, on tensors of the plan's device.

        kv_cache: (K, V) as DecodePlan's, or one tensor; with shared_kv, K alone. slot_mapping
        [tokens]: page x page_size + place in the page; a token with a negative slot, or one beyond
        the cache, is left out. Or block_table int32 [B, pages of a request] and seq_lens int32
        [B]: keys of each request with these tokens, which are its last ones; as many tokens of
        each, or as cu_seqlens_q int32 [B + 1] cuts them. What the table has no page for is left
        out. positions [tokens], of slot_mapping's dtype: of a plan with rope and slots. k_scale,
        v_scale: as DecodePlan's, read, or written where a token has them. cos, sin [positions,
        dim / 2] of a rope without a base, halves of one table or two of their own.

        Two tokens of one slot leave it undefined which is stored. Raises InputError for tensors
        that do not fit the plan; see FLEXATTN_CHECK for their contents.
        """
        given: dict[str, Tensor | None] = {
            "K": k, "V": v, "K_CACHE": None, "V_CACHE": None, "SLOTS": slot_mapping,
            "POSITIONS": positions, "TABLE": block_table, "SEQ_LENS": seq_lens,
            "CU_SEQLENS": cu_seqlens_q, "K_SCALE": k_scale, "V_SCALE": v_scale, "COS": cos,
            "SIN": sin,
        }  # fmt: skip
        try:
            if isinstance(kv_cache, tuple):
                given["K_CACHE"], values = kv_cache
                given["V_CACHE"] = values if self.form.head_dim_v else None
            elif self.form.head_dim_v:
                given["K_CACHE"], given["V_CACHE"] = halves(kv_cache)
            else:
                given["K_CACHE"] = kv_cache
            key = tuple([None if each is None else facts(each) for each in given.values()])
        except (AttributeError, TypeError, ValueError):
            refuse_types(kv_cache, (), **{RUN_NAMES[name]: each for name, each in given.items()})
            raise
        launcher = self._ready.get(key, _UNKNOWN)
        if launcher is _UNKNOWN:
            numbers, launcher = admitted(self.problem, given, self.device), None
            programs = append_programs(self.form, k.shape[0])
            if programs:
                names = tuple(given)
                launcher = self._kernel.prepare(
                    programs, {**self._fixed, **numbers}, names, spare=names
                )
            if len(self._ready) >= _REMEMBERED:
                self._ready.clear()
            self._ready[key] = launcher
        if current().check:
            inspect_append(self.problem, given)
        if launcher is None:
            return
        launch_here(launcher, self._gpu, tuple(given.values()))


def append_paged_kv_cache(
    k: Tensor,
    v: Tensor | None,
    kv_cache: KVCache,
    *,
    slot_mapping: Tensor | None = None,
    positions: Tensor | None = None,
    block_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scaled: Scaled = True,
    rope: Rope | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    layout: str = "NHD",
) -> None:
    """Store new keys and values [tokens, Hkv, D] in a paged cache, by a plan made on first use.

    The arguments are those of AppendPlan and of its `run`; scaled says what k_scale and v_scale
    are of. v None: the cache is K alone (MLA). The first call of a kind compiles; hold an
    AppendPlan where nothing may. Raises what these raise.
    """
    first = kv_cache[0] if isinstance(kv_cache, tuple) and kv_cache else kv_cache
    if v is not None and isinstance(first, Tensor) and first is kv_cache:
        first, _ = halves(first)
    tensors = (k, first) if v is None else (k, first, v)
    if slot_mapping is not None:
        tensors = (*tensors, slot_mapping)
    if not all(isinstance(each, Tensor) for each in tensors):
        kinds = ", ".join(type(each).__name__ for each in tensors)
        said = f"k, the cache, v and slot_mapping are {kinds}"
        raise InputError(said, "they are tensors", "pass tensors")
    if k.dim() != 3 or first.dim() != 4 or (v is not None and v.dim() != 3):
        raise InputError(
            f"k {list(k.shape)}, a cache of {list(first.shape)}"
            + ("" if v is None else f", v {list(v.shape)}"),
            "k and v are [tokens, Hkv, D], and a cache has four dimensions",
        )
    if layout not in LAYOUTS:
        raise InputError(f"layout={layout!r}", f"it is one of {', '.join(LAYOUTS)}")
    about: dict[str, Any] = {
        "heads": k.shape[1],
        "head_dim": (k.shape[2], k.shape[2] if v is None else v.shape[-1]),
        "page_size": first.shape[LAYOUTS[layout][0]],
        "dtype": k.dtype,
        "kv_dtype": first.dtype,
        "layout": layout,
        "scaled": False if k_scale is None and scaled is True else scaled,
        "rope": rope,
        "slots": None if slot_mapping is None else slot_mapping.dtype,
        "ragged": cu_seqlens_q is not None,
        "shared_kv": v is None,
        "device": k.device,
    }
    key = ("append", *about.values())
    plan: AppendPlan | None = kept_plans.get(key)
    if plan is None:
        with making:
            plan = AppendPlan(**about)
        kept_plans.put(key, plan)
    plan.run(
        k, v, kv_cache, slot_mapping=slot_mapping, positions=positions, block_table=block_table,
        seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, k_scale=k_scale, v_scale=v_scale, cos=cos,
        sin=sin,
    )  # fmt: skip
