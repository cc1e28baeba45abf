"""Candidates of a row: a peer turns its inputs into a call, or says why it cannot run the row."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import flexattn
from bench.inputs import Inputs
from flexattn.frontend.autograd import with_tensors
from flexattn.frontend.call import make_call
from flexattn.frontend.gradients import AskedGradients, BackwardPlan, plan_backward
from flexattn.frontend.plan import plan
from flexattn.kernels.choose.options import Options as Exactly
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.triton.config import PrefillConfig
from flexattn.runtime.backward import prepare_backward
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.launch import prepare_launch

OURS = "flexattn"
# The row beside which ours is also differentiated with options of training.
VARIED = "d128-8k-causal"
# Folders in front of a file's name: where a peer was installed or built tells a reader nothing.
_FOLDERS = re.compile(r"(?<![\w.])(?:/[\w.+-]+)+/(?=[\w.+-])")
# Long sides keep cuBLAS at its best rate; random numbers draw the power that attention's draw.
SIDE = 8192


@dataclass(frozen=True)
class Refusal:
    """The reason why a peer has no call for a row."""

    reason: str

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        """The first line of what a peer raised, files by their names alone."""
        lines = str(error).strip().splitlines()
        return cls(_FOLDERS.sub("", f"{type(error).__name__}: {lines[0] if lines else ''}"))


@dataclass(frozen=True)
class Ready:
    """A peer's forward, as a function of the leaves: q, k and v in the peer's own layout.

    e4m3_weights: it was asked to round weights to e4m3, for which the gate has a budget.
    """

    forward: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]
    e4m3_weights: bool = False

    def __call__(self) -> Tensor:
        return self.forward(*self.leaves)


Peer: TypeAlias = Callable[[Inputs], Ready | Refusal]


def call_of(peer: Peer, x: Inputs) -> Ready | Refusal:
    """A peer's forward of a row."""
    return peer(x)


def refusing(peer: Peer, why: Callable[[Inputs], str]) -> Peer:
    """A peer of the rows that nothing speaks against. why: what does; "" where nothing does."""

    def build(x: Inputs) -> Ready | Refusal:
        reason = why(x)
        return Refusal(reason) if reason else peer(x)

    return build


def ours_with(options: Mapping[str, Any], **more: Any) -> Callable[[Inputs], Ready]:
    """flexattn.flex_attention as a user calls it, with kernel_options, and more arguments."""

    def build(x: Inputs) -> Ready:
        given = x.arguments() | {"kernel_options": dict(options) or None} | more
        eight = options.get("FP8_WEIGHTS") == "e4m3"
        return Ready(partial(flexattn.flex_attention, **given), x.tensors, eight)

    return build


ours = ours_with({})


def ours_by(backend: str) -> Peer:
    """One of our two prefill templates."""
    reason = f"{backend} is for prefill"
    return refusing(ours_with({"BACKEND": backend}), lambda x: reason * (x.row.shape.q_len <= 16))


def ours_exactly(config: HopperPrefillConfig | PrefillConfig, fp8_weights: str = "exact") -> Peer:
    """Ours with a config whose numbers kernel_options cannot all say."""

    def build(x: Inputs) -> Ready:
        mask = x.arguments()["block_mask"]
        options = {"BACKEND": config.language.upper(), "FP8_WEIGHTS": fp8_weights}
        descales = x.factors or (None, None, None)
        call = make_call(
            *x.tensors, x.score_mod, mask, None, x.gqa, False, options, None, None, *descales
        )
        made = plan(call)
        launch = prepare_launch(
            made.launch.problem, made.launch.choice.device, x.q.device, dispatcher(),
            Exactly(exact=config), *x.tensors, made.lists, call.descales,
        )  # fmt: skip
        exact = made._replace(launch=launch)
        return Ready(lambda *leaves: exact.run().out, (), fp8_weights == "e4m3")

    return build


