"""varlen_attn(): attention of packed sequences, without a mask object.

The sequences lie in one row. The device finds the sequence of each row from cu_seqlens. `_serve`
decides what computes a call: on Hopper the forward and backward that read cu_seqlens, otherwise
`flex_attention` with a document mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, and_masks
from torch.utils.weak import WeakTensorKeyDictionary

from flexattn.block_mask.lists import queue_of
from flexattn.errors import InputError, InputTypeError, LayoutError, PlaceError, UnsupportedError
from flexattn.frontend.attention import Extras, flex_attention
from flexattn.frontend.call import check_transforms
from flexattn.frontend.documents import Packing, Positions, document_mask, sided
from flexattn.frontend.gradients import Inputs
from flexattn.frontend.packed import PACKED_DTYPES, attend_packed, reads_packs
from flexattn.mods import Bound, bind
from flexattn.mods.expr import MaskMod, ScoreMod
from flexattn.problem.checks import check_scale
from flexattn.runtime.launch import Outputs
from flexattn.settings import current
from flexattn.util.ambient import without_modes
from flexattn.util.locks import Lru
from flexattn.verify.first_use import Attended

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The packs of each cu_seqlens_q that lives. Layers of a model differ in a window or a
# mask_mod, and each may have a score_mod.
_packs = WeakTensorKeyDictionary()
_MASKS, _SCORES = 16, 256
_IN_ORDER = {"DETERMINISTIC": True}
# Arguments of FlashAttention's function and of torch's: values that change nothing, and what to
# pass instead of others.
_OTHERS: dict[str, tuple[tuple[Any, ...], str]] = {
    "softcap": ((0, None), "score_mod=flexattn.catalogue.softcap(cap)"),
    "alibi_slopes": ((None,), "a score_mod that adds slopes[h] * (kv_idx - q_idx)"),
    "return_attn_probs": ((False,), "return_lse=True, which returns (out, lse)"),
    "block_table": ((None,), "flexattn.serving.DecodePlan, which reads paged caches"),
    "seqused_k": ((None,), "flexattn.serving.DecodePlan, which takes seq_lens"),
    "num_splits": ((None, 0, 1), 'kernel_options={"BATCH_INVARIANT": True}'),
}  # fmt: skip


class PackedExtras(Extras, total=False):
    """The arguments of varlen_attn that do not decide what it returns."""

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    causal: bool
    window: tuple[int, int]
    window_size: tuple[int, int]
    scale: float | None
    softmax_scale: float | None
    enable_gqa: bool
    deterministic: bool
    kernel_options: Mapping[str, Any] | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None


@overload
def varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int | None = ...,
    max_k: int | None = ...,
    *,
    return_lse: Literal[False] = ...,
    return_aux: None = ...,
    **others: Unpack[PackedExtras],
) -> Tensor: ...


@overload
def varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int | None = ...,
    max_k: int | None = ...,
    *,
    return_lse: Literal[True] = ...,
    return_aux: None = ...,
    **others: Unpack[PackedExtras],
) -> tuple[Tensor, Tensor]: ...


@overload
def varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int | None = ...,
    max_k: int | None = ...,
    *,
    return_lse: bool = ...,
    return_aux: AuxRequest,
    **others: Unpack[PackedExtras],
) -> tuple[Tensor, AuxOutput]: ...


def varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int | None = None,
    max_k: int | None = None,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    enable_gqa: bool = True,
    return_lse: bool = False,
    return_aux: AuxRequest | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention of sequences that lie one behind another, each within itself.

    Rows and keys behind the last sequence are one more sequence. The last query stands at the last
    key, as in FlashAttention since 2.1: query i of n at key i + m - n of m. Nothing waits for the
    device, and new lengths in the same tensors compile nothing: a captured CUDA graph and a
    compiled one read them where they lie. What is found from cu_seqlens is kept with cu_seqlens_q
    for later layers, while torch counts no write to either.

    Args:
        q: [total_q, Hq, E]; dtypes and heads as for `flex_attention`.
        k: [total_k, Hkv, E].
        v: [total_k, Hkv, Ev].
        cu_seqlens_q: [sequences + 1], int32 or int64 on q's device: where each sequence begins,
            from 0, and the last one ends. Sequences may be empty.
        cu_seqlens_k: the same of keys. A sequence may have more keys than queries, or fewer.
        max_q: the longest length, which torch's function asks for. No path here needs it.
        max_k: the same of keys.
        score_mod: score_mod(score, b, h, q_idx, kv_idx); b is the number of the sequence, q_idx
            and kv_idx count from its first query and its first key.
        mask_mod: mask_mod(b, h, q_idx, kv_idx). Blocks that it alone removes are visited.
        causal: is a `window` with a right of 0.
        window: (left, right), keys at most so far before the query's own position and behind it,
            -1 for any. Blocks outside of a window are not visited.
        scale: as for `flex_attention`; so are enable_gqa, return_lse, return_aux, sinks, dropout_p
            and kernel_options. Descales are of all sequences, [1, H].
        deterministic: kernel_options' DETERMINISTIC.
        others: window_size, softmax_scale, max_seqlen_q and max_seqlen_k, which are other names.

    Returns:
        out [total_q, Hq, Ev]; lse is [Hq, total_q]. A row without keys gives zeros.

    Raises:
        InputError: for cu_seqlens that do not fit, whose numbers are checked on the CPU, and on a
            GPU with FLEXATTN_CHECK=1; the others as `flex_attention`.

    Example::

        cu_seqlens = torch.tensor([0, 900, 1300], device=q.device)
        out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, causal=True)
    """
    scale = others.pop("softmax_scale", scale)
    window = others.pop("window_size", window)
    others.pop("max_seqlen_q", None)
    others.pop("max_seqlen_k", None)
    if others:
        _refuse(others)
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k)
    left, right = _sides(window, causal)
    if deterministic:
        kernel_options = {**(kernel_options or {}), **_IN_ORDER}
    rest = {
        "scale": scale, "enable_gqa": enable_gqa, "return_lse": return_lse,
        "kernel_options": kernel_options, "return_aux": return_aux, "sinks": sinks,
        "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale,
        "dropout_p": dropout_p,
    }  # fmt: skip
    packing = Packing(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], left, right, mask_mod)
    return _serve((q, k, v), packing, score_mod, rest)  # type: ignore[no-any-return]


