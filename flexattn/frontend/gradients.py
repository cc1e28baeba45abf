"""The plan of a call's backward: its Problem, and the prepared launch that serves it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.device import Device, detect
from flexattn.errors import ConfigError, UnsupportedError, WrongKernelError
from flexattn.frontend.call import Call, identity
from flexattn.frontend.launch_cache import launch_cache
from flexattn.frontend.plan import right_gradients
from flexattn.kernels.base.config import Language
from flexattn.kernels.choose.defaults import default, reasons, refused
from flexattn.kernels.choose.options import NONE, Options
from flexattn.kernels.printers.torch_printer import score_callable
from flexattn.mods import Bound
from flexattn.mods.derivative import derivatives
from flexattn.mods.expr import ScoreMod
from flexattn.problem import Problem, Shape, checks, make_problem
from flexattn.problem.facts import facts_of, layout_of, products_for, setting_of
from flexattn.problem.inputs import Dropout
from flexattn.problem.mask_lists import mask_class
from flexattn.records.untuned import note
from flexattn.reference import attention
from flexattn.reference.parts import SavedForward
from flexattn.runtime.backward import (
    BackwardLaunch,
    Gradients,
    fits,
    like,
    prepare_backward,
    slots_of,
)
from flexattn.runtime.candidates import Choice
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.key_lists import BothLists
from flexattn.settings import say_once
from flexattn.verify.made_up import ChosenKernels

# Query, key and value.
Inputs = tuple[Tensor, Tensor, Tensor]


class AskedGradients(NamedTuple):
    """The data that a backward keeps of its call beside the saved tensors.

    score, mask, dropout: the mods as bound, and what is dropped, without their tensors while they
    are saved apart. slots: of the score_mod's tensors that get a gradient, or of the pack's: the
    mods of packed sequences by positions in one, beside a call with a document mask.
    """

    score: Bound | None
    mask: Bound | None
    block_mask: BlockMask | None
    scale: float
    options: Options
    slots: tuple[int, ...]
    dropout: Dropout | None = None
    pack: tuple[Bound | None, Bound | None] | None = None

    @classmethod
    def of(cls, call: Call) -> AskedGradients:
        """The data that the backward of an admitted call keeps."""
        return cls(
            call.score, call.mask, call.block_mask, call.scale, call.options,
            slots_of(call.score), call.dropout,
        )  # fmt: skip

    def lists(self) -> BothLists | None:
        """The lists of the block mask, by query and by key."""
        return None if self.block_mask is None else BothLists.of(self.block_mask)


class BackwardPlan(NamedTuple):
    """A prepared launch, and what this call gives it beside q, k and v."""

    launch: BackwardLaunch
    rest: tuple[Any, ...]


def check_gradients(call: Call) -> AskedGradients:
    """The data that a backward keeps; raises UnsupportedError, ConfigError if none can run."""
    asked = AskedGradients.of(call)
    check_order(asked)
    mask = call.block_mask
    blocks = None if mask is None else (mask.BLOCK_SIZE, mask.full_kv_indices is None)
    key = (
        call.facts(), identity(call.score), identity(call.mask), blocks, asked.slots,
        asked.options, detect(call.q.device), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip

    def check() -> bool:
        check_backward(asked, call[:3], asked.lists(), detect(call.q.device))
        return True

    launch_cache.prepared(("has a backward", *key), check)
    return asked


def check_backward(
    asked: AskedGradients, inputs: Inputs, lists: BothLists | None, target: Device
) -> None:
    """Raises as `check_gradients` if there is no kernel for these gradients. Reads no values."""
    if asked.score is not None:
        derivatives(asked.score.mod, asked.slots)
    problem = _problem(asked, inputs, lists, target)
    # Where the caller's numbers cannot run, or no config can, the forward is not run for nothing.
    config = _options(asked.options, problem, target).exact or default(problem, target)
    if broken := reasons(config, problem.structure, target):
        raise ConfigError(
            f"kernel_options ask for {config}",
            f"it cannot run here: {'; '.join(broken)}",
            "leave the choice of the backward's numbers open",
        )


def check_order(asked: AskedGradients) -> None:
    """Raises UnsupportedError if a sum over many programs has to be deterministic.

    Such a sum is added up atomically, in no order.
    """
    if asked.score is None or not derivatives(asked.score.mod, asked.slots).summed(asked.slots):
        return
    demanded = torch.are_deterministic_algorithms_enabled()
    if not (demanded or asked.options.deterministic):
        return
    error = UnsupportedError(
        "a tensor that score_mod captures requires grad, and "
        + ("deterministic algorithms are on" if demanded else "kernel_options has DETERMINISTIC"),
        "its gradient is summed over query blocks, heads and batches by atomic additions, in no "
        "order",
        "detach the tensor, or allow it: "
        + ("torch.use_deterministic_algorithms(False)" if demanded else "leave DETERMINISTIC out"),
    )
    if not asked.options.deterministic and torch.is_deterministic_algorithms_warn_only_enabled():
        warnings.warn(str(error), stacklevel=2)
        return
    raise error


def choice_of(call: Call) -> tuple[Problem, Choice]:
    """The problem and the choice of an admitted call's backward; it is built, not launched."""
    target, index = detect(call.q.device), call.q.device.index if call.q.is_cuda else -1
    asked = AskedGradients.of(call)
    problem = _problem(asked, call[:3], asked.lists(), target)
    options = _options(call.options, problem, target)
    return problem, dispatcher().choose(problem, target, index, options)