class _Exactly:
    """In place of the frontend's GradCall: plans of a backward have a config of one's own."""

    def __init__(self, asked: AskedGradients, given: Mapping[str, Any]) -> None:
        self._asked, self._given = asked, given
        self._plan: BackwardPlan | None = None

    def plan_backward(self, mask: Any, others: list[Tensor], *tensors: Tensor) -> BackwardPlan:
        if self._plan is None:
            q, k, v, out, dout = tensors
            asked = with_tensors(self._asked, mask, others)
            first, lists = plan_backward(asked, *tensors).launch, asked.lists()
            problem, device = first.problem, first.choice.device
            config = replace(first.choice.config, **self._given)
            fitting = family_of(config).at_sizes(config, problem, problem, device)
            exact = Exactly(exact=fitting)
            launch = prepare_backward(
                problem, device, q.device, dispatcher(), exact, (q, k, v), out, dout, lists,
            )  # fmt: skip
            rest = launch.rest_of(lists, asked.score, asked.mask, asked.dropout)
            self._plan = BackwardPlan(launch, rest)
        return self._plan


def exactly_trained(given: Mapping[str, Any], backend: str = "GLUON") -> Peer:
    """Ours with a config of the backward: a backend's default with these fields changed."""

    def build(x: Inputs) -> Ready:
        made = ours_with({"BACKEND": backend})(x)

        def forward(*leaves: Tensor) -> Tensor:
            out = made.forward(*leaves)
            node: Any = out.grad_fn
            served = _Exactly(node.asked, given)
            node.grads = lambda: served
            return out

        return Ready(forward, made.leaves)

    return build


def torch_flex(mode: str | None) -> Peer:
    """torch's flex_attention under torch.compile, for static shapes."""

    def build(x: Inputs) -> Ready:
        s, mask = x.row.shape, None
        if x.mask_mod is not None:
            mask = create_block_mask(x.mask_mod, None, None, s.q_len, s.kv_len, x.q.device)
        compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
        # One forward is differentiated many times: its buffers are not to be given away.
        torch._functorch.config.donated_buffer = False
        given = {"score_mod": x.score_mod, "block_mask": mask, "enable_gqa": x.gqa}
        return Ready(partial(compiled, **given), x.tensors)

    return refusing(build, lambda x: "torch takes no float8 with descales" * x.row.fp8)


def sdpa(backend: SDPBackend | None) -> Peer:
    """scaled_dot_product_attention by one backend, or by torch's own choice."""

    def build(x: Inputs) -> Ready:
        given = {"is_causal": x.row.mask == "causal", "enable_gqa": x.gqa}

        def call(*leaves: Tensor) -> Tensor:
            with nullcontext() if backend is None else sdpa_kernel(backend):
                return scaled_dot_product_attention(*leaves, **given)

        return Ready(call, x.tensors)

    def why(x: Inputs) -> str:
        mods, fp8 = "SDPA takes no mods", "SDPA takes no float8 with descales"
        return fp8 * x.row.fp8 if x.row.plain else mods

    return refusing(build, why)


def fa4(x: Inputs) -> Ready | Refusal:
    """FlashAttention-4 (package flash-attn-4), on [B, S, H, D] copies."""
    if x.row.fp8:
        return Refusal("FA4 takes no float8 with descales")
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError as error:
        return Refusal(f"flash_attn.cute cannot be imported: {error}")
    if x.row.mask in ("documents", "blocks"):
        return Refusal(f"FA4 has no {x.row.mask} beside block lists of its own making")
    options: dict[str, Any] = {"causal": x.row.mask == "causal"}
    if x.row.mask == "window":
        options["window_size"] = (x.row.window, 0)
    if x.row.score == "softcap":
        options["softcap"] = x.row.cap
    elif x.row.score != "none":
        options |= _fa4_mod(x)

    def forward(*leaves: Tensor) -> Tensor:
        found = flash_attn_func(*leaves, **options)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out

    return Ready(forward, tuple(each.transpose(1, 2).contiguous() for each in x.tensors))


def fa3(x: Inputs) -> Ready | Refusal:
    """FlashAttention-3, on [B, S, H, D] copies; of float8 with a factor for each head."""
    if not x.row.plain:
        return Refusal("it is raced without mods")
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError as error:
        return Refusal.of(error)
    names = ("q_descale", "k_descale", "v_descale")
    options: dict[str, Any] = {"causal": x.row.mask == "causal"}
    if x.row.fp8 and x.row.shape.hq != x.row.shape.hkv:
        return Refusal("its factors are of heads of keys")
    options |= dict(zip(names, x.factors, strict=False))

    def forward(*leaves: Tensor) -> Tensor:
        found = flash_attn_func(*leaves, **options)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out

    return Ready(forward, tuple(each.transpose(1, 2).contiguous() for each in x.tensors))