def _serve(
    inputs: Inputs, packing: Packing, score_mod: ScoreMod | None, rest: dict[str, Any]
) -> Any:
    """The results of a call by the engine that serves it: Hopper's kernels, or a document mask."""
    plain = _is_plain(inputs, packing, rest)
    done = None
    if torch.compiler.is_dynamo_compiling():
        if plain and score_mod is None and _is_read_in_graphs(inputs, packing, rest):
            from flexattn.frontend.compiled.sequences import attend_sequences

            done = attend_sequences(*inputs, packing, rest)
    elif plain:
        done = _attended(inputs, packing, score_mod, rest)
    if done is not None:
        sums = None if done.lse is None else done.lse.T
        if rest["return_aux"] is not None:
            return done.out, AuxOutput(sums, None)
        return (done.out, sums) if rest["return_lse"] else done.out
    mask, score_mod = document_call(packing, score_mod)
    found = flex_attention(*heads_of(*inputs), score_mod=score_mod, block_mask=mask, **rest)
    if rest["return_aux"] is not None:
        out, aux = found
        sides = (None if x is None else x[0] for x in (aux.lse, aux.max_scores))
        return _rows(out), AuxOutput(*sides)
    if rest["return_lse"]:
        out, lse = found
        return _rows(out), lse[0]
    return _rows(found)


