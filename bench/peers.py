"""Who is timed: a peer turns a row's inputs into a callable, or says why it cannot run the row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import flexattn
from bench.fa4 import fa4
from bench.inputs import Inputs
from bench.refusal import Refusal
from flexattn.frontend.call import make_call
from flexattn.frontend.plan import plan
from flexattn.kernels.choose.options import Options as Exactly
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.triton.config import PrefillConfig
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.launch import prepare_launch

__all__ = ["OURS", "PEERS", "TEMPLATES", "Peer", "Refusal", "ours", "ours_exactly", "ours_with"]

OURS = "flexattn"
Options: TypeAlias = Mapping[str, int | str]


Peer: TypeAlias = Callable[[Inputs], "Callable[[], Tensor] | Refusal"]


def ours(inputs: Inputs) -> Callable[[], Tensor] | Refusal:
    """flexattn.flex_attention as a user calls it."""
    return ours_with({})(inputs)


def ours_with(options: Options) -> Peer:
    """The same, with a config of one's own through kernel_options."""

    def build(x: Inputs) -> Callable[[], Tensor]:
        mask = _block_mask(x)
        return lambda: flexattn.flex_attention(
            x.q,
            x.k,
            x.v,
            score_mod=x.score_mod,
            block_mask=mask,
            enable_gqa=x.gqa,
            kernel_options=dict(options) or None,
            **x.factors,
        )

    return build


def ours_by(backend: str) -> Peer:
    """One of our two prefill templates."""

    def build(x: Inputs) -> Callable[[], Tensor] | Refusal:
        if x.row.shape.q_len <= 16:
            return Refusal(f"{backend} is for prefill")
        return ours_with({"BACKEND": backend})(x)

    return build


def ours_exactly(config: HopperPrefillConfig | PrefillConfig) -> Peer:
    """Ours with a config whose numbers kernel_options cannot all say."""

    def build(x: Inputs) -> Callable[[], Tensor]:
        mask, options = _block_mask(x), {"BACKEND": config.language.upper()}
        call = make_call(
            x.q, x.k, x.v, x.score_mod, mask, None, x.gqa, False, options, None, None, *x.descales
        )
        made = plan(call)
        launch = prepare_launch(
            made.launch.problem, made.launch.choice.device, x.q.device, dispatcher(),
            Exactly(exact=config), x.q, x.k, x.v, made.lists, x.descales,
        )  # fmt: skip
        exact = made._replace(launch=launch)
        return lambda: exact.run().out

    return build


def _block_mask(x: Inputs) -> BlockMask | None:
    if x.mask_mod is None:
        return None
    lengths = x.row.shape.q_len, x.row.shape.kv_len
    return flexattn.create_block_mask(x.mask_mod, None, None, *lengths, x.q.device)


def torch_flex_compiled(mode: str | None) -> Peer:
    """torch's flex_attention under torch.compile, for static shapes."""

    def build(x: Inputs) -> Callable[[], Tensor]:
        s, mask = x.row.shape, None
        if x.mask_mod is not None:
            mask = create_block_mask(x.mask_mod, None, None, s.q_len, s.kv_len, x.q.device)
        compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
        return lambda: compiled(
            x.q, x.k, x.v, score_mod=x.score_mod, block_mask=mask, enable_gqa=x.gqa
        )

    return build


def sdpa(backend: SDPBackend | None) -> Peer:
    """scaled_dot_product_attention by one backend, or by torch's own choice."""

    def build(x: Inputs) -> Callable[[], Tensor] | Refusal:
        if not x.row.plain:
            return Refusal("SDPA takes no mods")

        def call() -> Tensor:
            causal = x.row.mask == "causal"
            return scaled_dot_product_attention(x.q, x.k, x.v, is_causal=causal, enable_gqa=x.gqa)

        if backend is None:
            return call

        def forced() -> Tensor:
            with sdpa_kernel(backend):
                return call()

        return forced

    return build


def of_sixteen_bits(name: str, peer: Peer) -> Peer:
    """A peer that has no form for e4m3 with a factor for each head."""

    def build(x: Inputs) -> Callable[[], Tensor] | Refusal:
        return Refusal(f"{name} takes no float8 with descales") if x.row.fp8 else peer(x)

    return build


def in_bfloat16(x: Inputs) -> Callable[[], Tensor] | Refusal:
    """Ours on the numbers of an fp8 row in bfloat16: what eight bits are compared with."""
    return ours(x.in_bfloat16()) if x.row.fp8 else Refusal("the row is of bfloat16 itself")


PEERS: dict[str, Peer] = {
    OURS: ours,
    "torch-flex": of_sixteen_bits("torch", torch_flex_compiled(None)),
    "torch-flex-tuned": of_sixteen_bits(
        "torch", torch_flex_compiled("max-autotune-no-cudagraphs")
    ),
    "sdpa-cudnn": of_sixteen_bits("SDPA", sdpa(SDPBackend.CUDNN_ATTENTION)),
    "sdpa-flash2": of_sixteen_bits("SDPA", sdpa(SDPBackend.FLASH_ATTENTION)),
    "fa4": of_sixteen_bits("FA4", fa4),
    "bf16": in_bfloat16,
}
# Ours by template: timed where they are named.
TEMPLATES: dict[str, Peer] = {
    f"{OURS}-triton": ours_by("TRITON"),
    f"{OURS}-gluon": ours_by("GLUON"),
    f"{OURS}-split": ours_with({"BACKEND": "TRITON_DECODE"}),
}
