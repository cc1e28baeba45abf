"""Problem: the one key, built by the same code when tuning and when dispatching."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from flexattn.mods import Bound, Mod
from flexattn.mods.analysis.intervals import reaches_end
from flexattn.mods.rules import ALL, Terms, split

Kind = Literal["prefill", "decode", "backward", "serving"]
Tanh = Literal["auto", "fast", "exact"]
Fp32Products = Literal["ieee", "tf32x3", "bf16x6"]
Fp8Weights = Literal["exact", "e4m3"]

DTYPES: dict[torch.dtype, str] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}
# Eight bits for q, k and v: what comes out is bfloat16.
FP8: dict[torch.dtype, str] = {torch.float8_e4m3fn: "float8_e4m3fn"}
# K and V may be narrower than q, in a dtype of which q's holds every number: what is converted
# is not rounded.
NARROWER: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float16: tuple(FP8),
    torch.bfloat16: tuple(FP8),
    torch.float32: (torch.float16, torch.bfloat16, *FP8),
}
# Lengths up to 2**26 keep index arithmetic such as `31 * q_idx - kv_idx` in 32 bits.
MAX_LENGTH = 2**26
MAX_HEADS = 2**16
# What indices can be: tiles overshoot a length by less than 2**12 lanes.
INDEX_RANGES = {
    "b": (0, MAX_LENGTH), "h": (0, MAX_HEADS),
    "q_idx": (0, MAX_LENGTH + 2**12), "kv_idx": (0, MAX_LENGTH + 2**12),
}  # fmt: skip
# Buckets of kv_len for which a decode's config is chosen: (up to so many keys, a bucket's width);
# then the width of all longer ones. Each is within a power of two, by which records are filed.
KV_BUCKETS, LONG_KV_BUCKET = ((16, 1), (512, 16), (2048, 64)), 128
# The most bytes of a tensor whose offsets 32 bits with a sign hold.
NEAR_BYTES = 2**31 - 1
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}


# Words of a key for products of float32 that are not FMA.
PRODUCT_WORDS = {"tf32x3": "tf32", "bf16x6": "bf16x6"}


def rounded(size: int) -> int:
    """A length or a batch as records and plans see it: up to the next power of two; 0 stays 0.

    Tuning and dispatch both call this and nothing else. It is monotone and idempotent.
    """
    return 0 if size <= 0 else 1 << (size - 1).bit_length()


def longest_of_bucket(kv_len: int) -> int:
    """The most keys of the decodes that get the same config as one of so many."""
    width = next((w for most, w in KV_BUCKETS if kv_len <= most), LONG_KV_BUCKET)
    return kv_len + -kv_len % width


def out_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of what attention of inputs of a dtype gives."""
    return torch.bfloat16 if dtype in FP8 else dtype


@dataclass(frozen=True, slots=True)
class Sparsity:
    """The facts of a BlockMask for a kernel's code: block sizes, and whether it lists full blocks.

    per_head: the lists differ between the query heads of one KV head. runs: the blocks of each
    row join up, and so do its full ones, so that their ends say where they are.
    """

    q_block: int
    kv_block: int
    has_full: bool
    per_head: bool
    runs: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of q, k and v in memory, as far as the code depends on it.

    *_contiguous: the head dimension has stride 1. aligned: base addresses and all other
    strides are multiples of 16 bytes, so loads can be 16 bytes wide and TMA can read them.
    near: each of them, and of outputs and gradients, spans less than 2 GiB.
    """

    q_contiguous: bool
    k_contiguous: bool
    v_contiguous: bool
    aligned: bool
    near: bool = True


DENSE = Layout(True, True, True, True)


@dataclass(frozen=True, slots=True)
class Captures:
    """A traced mod with what its code depends on: which captured tensors have inner stride 1."""

    mod: Mod
    contiguous: tuple[bool, ...]


def captures_of(bound: Bound | None) -> Captures | None:
    """The part of a mod that a kernel's code depends on; None where the mod changes nothing."""
    if bound is None or _keeps_everything(bound):
        return None
    return all_captures(bound)


def all_captures(bound: Bound) -> Captures:
    """As `captures_of`, whatever the mod changes."""
    return Captures(bound.mod, tuple(t.stride()[-1:] == (1,) for t in bound.tensors))


def _keeps_everything(bound: Bound) -> bool:
    """torch's noop_mask, an identity score_mod, and all that simplifies to them."""
    expr = bound.mod.expr
    if bound.mod.kind == "mask":
        return expr.op == "const" and bool(expr.value)
    return expr.op == "var" and expr.value == "score"


