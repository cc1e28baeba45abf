"""What a mod captures, changes and returns, through the real templates, interpreted."""

import math

import pytest
import torch

import flexattn
from flexattn.catalogue import causal, relative_bias
from flexattn.settings import override
from tests.support import KINDS, assert_accurate, block_mask, inputs

each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_a_number_that_changes_is_seen(kind):
    q, k, v = inputs()
    for factor in (0.5, 1.5, -2.0, 0.0, 1):

        def score_mod(score, b, h, q_idx, kv_idx):
            return score * factor + (kv_idx % 3) * factor

        assert_accurate(q, k, v, score_mod=score_mod, kernel_options=KINDS[kind])


def test_functions_that_rows_of_operations_name():
    """Triton's interpreter has no libdevice: rows name torch's functions beside."""

    def score_mod(s, b, h, i, j):
        bent = torch.clamp(s, -1.0, 1.0) + torch.relu(s) + torch.round(s) + torch.trunc(s)
        return bent + torch.lgamma(s * s + j) / 9 + torch.erfc(s) + torch.atan2(s, s + 1)

    q, k, v = inputs()
    assert_accurate(q, k, v, score_mod=score_mod)


def test_a_moving_offset_in_a_mask():
    q, k, v = inputs()
    for offset in (0, 5, 16, -3):

        def mask_mod(b, h, q_idx, kv_idx):
            return q_idx + offset >= kv_idx

        assert_accurate(q, k, v, block_mask=block_mask(mask_mod, q, k, 16))


@each_kind
def test_a_captured_tensor_of_another_length(kind):
    """The sizes of a captured tensor were once part of the compiled code of others: a table that
    was replaced by a longer or a shorter one was then read with the old bounds."""
    for L, S in ((37, 53), (21, 77), (50, 3)):
        table = torch.randn(3, 2 * max(L, S), generator=torch.Generator().manual_seed(S))
        q, k, v = inputs(L=L, S=S)
        mod = relative_bias(table, max(L, S))
        assert_accurate(q, k, v, score_mod=mod, kernel_options=KINDS[kind])


def test_a_captured_tensor_changed_in_place():
    table = torch.zeros(53)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[kv_idx]

    q, k, v = inputs()
    before = assert_accurate(q, k, v, score_mod=score_mod)
    table.copy_(torch.arange(53) * 0.1)
    after = assert_accurate(q, k, v, score_mod=score_mod)
    assert not torch.equal(before.out, after.out)


def test_strides_of_a_captured_tensor():
    """A launch for a dense tensor reads no strided one, which the same mod captures next."""
    dense = torch.randn(3, 37, 53, generator=torch.Generator().manual_seed(0))
    q, k, v = inputs()

    def biased(bias):
        return lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx]

    for bias in (dense, dense.mT.contiguous().mT, dense):
        assert_accurate(q, k, v, score_mod=biased(bias))


def guarded(length, room=64):
    """A captured tensor with NaN around it in memory: a read outside of it shows."""
    memory = torch.full((room + length + room,), math.nan)
    memory[room : room + length] = torch.linspace(-1, 1, length)
    return memory[room : room + length]


@pytest.mark.oldest
@each_kind
def test_removed_lanes_never_read_outside_a_tensor(kind):
    """An index out of range in lanes that the mask removes, far on either side."""
    table = guarded(9)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[q_idx - kv_idx]

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 9)

    q, k, v = inputs()
    mask = block_mask(mask_mod, q, k, 16)
    assert_accurate(q, k, v, score_mod=score_mod, block_mask=mask, kernel_options=KINDS[kind])


@each_kind
def test_an_index_out_of_range_in_a_kept_lane_reads_no_other_memory(kind):
    """Torch faults or reads garbage there; here it reads zero, and the answer is finite."""
    table = guarded(9)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[kv_idx * 1000 - 5000]

    q, k, v = inputs()
    with override(check=False):
        out = flexattn.flex_attention(
            q, k, v, score_mod=score_mod, enable_gqa=True, kernel_options=KINDS[kind]
        )
    assert out.isfinite().all()


@each_kind
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_values_in_removed_lanes_never_reach_an_output(poison, kind):
    """NaN times a weight of zero is NaN: what the mask removes must be removed before."""
    q, k, v = inputs()

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score, poison)

    mask = block_mask(causal, q, k, 16)
    assert_accurate(q, k, v, score_mod=score_mod, block_mask=mask, kernel_options=KINDS[kind])


@pytest.mark.parametrize("divisor", [7, -7])
def test_division_floors_as_torch_does(divisor):
    """Triton's // and % truncate towards zero; torch's floor."""

    def score_mod(score, b, h, q_idx, kv_idx):
        near = (q_idx - kv_idx) // divisor
        return score + 0.25 * near + 0.125 * ((q_idx - kv_idx) % divisor)

    q, k, v = inputs()
    assert_accurate(q, k, v, score_mod=score_mod)


@pytest.mark.oldest
@each_kind
def test_an_integer_becomes_a_bfloat16_by_its_value(kind):
    """A distance times a slope of bfloat16 took the integer's bits for a float's: NaN came out."""
    slopes = torch.tensor([0.25, 0.125, 0.0625], dtype=torch.bfloat16)

    def score_mod(score, b, h, q_idx, kv_idx):
        near = (q_idx > kv_idx).to(torch.bfloat16)
        return score - slopes[h] * (q_idx - kv_idx).abs() + near

    q, k, v = inputs()
    assert_accurate(q, k, v, score_mod=score_mod, kernel_options=KINDS[kind])


@pytest.mark.parametrize(
    ("kind", "dtype"), [("prefill", torch.float32), ("decode", torch.bfloat16)]
)
def test_a_captured_number_is_returned(kind, dtype):
    """A mod that gives back the tensor it captures was refused: "'str' object has no attribute
    'namespace'", of the node that returns it."""
    same, keep = torch.tensor(0.75, dtype=dtype), torch.tensor(True)
    q, k, v = inputs(B=1, Hq=1, L=9, S=19)
    for kept in (True, False):
        keep.fill_(kept)
        mask = block_mask(lambda *positions: keep, q, k, 16)
        call = {"score_mod": lambda *_: same, "block_mask": mask}
        found = assert_accurate(q, k, v, **call, kernel_options=KINDS[kind])
        assert found.out.any() == kept


def test_a_mod_of_no_file_works():
    """A mod typed into a notebook or a REPL has no source file to read."""
    names = {"torch": torch}
    exec("def score_mod(s, b, h, q, k):\n    return torch.where(q >= k, s, s - 1.0)", names)
    q, k, v = inputs()
    assert_accurate(q, k, v, score_mod=names["score_mod"])


def test_no_new_kernel_for_a_new_length():
    def source(L, S):
        q, k, v = inputs(L=L, S=S)
        mask = block_mask(causal, q, k, 16)
        return flexattn.explain(q, k, v, block_mask=mask, enable_gqa=True).source

    assert len({source(L, S) for L, S in ((37, 53), (64, 64), (999, 1001), (130, 17))}) == 1
