"""Affine edges of a mask: the bounds that serving kernels skip pages by."""

import pytest
import torch

from flexattn.catalogue import causal, head_windows, padding, sliding_window
from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import Mod, bind
from flexattn.mods.analysis.mask_form import mask_form
from flexattn.problem import INDEX_RANGES


def edges_of(mask_mod):
    return mask_form(bind(mask_mod, "mask").mod.expr, INDEX_RANGES).edges


def shown(edges):
    """Edges without what the request decides."""
    return None if edges is None else {(each.lowest, each.slope, each.offset) for each in edges}


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
    assert shown(edges_of(mask_mod)) == expected


@pytest.mark.parametrize(
    ("mask_mod", "expected"),
    [
        (causal, {(False, 1, 1)}),
        (sliding_window(7), {(False, 1, 1), (True, 1, -7)}),
        (lambda b, h, q, k: (k < 5) | ((k - q).abs() < 3), {(False, 0, 5)}),
        (lambda b, h, q, k: (k < 5) | (q - k < 9), {(True, 1, -8)}),
        (lambda b, h, q, k: (((k - q) % 2 == 0) & (k < 9)) | ((k >= 4) & (k <= q)),
         {(True, 0, 4), (False, 1, 1)}),
        (lambda b, h, q, k: (k - q).abs() < 5, None),
        (lambda b, h, q, k: (k <= q) & (k % 3 > 0), None),
    ],
)  # fmt: skip
def test_known_free_bounds(mask_mod, expected):
    found = mask_form(bind(mask_mod, "mask").mod.expr, INDEX_RANGES).free_edges
    assert shown(found) == expected


@pytest.mark.parametrize(
    ("mask_mod", "expected"),
    [
        (lambda b, h, q, k: (k <= q) & ((k < 4) | (q - k < 9)), [(False, 0, 4), (True, 1, -8)]),
        (lambda b, h, q, k: ((q - k < 9) & (k <= q)) | (k < 4), [(False, 0, 4), (True, 1, -8)]),
        (lambda b, h, q, k: (k < 4) | (k <= q), None),
        (lambda b, h, q, k: (k < 4) | (k % 2 == 0), None),
        (lambda b, h, q, k: (k < 4) & (q - k < 9), None),
    ],
)
def test_known_gaps(mask_mod, expected):
    found = mask_form(bind(mask_mod, "mask").mod.expr, INDEX_RANGES).gap_edges
    told = found and [(each.lowest, each.slope, each.offset) for each in found]
    assert told == expected


def test_what_a_request_captures_bounds_and_what_a_head_does_not():
    lengths = torch.tensor([11, 30])
    bound = bind(padding(lengths), "mask")
    (edge,) = mask_form(bound.mod.expr, INDEX_RANGES).edges
    assert (edge.lowest, edge.slope, edge.offset) == (False, 0, 0)
    rest = Mod("mask", edge.rest, bound.mod.buffers, bound.mod.scalars, "")
    found = evaluate(rest, {"b": torch.arange(2)}, bound.tensors, bound.scalars)
    assert torch.equal(found, lengths)
    assert shown(edges_of(head_windows(torch.tensor([1, 2, 3])))) == {(False, 1, 1)}


def test_narrow_sums_may_wrap_and_bound_nothing():
    small = torch.tensor([3, 4], dtype=torch.int8)

    def mask_mod(b, h, q_idx, kv_idx):
        return kv_idx.to(torch.int8) + small[b] > 2

    assert edges_of(mask_mod) == ()


def test_a_length_that_says_no_limit_keeps_every_key():
    """The first key past 2^63 - 1 wrapped to -2^63: all pages were skipped."""
    lengths = torch.tensor([11, 2**63 - 1])
    bound = bind(lambda b, h, q_idx, kv_idx: kv_idx <= lengths[b], "mask")
    (edge,) = mask_form(bound.mod.expr, INDEX_RANGES).edges
    rest = Mod("mask", edge.rest, bound.mod.buffers, bound.mod.scalars, "")
    found = evaluate(rest, {"b": torch.arange(2)}, bound.tensors, bound.scalars) + edge.offset
    assert found[0] == 12 and 2**31 < found[1] < 2**62
