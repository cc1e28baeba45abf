"""Call: the arguments of one flex_attention, and the facts of them that decide its launch."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from flexattn.errors import NoKernelError
from flexattn.kernels.choose.options import NONE, Options
from flexattn.mods import Bound, Identity
from flexattn.mods.expr import ScoreMod
from flexattn.problem.descales import NO_DESCALES, Descales
from flexattn.problem.dropout import Dropout
from flexattn.problem.facts import facts_of
from flexattn.problem.fp32_products import setting_of
from flexattn.problem.kind import FEW_ROWS
from flexattn.problem.read_checks import check_reads
from flexattn.records.key import rounded

# flex_attention's names for `Call.tensors`.
TENSORS = ("query", "key", "value", "sinks", "q_descale", "k_descale", "v_descale")

# A tensor of another class may mean more than its memory: its calls are not remembered.
PLAIN = frozenset((Tensor, Parameter, NoneType))
_FLOAT32 = torch.float32


class Call(NamedTuple):
    """flex_attention's arguments, in its order: as given, then as `admit` makes them for kernels.

    Every argument that a launch depends on has an entry in `facts`, the key of launches; nothing
    of the call that stands in no key goes into the Problem. score, mask, options, dropout: what
    `admit` found the mods, kernel_options and dropout_p to be.
    looks: the Identity of score_mod and of mask_mod by which `look` found them, from which `watch`
    makes their guards. beyond: why no kernel computes the mods, which are not bound then.
    A tuple, which is made in a fifth of the time of a frozen dataclass.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    score_mod: ScoreMod | None = None
    block_mask: BlockMask | None = None
    scale: Any = None  # a float, once admitted
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: Mapping[str, Any] | None = None
    return_aux: AuxRequest | None = None
    sinks: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    dropout_p: Any = 0.0
    score: Bound | None = None
    mask: Bound | None = None
    options: Options = NONE
    looks: tuple[Identity | None, Identity | None] = (None, None)
    dropout: Dropout | None = None
    beyond: NoKernelError | None = None

    def facts(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The facts that all calls of one launch share, in two parts.

        The second is what a cache that grows changes: the numbers of keys and values, and their
        strides. It is empty for more than FEW_ROWS query rows, whose first part has all. The mods,
        the mask and the scale are in neither: each key tells those in its own way.
        """
        (
            q, k, v, _, _, _, enable_gqa, return_lse, options, return_aux, sinks, q_descale,
            k_descale, v_descale, dropout_p, _, _, _, _, _, _,
        ) = self  # fmt: skip
        descales = None
        if not q_descale is k_descale is v_descale is None:
            descales = facts_of(q_descale), facts_of(k_descale), facts_of(v_descale)
        rows, of_k, of_v = q.shape, k.shape, v.shape
        rest = (
            enable_gqa, return_lse, repr(options) if options else None, return_aux,
            None if sinks is None else facts_of(sinks), descales,
            q.dtype is _FLOAT32 and setting_of(q), dropout_p != 0.0,
        )  # fmt: skip
        # facts_of, written out: three calls of it take 3 % of the host time of a repeated call.
        of_q = (
            type(q), rows, q.stride(), q.dtype, q.get_device(), q.data_ptr() % 16, q.is_neg()
        )  # fmt: skip
        if rows[2] > FEW_ROWS:
            in_k, in_v = k.stride(), v.stride()
            return (
                of_q,
                (type(k), of_k, in_k, k.dtype, k.get_device(), k.data_ptr() % 16, k.is_neg()),
                (type(v), of_v, in_v, v.dtype, v.get_device(), v.data_ptr() % 16, v.is_neg()),
                *rest,
            ), ()  # fmt: skip
        (kb, kh, keys, kd), (vb, vh, values, vd) = of_k, of_v
        (k0, k1, k2, k3), (v0, v1, v2, v3) = in_k, in_v = k.stride(), v.stride()
        kt, vt = k.dtype, v.dtype
        return (
            of_q,
            (type(k), kb, kh, kd, k3, kt, k.get_device(), k.data_ptr() % 16, k.is_neg()),
            (type(v), vb, vh, vd, v3, vt, v.get_device(), v.data_ptr() % 16, v.is_neg()),
            # Kernels that read whole lines serve where they can; of another power of two records
            # may tell something else.
            (k0 | k1 | k2) % (16 // kt.itemsize) == 0 == (v0 | v1 | v2) % (16 // vt.itemsize),
            rounded(keys), *rest,
        ), (keys, values, in_k, in_v)  # fmt: skip

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensor arguments, in the order of TENSORS."""
        return (
            self.q, self.k, self.v, self.sinks, self.q_descale, self.k_descale, self.v_descale,
        )  # fmt: skip

    @property
    def descales(self) -> Descales:
        """The factors of fp8 inputs."""
        if self.q_descale is self.k_descale is self.v_descale is None:
            return NO_DESCALES
        return Descales(self.q_descale, self.k_descale, self.v_descale)

    @property
    def statistics(self) -> AuxRequest:
        """What comes out beside the attention itself."""
        return self.return_aux or AuxRequest(lse=self.return_lse)

    def check_reads(self) -> None:
        """That its mods read inside their tensors; raises CaptureError."""
        check_reads(
            self.q, self.k, self.scale, self.descales, self.score_mod, self.score,
            self.block_mask, self.mask,
        )  # fmt: skip


def identity(bound: Bound | None) -> object:
    """What a launch depends on in a mod: its expression, and which inner strides are 1."""
    if bound is None:
        return None
    return (bound.mod.fingerprint, *[t.stride()[-1:] == (1,) for t in bound.tensors])
