"""A sequence of calls that is repeated builds, renders and traces nothing the second time.

What the interpreter builds is what a GPU compiles: a second each, in the middle of traffic.
"""

import functools

import pytest
import torch

import flexattn
from flexattn.catalogue import causal, sliding_window, softcap
from tests.support import DECODE, KINDS, PREFILL, block_mask, inputs


def attend(L, S, *, score_mod=None, mask_mod=None, options=PREFILL, B=2, **more):
    """One call on fresh tensors, with a mask that is made for it."""
    q, k, v = inputs(B, 2, 1, L, S)
    mask = block_mask(mask_mod, q, k, 16, per_batch=False, per_head=False)
    flexattn.flex_attention(
        q, k, v, score_mod, mask, enable_gqa=True, kernel_options=options, **more
    )


def placed(first, window):
    """Causal rows of a window that begin at a position, as generate() has them."""

    def mod(b, h, q_idx, kv_idx):
        q_idx = q_idx + first
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    return mod


def biased(bias, weight=1.0):
    def mod(score, b, h, q_idx, kv_idx):
        return score + weight * bias[kv_idx]

    return mod


def generation():
    """A prompt, then tokens at positions that grow, of a cache that grows."""
    attend(21, 21, mask_mod=placed(0, 64))
    for at in range(21, 25):
        attend(1, at + 1, mask_mod=placed(at, 64), options=DECODE)


def two_prompts():
    """The second prompt is prefilled in two parts, in another batch."""
    generation()
    attend(17, 17, mask_mod=placed(0, 64), B=1)
    attend(18, 35, mask_mod=placed(17, 64), B=1)


def two_models():
    """Layers of two models of one class, which differ in every number."""
    for cap, window in ((30.0, 12), (50.0, 20), (30.0, 12)):
        for length in (23, 37):
            attend(length, length, score_mod=softcap(cap), mask_mod=sliding_window(window))
            attend(length, length, score_mod=softcap(cap), mask_mod=causal)


def layers():
    """A new closure and a new tensor for each layer of each forward."""
    for weight in (0.5, 1.0, 1.5):
        attend(19, 31, score_mod=biased(torch.linspace(-weight, 1, 31), weight))


def repeated(times, weight):
    def mod(score, b, h, q_idx, kv_idx):
        for _ in range(times):
            score = score + weight * q_idx
        return score

    return mod


def loops():
    """A number that no argument can replace, beside one that one can."""
    for times, weight in ((1, 0.5), (2, 0.5), (2, 0.25), (1, 0.75), (3, 0.5)):
        attend(17, 19, score_mod=repeated(times, weight))


def summed(table):
    def mod(score, b, h, q_idx, kv_idx):
        return score + table.sum() / table.shape[0]

    return mod


def tables():
    """A mod whose code depends on the size of what it captures."""
    for size in (3, 5, 3):
        attend(17, 19, score_mod=summed(torch.ones(size)))


class Gate(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, score, b, h, q_idx, kv_idx):
        return score * self.weight if self.training else score / self.weight


def training():
    """Steps of training, which plain torch computes on the CPU, and of evaluation in between."""
    gate = Gate(2.0)
    for weight in (2.0, 3.0):
        gate.weight = weight
        q, k, v = inputs(1, 2, 1, 17, 19)
        with torch.enable_grad():
            out = flexattn.flex_attention(
                q.requires_grad_(), k, v, gate.train(), enable_gqa=True, kernel_options=PREFILL
            )
            out.sum().backward()
        attend(17, 19, score_mod=gate.eval())
        with torch.inference_mode():
            attend(17, 19, score_mod=gate, mask_mod=causal)


def scaled(weight, score, b, h, q_idx, kv_idx, *, shift=0):
    return score * weight + shift


def partials():
    for weight, shift in ((1.5, 0), (1.5, 2), (2.5, 0)):
        attend(17, 19, score_mod=functools.partial(scaled, weight, shift=shift))


def shapes():
    """Batches and lengths, one key, one row, another scale, statistics, and an odd address."""
    for B, L, S in ((1, 1, 1), (4, 1, 33), (1, 33, 1), (4, 33, 33)):
        for options in KINDS.values():
            attend(L, S, B=B, mask_mod=causal, options=options)
    attend(33, 33, scale=-0.5, return_lse=True)
    q, k, v = inputs(1, 2, 1, 17, 19)
    odd = torch.empty(q.numel() + 1)[1:].view_as(q).copy_(q)
    for query in (q, odd):
        flexattn.flex_attention(query, k, v, enable_gqa=True, kernel_options=PREFILL)


SEQUENCES = (
    generation, two_prompts, two_models, layers, loops, tables, training, partials, shapes,
)  # fmt: skip


@pytest.mark.parametrize("calls", SEQUENCES, ids=lambda calls: calls.__name__)
def test_a_repeated_sequence_builds_nothing(calls, work):
    """Generating twice stalled for 1.2 s: the prompt's position, a constant of the first prompt's
    kernel, had become an argument, and the second prompt's kernel was compiled with it."""
    built, rendered, traced = work.of(calls)
    assert rendered and traced and built == len(set(work.built))
    assert work.of(calls) == (0, 0, 0)
    assert work.of(calls) == (0, 0, 0)


def test_a_number_costs_one_more_kernel_however_often_it_changes(work):
    """Coming back to a window that was a constant compiled its kernel a second time."""

    def attended(window):
        return work.of(lambda: attend(33, 33, mask_mod=placed(0, window)))[0]

    # A kernel that attends and one that classifies blocks.
    assert [attended(window) for window in (12, 20, 12, 28, 20, 12)] == [2, 2, 0, 0, 0, 0]


def test_values_of_one_number_and_then_of_another(work):
    """Each number that turns out to vary costs one kernel, and no combination after that."""

    def attended(first, window):
        return work.of(lambda: attend(17, 33, mask_mod=placed(first, window)))[0]

    new = [attended(*at) for at in ((0, 12), (5, 12), (5, 20))]
    assert new == [2, 2, 2]
    again = [(0, 12), (7, 12), (0, 20), (7, 28), (0, 28), (5, 20), (0, 12)]
    assert [attended(*at) for at in again] == [0] * len(again)