def heads_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as one batch."""
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def _is_plain(inputs: Inputs, packing: Packing, rest: dict[str, Any]) -> bool:
    """True of calls that ask for nothing that kernels which read cu_seqlens do not have.

    They have no dropout and no descales, and where queries and keys differ in their lengths they
    do not know at which key the last query stands.
    """
    aux = rest["return_aux"]
    unserved = any([rest[x] is not None for x in ("q_descale", "k_descale", "v_descale")])
    given = rest["kernel_options"] or _IN_ORDER
    unserved = unserved or len(given) > 1 or given.get("DETERMINISTIC") is not True
    unserved = unserved or rest["dropout_p"] != 0.0
    unserved = unserved or (aux is not None and aux.max_scores)
    one_key_head = rest["enable_gqa"] or inputs[0].shape[1] == inputs[1].shape[1]
    sided = max(packing.left, packing.right) >= 0
    return not unserved and one_key_head and (packing.alike or not sided)


def _is_read_in_graphs(inputs: Inputs, packing: Packing, rest: dict[str, Any]) -> bool:
    """True of a plain call without mods that is traced, if kernels that read cu_seqlens serve."""
    q, k, v = inputs
    return (
        reads_packs(q.device)
        and packing.mask_mod is None
        and q.dtype in PACKED_DTYPES
        and q.dtype == k.dtype == v.dtype
        and packing.rows > 0
        and packing.keys > 0
        and (rest["scale"] is None or isinstance(rest["scale"], (int, float)))
        and not (rest["return_lse"] and rest["return_aux"] is not None)
    )


def _attended(
    inputs: Inputs, packing: Packing, score_mod: ScoreMod | None, rest: dict[str, Any]
) -> Outputs | None:
    """The results of the kernel that reads cu_seqlens; None of a call that it does not serve."""
    aux, sinks = rest["return_aux"], rest["sinks"]
    mask_mod: MaskMod | Bound | None = window_mask(packing.left, packing.right)
    if packing.mask_mod is not None:
        terms = sided(packing.left, packing.right)
        mask_mod = and_masks(*terms, packing.mask_mod) if terms else packing.mask_mod
    scale = check_scale(rest["scale"], inputs[0].shape[2])
    lse = rest["return_lse"] or (aux is not None and aux.lse)
    return attend_packed(
        *inputs, (packing.cu_q, packing.cu_k), score_mod, mask_mod, scale, sinks, lse,
        with_document_mask(packing, score_mod, scale, sinks), bool(rest["kernel_options"]),
    )  # fmt: skip


def with_document_mask(
    packing: Packing, score_mod: ScoreMod | None, scale: float, sinks: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor], Attended]:
    """A function of q, k and v that makes the same call with a document mask."""

    def as_documents(q: Tensor, k: Tensor, v: Tensor) -> Attended:
        mask, score = document_call(packing, score_mod)
        return Attended(*heads_of(q, k, v), scale, score, mask, sinks)

    return as_documents


@cache
def window_mask(left: int, right: int) -> Bound | None:
    """The mask of a window, traced once; None where there is none."""
    terms = sided(left, right)
    return bind(and_masks(*terms) if len(terms) > 1 else terms[0], "mask") if terms else None


def _rows(out: Any) -> Tensor:
    found: Tensor = out[0].transpose(0, 1)
    return found


class _Kept(NamedTuple):
    """A pack's mask, its score mods by position, and what its key names by id, which is held."""

    mask: BlockMask
    positions: Positions
    scores: Lru[int, tuple[ScoreMod, ScoreMod]]
    held: tuple[Any, ...]


def document_call(
    packing: Packing, score_mod: ScoreMod | None
) -> tuple[BlockMask | None, ScoreMod | None]:
    """A call's mask and its score_mod by position, kept while nobody writes to its cu_seqlens.

    The same objects for the same ones, by which launches are found. Made anew in a graph that is
    being traced or captured, which is to read new lengths, and of tensors of inference mode, which
    do not count what is written.
    """
    if not packing.rows or not packing.keys:
        return None, score_mod
    if not torch.compiler.is_dynamo_compiling():
        kept = _kept(packing)
        if score_mod is None:
            return kept.mask, None
        known = kept.scores.get(id(score_mod))
        if known is None:
            known = score_mod, kept.positions.score_mod(score_mod)
            kept.scores.put(id(score_mod), known)
        return kept.mask, known[1]
    mask, positions = document_mask(packing)
    return mask, None if score_mod is None else positions.score_mod(score_mod)