def _fa4_mod(x: Inputs) -> dict[str, Any]:
    """ALiBi from the head's number; a relative table through its aux_tensors."""
    from cutlass import Float32, cute

    if x.row.score == "alibi":
        rate = -8.0 / x.row.shape.hq

        @cute.jit
        def alibi(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
            slope = cute.math.exp2((h + 1).to(Float32) * rate, fastmath=True)
            return score + slope * (kv_idx - q_idx).to(Float32)

        return {"score_mod": alibi}
    offset = x.row.shape.kv_len

    @cute.jit
    def relative(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        table = aux_tensors[0]
        bias = cute.make_rmem_tensor(1, table.element_type)
        distance = q_idx - kv_idx + offset
        bias[0] = table[h[0], distance[0]]
        return score + bias.load().to(Float32)

    return {"score_mod": relative, "aux_tensors": [x.table]}


def matmul(x: Inputs) -> Ready:
    """torch.matmul of as many operations as a row: what a card's matrix units and power allow.

    A product [m, SIDE] x [SIDE, SIDE] with m chosen for the row's operations, of its dtype.
    """
    rows = max(128, round(x.row.flops / (2 * SIDE * SIDE) / 128) * 128)
    draw = torch.Generator(x.q.device).manual_seed(1)
    made = {"generator": draw, "device": x.q.device, "dtype": x.q.dtype}
    return Ready(torch.matmul, (torch.randn(rows, SIDE, **made), torch.randn(SIDE, SIDE, **made)))


def beside(options: Mapping[str, Any], **more: Any) -> Peer:
    """Ours with options of training, beside ours in one row."""
    reason = f"it is beside ours in {VARIED}"
    return refusing(ours_with(options, **more), lambda x: reason * (x.row.name != VARIED))


def of_backwards(peer: Peer, scores: tuple[str, ...] = ()) -> Peer:
    """A rival, whose forward says nothing of ours with and without lse.

    scores: those that it can differentiate by itself; all of them where none is named.
    """

    def why(x: Inputs) -> str:
        if x.row.group == "forward":
            return "bench.prefill times forwards"
        if scores and x.row.score not in scores:
            return f"it takes {x.row.score} with a derivative that the caller writes"
        return ""

    return refusing(peer, why)


_CUDNN, _FLASH = (sdpa(b) for b in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION))
_FLEX, _TUNED = (torch_flex(mode) for mode in (None, "max-autotune-no-cudagraphs"))
PEERS: dict[str, Peer] = {
    OURS: ours,
    "torch-flex": _FLEX,
    "torch-flex-tuned": _TUNED,
    "sdpa-cudnn": _CUDNN,
    "sdpa-flash2": _FLASH,
    "fa4": fa4,
    # Ours on the numbers of an fp8 row: what eight bits are compared with.
    "bf16": refusing(
        lambda x: ours(x.in_bfloat16()),
        lambda x: "" if x.row.fp8 else "the row is of bfloat16 itself",
    ),
}
# Timed where they are named: ours by template, and the card's own rate.
TEMPLATES: dict[str, Peer] = {
    f"{OURS}-triton": ours_by("TRITON"),
    f"{OURS}-gluon": ours_by("GLUON"),
    f"{OURS}-e4m3": refusing(
        ours_with({"FP8_WEIGHTS": "e4m3"}), lambda x: "of rows in float8" * (not x.row.fp8)
    ),
    "fa3": fa3,
    "matmul": refusing(matmul, lambda x: "its products are of 16 bits or 32" * x.row.fp8),
}
BACKWARD_PEERS: dict[str, Peer] = {
    OURS: ours,
    # The forward that nobody differentiates, beside the one that saves lse for a backward.
    f"{OURS}-without-lse": refusing(
        lambda x: Ready(torch.no_grad()(ours(x).forward), x.tensors),
        lambda x: "of a row of a forward alone" * (x.row.group != "forward"),
    ),
    f"{OURS}-deterministic": beside({"DETERMINISTIC": True}),
    "dropout": beside({}, dropout_p=0.1),
    "fa4": of_backwards(fa4, scores=("none", "softcap")),
    "sdpa-cudnn": of_backwards(_CUDNN),
}
# Timed where they are named: they compile for half a minute, tuned for minutes, a row.
TORCH_PEERS: dict[str, Peer] = {
    "torch-flex": of_backwards(_FLEX),
    "torch-flex-tuned": of_backwards(_TUNED),
}
