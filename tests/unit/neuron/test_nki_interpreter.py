"""The strict interpreter of NKI: its results and its memory."""

import math

import pytest
import torch

from flexattn.device.neuroncore import CORES
from flexattn.errors import KernelError
from flexattn.neuron.interpreter.interpret import interpret
from tests.nki import kernel_of, run_lines


def test_sbuf_grows_with_the_core():
    lines = "t = nl.ndarray((128, {}), dtype=nl.float32, buffer=nl.sbuf)"
    for target, kib in (("trn1", 192), ("trn2", 224), ("trn3", 256)):
        run = run_lines(lines.format(kib * 256), target)
        assert run.sbuf_bytes == kib * 1024
        with pytest.raises(KernelError, match="sbuf"):
            run_lines(lines.format(kib * 256 + 1), target)


def test_psum_is_taken_in_banks():
    run = run_lines("t = nl.ndarray((128, 513), dtype=nl.float32, buffer=nl.psum)")
    assert run.psum_banks == 2


OUT = "out = nl.ndarray(({}, {}), dtype=nl.float32, buffer=nl.shared_hbm)\n"


def given(body, rows=4, cols=8, target="trn2", x=None):
    """The result of lines that write the SBUF tile t [rows, cols] of float32."""
    lines = OUT.format(rows, cols)
    lines += f"t = nl.ndarray(({rows}, {cols}), dtype=nl.float32, buffer=nl.sbuf)\n"
    return run_lines(lines + body + "\nnisa.dma_copy(dst=out, src=t)", target, x).results[0]


def test_new_memory_is_poison():
    assert given("").isnan().all()
    lines = (
        "i = nl.ndarray((4, 8), dtype=nl.int32, buffer=nl.sbuf)\nnisa.tensor_copy(dst=t, src=i)"
    )
    assert given(lines).eq(4).all()


def test_to_integers_the_nearest_ties_to_even_and_saturating():
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 3e9, -3e9, 7.49]])
    lines = """
f = nl.ndarray((1, 8), dtype=nl.float32, buffer=nl.sbuf)
i = nl.ndarray((1, 8), dtype=nl.int32, buffer=nl.sbuf)
nisa.dma_copy(dst=f, src=x)
nisa.tensor_copy(dst=i, src=f)
nisa.tensor_copy(dst=t, src=i)
"""
    got = given(lines, 1, 8, x=x)
    assert got[0, :5].tolist() == [0, 2, 2, 0, -2]
    assert got[0, 5:].tolist() == [2.0**31, -(2.0**31), 7]


TURN = """
f = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.sbuf)
p = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.psum)
nisa.dma_copy(dst=f, src=x)
nisa.nc_transpose(dst=p, data=f)
nisa.tensor_copy(dst=t, src=p)
"""


@pytest.mark.parametrize(("target", "poisoned"), [("trn1", 4), ("trn2", 1), ("trn3", 1)])
def test_a_transpose_spreads_nan_on_v2_alone(target, poisoned):
    x = torch.arange(32.0).reshape(4, 8)
    assert given(TURN, 8, 4, target, x).equal(x.T)
    x[1, 2] = math.nan
    got = given(TURN, 8, 4, target, x)
    assert int(got.isnan().sum()) == poisoned and got[:2].equal(x.T[:2])


def test_matmul_accumulates_onto_what_it_began():
    lines = """
f = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.sbuf)
p = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.psum)
nisa.dma_copy(dst=f, src=x)
nisa.nc_matmul(dst=p, stationary=f, moving=f, accumulate=False)
nisa.nc_matmul(dst=p, stationary=f, moving=f, accumulate=True)
nisa.tensor_copy(dst=t, src=p)
"""
    x = torch.randn(4, 8)
    torch.testing.assert_close(given(lines, 8, 8, x=x), 2 * x.T @ x)


@pytest.mark.parametrize(
    ("op", "x", "valid"),
    [("log", 0.0, False), ("log", 2.0, True), ("log", 2.0**65, False), ("exp", -1e38, True)],
)  # fmt: skip
def test_activation_tables_hold_in_their_range(op, x, valid):
    lines = f"nisa.dma_copy(dst=t, src=x)\nnisa.activation(dst=t, op=nl.{op}, data=t)"
    assert bool(given(lines, x=torch.full((4, 8), x)).isfinite().all()) == valid


def test_affine_select_and_iota_count_rows_and_columns():
    lines = """
f = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.sbuf)
nisa.iota(dst=f, pattern=[[1, 8]], offset=100, channel_multiplier=10)
nisa.affine_select(dst=t, pattern=[[-1, 8]], channel_multiplier=1, on_true_tile=f, \
    on_false_value=-1.0, cmp_op=nl.greater_equal)
"""
    row, col = torch.arange(4)[:, None], torch.arange(8)
    assert given(lines).equal(torch.where(row >= col, 100.0 + 10 * row + col, -1.0))


def test_range_select_compares_indices_and_gives_the_maximum():
    """Row r keeps keys 10 + j with 11 <= key < 12 + r; its maximum takes the first column."""
    lines = """
f = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.sbuf)
low = nl.ndarray((4, 1), dtype=nl.float32, buffer=nl.sbuf)
high = nl.ndarray((4, 1), dtype=nl.float32, buffer=nl.sbuf)
nisa.dma_copy(dst=f, src=x)
nisa.memset(dst=low, value=11.0)
nisa.iota(dst=high, pattern=[[0, 1]], offset=12, channel_multiplier=1)
nisa.range_select(dst=t, on_true_tile=f, comp_op0=nl.greater_equal, comp_op1=nl.less, \
    bound0=low, bound1=high, reduce_cmd=nisa.reduce_cmd.reset_reduce, reduce_res=low, \
    reduce_op=nl.maximum, range_start=10)
nisa.tensor_copy(dst=t[:, 0:1], src=low)
"""
    got, x = given(lines), torch.arange(32.0).reshape(4, 8)
    row, key = torch.arange(4)[:, None], 10 + torch.arange(8)
    kept = torch.where((key >= 11) & (key < 12 + row), x, torch.finfo(torch.float32).min)
    assert got[:, 1:].equal(kept[:, 1:]) and got[:, 0].equal(kept.amax(1))


@pytest.mark.parametrize(
    "value", [[1, 2], {"a": 1}, torch.zeros(0), torch.zeros(2, dtype=torch.int64)]
)
def test_arguments_are_tuples_numbers_and_tensors(value):
    with pytest.raises(KernelError):
        interpret(kernel_of(""), (value,), CORES["trn2"])


def test_a_result_lies_in_shared_hbm():
    with pytest.raises(KernelError, match="shared_hbm"):
        run_lines("out = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)")


@pytest.mark.parametrize("line", ["import os", "import torch", "import nki.collectives"])
def test_a_kernel_imports_nki_alone(line):
    with pytest.raises(KernelError, match="import"):
        interpret(f"{line}\n{kernel_of('')}", (torch.zeros(1),), CORES["trn2"])