def run_backward(
    planned: Callable[..., BackwardPlan],
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    grads: tuple[Tensor | None, Tensor | None],
    scale: float,
    summed: Sequence[Tensor],
    asked_of: Callable[[], AskedGradients],
    sinks: Tensor | None = None,
) -> Gradients:
    """Launch a backward; planned(q, k, v, out, dout): its plan. inputs: q, k and v.

    asked_of: what is kept of the call, with tensors, by which new kernels are verified.

    out and lse (natural log) as the forward gave them, in any strides; grads: theirs, None where
    nothing depends on one. summed: the captured tensors that get a gradient.
    """
    dout, dlse = grads
    dout = torch.zeros_like(out) if dout is None else dout.resolve_neg()
    q, *shared = inputs
    k, v = map(_of_each_batch, shared)
    inputs = q, k, v
    out, dout = (x if fits(x) else _dense(x) for x in (out, dout))
    dlse = None if dlse is None else _packed(dlse.resolve_neg())
    while True:
        try:
            launch, rest = planned(*inputs, out, dout)
        except WrongKernelError as error:
            say_once(f"{error}\n  plain torch computes these gradients")
            return _plain(asked_of(), inputs, out, (dout, dlse), summed, sinks)
        lse = lse if launch.problem.structure.ragged_kv else _packed(lse)
        found = launch.run(inputs, out, lse, (dout, dlse), scale, rest, summed)
        given = partial(_as_given, asked_of, launch, inputs, (out, lse), (dout, dlse))
        if right_gradients(launch, found, given):
            return found


def _plain(
    asked: AskedGradients,
    inputs: Inputs,
    out: Tensor,
    grads: tuple[Tensor, Tensor | None],
    summed: Sequence[Tensor],
    sinks: Tensor | None,
) -> Gradients:
    """Gradients in plain torch, where no kernel is right."""
    # A document mask's score_mod captures the same tensors in other slots.
    learned = [x.detach().requires_grad_() for x in summed]
    own = {id(x): leaf for x, leaf in zip(summed, learned, strict=True)}
    score = asked.score and asked.score._replace(
        tensors=tuple(own.get(id(x), x) for x in asked.score.tensors)
    )
    dq, dk, dv, captured = by_autograd(
        inputs, score_callable(score), asked.block_mask, asked.scale, learned, grads,
        asked.dropout, sinks,
    )  # fmt: skip
    delta = (out.float() * grads[0].float()).sum(-1)
    delta = delta if grads[1] is None else delta - grads[1]
    return Gradients(dq, dk, dv, tuple(captured), delta)