@dataclass(frozen=True, slots=True)
class Structure:
    """Everything that decides a kernel's source, and nothing that does not: no length, no batch.

    group: query heads per KV head. lse, max_scores: which statistics are written.
    positive_scale: the softmax scale is above 0.
    sinks: the dtype of the heads' sink logits, "" without them.
    rules_off: rules of flexattn.mods.rules that the caller switched off, sorted.
    tanh: the hardware's instruction where the output's dtype allows it, always, or never.
    kv_dtype: of k and v where they are narrower than q, "" where they have its dtype.
    grads: of a backward, the slots of what score_mod captures that get a gradient.
    dropout: weights are dropped, by a seed; how many is an argument. batch_invariant: a row's bits
    depend on its own query and keys alone. fp32_products: how tiles of float32 are multiplied: by
    FMA, by three products of tf32, or by six of bfloat16. fp8_weights: of e4m3 inputs, whether the
    weights are rounded to bfloat16 as the output is, or to e4m3. ragged_kv: packed sequences, of
    which cu_seqlens on the device cut rows and keys.
    """

    kind: Kind
    dtype: str
    head_dim_qk: int
    head_dim_v: int
    group: int
    score: Captures | None = None
    mask: Captures | None = None
    sparsity: Sparsity | None = None
    layout: Layout = DENSE
    lse: bool = False
    max_scores: bool = False
    positive_scale: bool = True
    sinks: str = ""
    rules_off: tuple[str, ...] = ()
    tanh: Tanh = "auto"
    kv_dtype: str = ""
    grads: tuple[int, ...] = ()
    dropout: bool = False
    batch_invariant: bool = False
    fp32_products: Fp32Products = "ieee"
    fp8_weights: Fp8Weights = "exact"
    ragged_kv: bool = False

    @property
    def head_dims(self) -> tuple[int, int]:
        """The head dimensions: of q and k, and of v."""
        return self.head_dim_qk, self.head_dim_v

    @property
    def far(self) -> bool:
        """True if scores can be so far from 0 that base 2 needs care: printers/spelling.py."""
        return self.score is not None and reaches_end(self.score.mod.expr)

    @property
    def terms(self) -> Terms | None:
        """The score_mod as this kernel computes it; None without one."""
        if self.score is None:
            return None
        # A row of decode's tile is a head of its own: no diagonal and no key has one value.
        barred = {"diagonal", "row_slope"} if self.kind == "decode" else set()
        if self.dtype == "float32":
            barred.add("row_slope")
        return split(self.score.mod, ALL - barred - set(self.rules_off))

    @property
    def fp8(self) -> bool:
        """True if q, k and v have eight bits, each head with a factor."""
        return self.dtype == "float8_e4m3fn"

    @property
    def out_dtype(self) -> str:
        """The dtype of what comes out."""
        return "bfloat16" if self.fp8 else self.dtype

    @property
    def e4m3_weights(self) -> bool:
        """True if weights and V are multiplied in e4m3."""
        return self.fp8_weights == "e4m3"

    @property
    def value_dtype(self) -> str:
        """The dtype in which a prefill of tiles multiplies V."""
        return self.dtype if self.e4m3_weights else self.out_dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one element of what is multiplied: of q, and of k and v once converted."""
        return ITEMSIZE[self.dtype]

    def dtype_of(self, tensor: str) -> str:
        """The dtype of "q", "k" or "v" in memory."""
        return self.dtype if tensor == "q" else self.kv_dtype or self.dtype

    @property
    def packed_heads(self) -> int:
        """Query heads that share a tile's rows: decode's group, unless lists differ by head.

        With lists that differ, each query head walks its own.
        """
        if self.kind != "decode" or (self.sparsity is not None and self.sparsity.per_head):
            return 1
        return self.group


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention call: the structure of its kernel, and the sizes that choose its config.

    q [B, Hq, q_len, head_dim_qk], k [B or 1, Hkv, kv_len, head_dim_qk],
    v [B or 1, Hkv, kv_len, head_dim_v]. mask_class: density, imbalance and contiguity of the
    BlockMask in words, "unknown" where nobody looked, "" without one: a tuned record's key has it.
    broadcast_kv: of a backward, k and v have one batch for all of q's.
    """

    structure: Structure
    B: int
    Hq: int
    Hkv: int
    q_len: int
    kv_len: int
    mask_class: str = ""
    broadcast_kv: bool = False

    def bucketed(self) -> Problem:
        """The problem that its config is chosen for: a decode's kv_len is its bucket's longest.

        A cache that grows brings another length with every token.
        """
        if self.structure.kind != "decode":
            return self
        longest = longest_of_bucket(self.kv_len)
        return self if longest == self.kv_len else replace(self, kv_len=longest)

    def at(self, B: int, q_len: int, kv_len: int) -> Problem:
        """The problem of other sizes."""
        return _near(replace(self, B=B, q_len=q_len, kv_len=kv_len))

    def classes(self) -> Iterator[Problem]:
        """The problem in each of the ways in which records may know it."""
        yield self

    def blocks(self) -> str:
        """The BlockMask's blocks, as a record's key has them: "128x128 full", "" without one."""
        sparsity = self.structure.sparsity
        if sparsity is None:
            return ""
        found = f"{sparsity.q_block}x{sparsity.kv_block}"
        return found + " full" * sparsity.has_full + " per-head" * sparsity.per_head

    def layout(self) -> str:
        """The layout of q, k and v in a record's key."""
        layout = self.structure.layout
        inner = layout.q_contiguous, layout.k_contiguous, layout.v_contiguous
        found = (x if each else "-" for x, each in zip("qkv", inner, strict=True))
        return "".join(found) + " aligned" * layout.aligned

    def precision(self) -> str:
        """The other numbers of a record's key that decide a config; statistics do not."""
        s = self.structure
        found = [word for each, word in PRODUCT_WORDS.items() if each == s.fp32_products]
        found += ["signed-scale"] * (not s.positive_scale)
        found += [f"tanh={s.tanh}"] * (s.tanh != "auto")
        found += [f"without-{name}" for name in s.rules_off]
        found += [f"kv={s.kv_dtype}"] * (s.kv_dtype != "")
        found += [f"grads={','.join(map(str, s.grads))}"] * bool(s.grads)
        found += ["one-kv"] * self.broadcast_kv
        found += [f"weights={s.fp8_weights}"] * s.e4m3_weights
        return " ".join(found + ["dropout"] * s.dropout)

    def unserved(self) -> tuple[str, str]:
        """The kind of template that has no config that can run, and advice for the user."""
        if self.structure.fp8:
            do = "convert to bfloat16: of e4m3 queries Hopper has a prefill, "
            return self.structure.kind, do + "and nothing has the rest"
        return self.structure.kind, "use smaller head dimensions"

    def describe(self) -> str:
        """One line for headers, reports and errors."""
        s = self.structure
        dims = (
            str(s.head_dim_qk)
            if s.head_dim_qk == s.head_dim_v
            else f"{s.head_dim_qk}/{s.head_dim_v}"
        )
        dtypes = f"{s.dtype} over {s.kv_dtype}" if s.kv_dtype else s.dtype
        parts = [
            f"{s.kind} {dtypes} B={self.B} Hq={self.Hq} Hkv={self.Hkv}",
            f"q_len={self.q_len} kv_len={self.kv_len} D={dims}",
        ]
        if s.sparsity is not None:
            parts.append(f"blocks={s.sparsity.q_block}x{s.sparsity.kv_block}")
        if s.sinks:
            parts.append("sinks")
        if s.dropout:
            parts.append("dropout")
        if s.batch_invariant:
            parts.append("batch-invariant")
        if s.e4m3_weights:
            parts.append("weights of e4m3")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a call: q [B, Hq, q_len, D], k [B, Hkv, kv_len, D], v [B, Hkv, kv_len, Dv]."""

    B: int
    Hq: int
    Hkv: int
    q_len: int
    kv_len: int
    D: int
    Dv: int


def make_problem(
    kind: Kind,
    dtype: str,
    shape: Shape,
    score: Bound | None,
    mask: Bound | None,
    sparsity: Sparsity | None,
    layout: Layout = DENSE,
    *,
    mask_class: str = "",
    broadcast_kv: bool = False,
    rules_off: tuple[str, ...] = (),
    tanh: Tanh = "auto",
    kv_dtype: str = "",
    **facts: Any,
) -> Problem:
    """The one place where a call's facts become its Problem, when tuning and when dispatching.

    facts: other fields of its Structure.
    """
    s = shape
    structure = Structure(
        kind=kind,
        dtype=dtype,
        head_dim_qk=s.D,
        head_dim_v=s.Dv,
        group=s.Hq // s.Hkv if kind == "decode" else 0,
        score=captures_of(score),
        mask=captures_of(mask),
        sparsity=sparsity,
        layout=layout,
        rules_off=rules_off if score is not None else (),
        tanh=tanh if score is not None else "auto",
        kv_dtype="" if kv_dtype == dtype else kv_dtype,
        **facts,
    )
    return _near(Problem(structure, s.B, s.Hq, s.Hkv, s.q_len, s.kv_len, mask_class, broadcast_kv))


def _near(problem: Problem) -> Problem:
    """The problem, whose layout is not `near` if a dense tensor of its sizes is not.

    Outputs and gradients are dense; lse has four bytes a row, which of wide heads is less.
    """
    p, structure = problem, problem.structure
    width = max(*structure.head_dims, 2) * max(2, structure.itemsize)
    rows = p.B * max(p.Hq * p.q_len, p.Hkv * p.kv_len)
    if rows * width <= NEAR_BYTES or not structure.layout.near:
        return problem
    return replace(p, structure=replace(structure, layout=replace(structure.layout, near=False)))


def stable(value: object) -> str:
    """A field of a structure as text that is equal in every process."""
    if isinstance(value, Captures):
        return f"{value.mod.fingerprint}:{value.contiguous}"
    return repr(value)