def _kept(packing: Packing) -> _Kept:
    cu_q, cu_k = packing.cu_q, packing.cu_k
    _, stream, capturing = queue_of(cu_q.device)
    if capturing or cu_q.is_inference() or cu_k.is_inference():
        return _made(packing, capturing)
    written = cu_q._version, cu_q.data_ptr()
    known: tuple[Any, Lru[tuple[Any, ...], _Kept]] | None = _packs.get(cu_q)
    if known is None or known[0] != written:  # memory of lengths that are gone is given back
        known = _packs[cu_q] = written, Lru(_MASKS)
    packs = known[1]
    key = (
        id(cu_k), cu_k._version, cu_k.data_ptr(), *packing[2:6], id(packing.mask_mod),
        torch.is_grad_enabled(), stream,
    )  # fmt: skip
    found = packs.get(key)
    if found is None:
        found = _made(packing, capturing)
        packs.put(key, found)
    return found


def _made(packing: Packing, capturing: bool) -> _Kept:
    check_transforms((packing.cu_q, packing.cu_k))
    with without_modes():
        if (current().check or not packing.cu_q.is_cuda) and not capturing:
            _check_values("cu_seqlens_q", packing.cu_q, "q", packing.rows)
            _check_values("cu_seqlens_k", packing.cu_k, "k", packing.keys)
        # No cu_seqlens_q, whose end lets the entry go.
        held = packing.mask_mod, None if packing.cu_k is packing.cu_q else packing.cu_k
        return _Kept(*document_mask(packing), Lru(_SCORES), held)


def _sides(window: Any, causal: bool) -> tuple[int, int]:
    """The keys on each side of a row's own that it sees, -1 for all; raises InputTypeError."""
    pair = tuple(window) if isinstance(window, (tuple, list)) else ()
    sides = [-1 if x is None else x for x in pair]
    if len(sides) != 2 or not all(isinstance(x, (int, torch.SymInt)) for x in sides):
        raise InputTypeError(
            f"window is {window!r:.80}",
            "it is (left, right), two integers: so many keys on each side, -1 for any number",
            "pass (512, 0) for a causal window of 513 keys, causal=True for no window",
        )
    return max(sides[0], -1), 0 if causal else max(sides[1], -1)


def _refuse(others: Mapping[str, Any]) -> None:
    """Raise for arguments of other libraries, except values that change nothing."""
    for name, value in others.items():
        if name not in _OTHERS:
            raise InputTypeError(
                f"varlen_attn has no argument {name}",
                "it takes those of flex_attention, torch's varlen_attn and FlashAttention's "
                "flash_attn_varlen_func",
            )
        neutral, better = _OTHERS[name]
        if isinstance(value, Tensor) or value not in neutral:
            shown = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
            raise UnsupportedError(
                f"{name} is {shown}", f"varlen_attn has no {name}", f"pass or call {better}"
            )


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    """Raises InputError for tensors of other dimensions, and cu_seqlens of no sequences."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 3:
            got = f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise LayoutError(
                f"{name} is {got}",
                "it is [total length, heads, head_dim], the sequences one behind another",
                "flexattn.flex_attention takes [batch, heads, length, head_dim], flexattn.pack "
                "nested tensors",
            )
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if not isinstance(cu, Tensor) or cu.dtype not in (torch.int32, torch.int64):
            got = f"of {cu.dtype}" if isinstance(cu, Tensor) else f"a {type(cu).__name__}"
            raise InputTypeError(
                f"{name} is {got}",
                "it is an int32 tensor of where each sequence begins, and the last one ends",
                "torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), on q's device",
            )
        if cu.dim() != 1 or cu.shape[0] < 1 or cu.shape != cu_q.shape:
            raise InputError(
                f"cu_seqlens_q has shape {tuple(cu_q.shape)}, {name} {tuple(cu.shape)}",
                "both have one dimension, of the number of sequences and one more",
            )
        if cu.device != q.device:
            raise PlaceError(
                f"{name} is on {cu.device}, q on {q.device}",
                "they are on one device",
                f"call {name}.to({str(q.device)!r})",
            )


def _check_values(name: str, cu: Tensor, of: str, length: int) -> None:
    """Raises InputError unless cu_seqlens begin at 0, do not decrease and end within a length."""
    values = cu.tolist()
    if values[0] or values[-1] > length or values != sorted(values):
        raise InputError(
            f"{name} is {values[:8]}{' and more' if len(values) > 8 else ''}, {of} has {length}",
            f"it begins with 0, never decreases, and ends at {of}'s length, or before",
            "torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)",
        )