def by_autograd(
    inputs: Inputs,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    scale: float,
    learned: Sequence[Tensor],
    grads: tuple[Tensor | None, Tensor | None],
    dropout: Dropout | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of q, k, v, and of the learned tensors, which score_mod captures and which
    require grad.

    grads: of the output and of lse, None where nothing depends on one.
    """
    with torch.enable_grad():
        own = [x.detach().requires_grad_() for x in inputs]
        found = attention(
            *own, score_mod=score_mod, block_mask=block_mask, scale=scale, sinks=sinks,
            dropout=dropout,
        )  # fmt: skip
        pairs = [
            (x, g) for x, g in zip((found.out, found.lse), grads, strict=True) if g is not None
        ]
        leaves = [*own, *learned]
        given = torch.autograd.grad(
            [x for x, _ in pairs], leaves, [g.to(x.dtype) for x, g in pairs], allow_unused=True
        )
    whole = [zeros_of(x) if g is None else g for x, g in zip(leaves, given, strict=True)]
    dq, dk, dv = (like(x).copy_(g) for x, g in zip(inputs, whole, strict=False))
    return dq, dk, dv, whole[3:]


def zeros_of(x: Tensor) -> Tensor:
    """Zeros of a tensor's shape and dtype, contiguous."""
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def _as_given(
    asked_of: Callable[[], AskedGradients],
    launch: BackwardLaunch,
    inputs: Inputs,
    results: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
) -> tuple[SavedForward, ChosenKernels]:
    """A backward as plain torch takes it, and its kernels with what a made-up call needs."""
    asked = asked_of()
    lists = asked.lists()
    mods = asked.pack or (asked.score, asked.mask)
    saved = SavedForward(
        *inputs, asked.scale, score_callable(asked.score), asked.block_mask, asked.dropout,
        *results, *grads,
    )  # fmt: skip
    return saved, ChosenKernels(
        launch.choice, inputs[0].device, asked.scale, *mods,
        None if lists is None else lists.by_query, asked.dropout,
    )  # fmt: skip


def _of_each_batch(x: Tensor) -> Tensor:
    """Keys or values of which each batch has its own, as their gradients are written.

    Batches may share them through a stride of 0, with which no tensor descriptor steps.
    """
    return like(x).copy_(x) if x.shape[0] > 1 and not x.stride(0) else x


def _packed(x: Tensor) -> Tensor:
    """Statistics of rows as kernels read them: contiguous, at an address of whole 16 bytes."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else _dense(x)


def _dense(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def plan_backward(
    asked: AskedGradients,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
) -> BackwardPlan:
    """Find the launch of a backward in the launch cache, or prepare it."""
    lists, masked, sizes = None, "", None
    mask = asked.block_mask
    if mask is not None:
        masked = mask_class(mask)
        lists = BothLists.of(mask)
        shapes = [None if x is None else x.shape for each in lists for x in each]
        sizes = mask.BLOCK_SIZE, *shapes
    key = (
        *map(facts_of, (q, k, v, out, dout)), identity(asked.score), identity(asked.mask),
        masked, sizes, asked.slots, asked.options, setting_of(q, asked.options.fp32),
        asked.dropout is None, torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip

    def prepare() -> BackwardLaunch:
        target = detect(q.device)
        problem = _problem(asked, (q, k, v), lists, target)
        options = _options(asked.options, problem, target)
        launch = prepare_backward(
            problem, target, q.device, dispatcher(), options, (q, k, v), out, dout, lists
        )
        # A tuner would tune the ordinary kernel.
        if asked.options.tanh == "auto" and asked.dropout is None:
            note(problem, target, launch.choice.how, asked.score, asked.mask)
        return launch

    launch = launch_cache.prepared(key, prepare)
    return BackwardPlan(launch, launch.rest_of(lists, asked.score, asked.mask, asked.dropout))


def _problem(
    asked: AskedGradients, inputs: Inputs, lists: BothLists | None, target: Device
) -> Problem:
    q, k, v = inputs
    B, Hq, q_len, D = q.shape
    Hkv, kv_len, Dv = v.shape[1:]
    sparsity, masked = None, ""
    if lists is not None:
        assert asked.block_mask is not None
        sparsity = lists.by_query.sparsity(asked.block_mask.BLOCK_SIZE, 1)
        masked = mask_class(asked.block_mask)
    return make_problem(
        "backward",
        checks.kernel_dtype(q.dtype),
        Shape(B, Hq, Hkv, q_len, kv_len, D, Dv),
        asked.score,
        asked.mask,
        sparsity,
        layout_of(q, k, v),
        mask_class=masked,
        fp32_products=products_for(
            setting_of(q, asked.options.fp32), "backward", (D, Dv), target.capability, False
        ),
        # The other rules change nothing: a backward computes the score_mod as it is written.
        rules_off=tuple({"decay_skip"} & {*asked.options.all_rules_off}),
        tanh=asked.options.tanh,
        grads=asked.slots,
        dropout=asked.dropout is not None,
        broadcast_kv=k.shape[0] < B,
    )


def _options(given: Options, problem: Problem, target: Device) -> Options:
    """The options of a call's backward: numbers of a config, over the static default's."""
    language = _language(given, problem, target)
    if not given.backward:
        return replace(NONE, language=language, deterministic=repeats_bits(given))
    config: Any = default(problem, target, "triton")
    return Options(exact=replace(config, **dict(given.backward)))


def _language(given: Options, problem: Problem, target: Device) -> Language | None:
    """The language of a backward's template, where the caller decided; None where open.

    Where Gluon's cannot serve, or not with the same bits in every run, Triton's does, whatever was
    asked of the forward.
    """
    if given.language == "gluon" and repeats_bits(given):
        return None
    if given.language == "gluon" and refused(problem, target, "gluon"):
        return None
    return given.language


def repeats_bits(given: Options) -> bool:
    """True if gradients of the same bits in every run are asked for."""
    return given.deterministic or torch.are_deterministic_algorithms_enabled()
