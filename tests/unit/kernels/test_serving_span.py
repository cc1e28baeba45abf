"""Which keys a mask can keep: the bounds that serving kernels skip pages by."""

import pytest
import torch

from flexattn.catalogue import CASES, causal, head_windows, padding, sliding_window
from flexattn.kernels.printers.span import bounds_of, free_bounds_of
from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import Mod, bind
from flexattn.mods.expr import Expr
from flexattn.serving.request import KV_DTYPES

Q, S, B, H = 40, 40, 2, 3


def spans(bound, bounds):
    """Bounds as (lowest, slope, offset) with the values of `rest` for each request."""
    found = []
    for lowest, slope, offset, rest in bounds:
        value = torch.zeros(B, dtype=torch.int64)
        if rest is not None:
            part = Mod("mask", rest, bound.mod.buffers, bound.mod.scalars, "")
            value = value + evaluate(part, {"b": torch.arange(B)}, bound.tensors, bound.scalars)
        found.append((lowest, slope, offset, value))
    return found


@pytest.mark.parametrize("entry", CASES, ids=str)
def test_no_kept_key_lies_outside_and_free_ones_are_all_kept(entry):
    mask_mod = entry.make(B, H, 1, Q, S).mask_mod
    if mask_mod is None:
        return
    bound = bind(mask_mod, "mask")
    env = {
        "b": torch.arange(B).view(B, 1, 1, 1),
        "h": torch.arange(H).view(1, H, 1, 1),
        "q_idx": torch.arange(Q).view(1, 1, Q, 1),
        "kv_idx": torch.arange(S).view(1, 1, 1, S),
    }
    keep = evaluate(bound.mod, env, bound.tensors, bound.scalars).expand(B, H, Q, S)

    def outside(bounds):
        for lowest, slope, offset, rest in spans(bound, bounds):
            edge = slope * env["q_idx"] + offset + rest.view(B, 1, 1, 1)
            yield env["kv_idx"] < edge if lowest else env["kv_idx"] >= edge

    for each in outside(bounds_of(bound.mod)):
        assert not (keep & each).any()
    free = free_bounds_of(bound.mod)
    if free is not None:
        within = ~torch.stack([each.expand(keep.shape) for each in outside(free)]).any(0)
        assert (keep | ~within).all()


@pytest.mark.parametrize(
    ("mask_mod", "expected"),
    [
        (causal, {(False, 1, 1)}),
        (sliding_window(7), {(False, 1, 1), (True, 1, -7)}),
        (lambda b, h, q, k: (k - q).abs() < 5, set()),
        (lambda b, h, q, k: (2 * k <= q) & (k >= 3), {(True, 0, 3)}),
        (lambda b, h, q, k: k == q + 2, {(False, 1, 3), (True, 1, 2)}),
        (lambda b, h, q, k: ~(k > 10 - 3 * q), {(False, -3, 11)}),
        (lambda b, h, q, k: (k < 5) | (k <= q), set()),
    ],
)
def test_known_bounds(mask_mod, expected):
    found = bounds_of(bind(mask_mod, "mask").mod)
    assert {(lowest, slope, offset) for lowest, slope, offset, rest in found} == expected


@pytest.mark.parametrize(
    ("mask_mod", "expected"),
    [
        (causal, {(False, 1, 1)}),
        (sliding_window(7), {(False, 1, 1), (True, 1, -7)}),
        (lambda b, h, q, k: (k < 5) | ((k - q).abs() < 3), {(False, 0, 5)}),
        (lambda b, h, q, k: (((k - q) % 2 == 0) & (k < 9)) | ((k >= 4) & (k <= q)),
         {(True, 0, 4), (False, 1, 1)}),
        (lambda b, h, q, k: (k - q).abs() < 5, None),
        (lambda b, h, q, k: (k <= q) & (k % 3 > 0), None),
    ],
)  # fmt: skip
def test_known_free_bounds(mask_mod, expected):
    found = free_bounds_of(bind(mask_mod, "mask").mod)
    assert (found if found is None else {each[:3] for each in found}) == expected


def test_what_a_request_captures_bounds_and_what_a_head_does_not():
    lengths = torch.tensor([11, 30])
    bound = bind(padding(lengths), "mask")
    found = spans(bound, bounds_of(bound.mod))
    assert [(x[0], x[1], x[2]) for x in found] == [(False, 0, 0)]
    assert torch.equal(found[0][3], lengths)
    heads = bounds_of(bind(head_windows(torch.tensor([1, 2, 3])), "mask").mod)
    assert [x[:3] for x in heads] == [(False, 1, 1)]


def test_narrow_sums_may_wrap_and_bound_nothing():
    small = torch.tensor([3, 4], dtype=torch.int8)

    def mask_mod(b, h, q_idx, kv_idx):
        return kv_idx.to(torch.int8) + small[b] > 2

    assert bounds_of(bind(mask_mod, "mask").mod) == []


def test_every_cache_dtype_has_a_name_that_triton_knows():
    assert all(isinstance(name, str) and "torch" not in name for name in KV_DTYPES.values())
    assert Expr("var", "int64", (), "b") is Expr("var", "int64", (), "b")
