"""Operations at the ends of their dtypes, in Triton's interpreter, against torch's."""

import math
import random

import pytest
import torch

import flexattn
from flexattn.mods.ops import OPS
from tests.printed_ops import applied, takes
from tests.support import PREFILL, block_mask

FLOATS = (0.0, -0.0, 1.0, -0.5, 2.5, -7.0, 0.1, 8388609.0, math.inf, -math.inf, math.nan)
INTEGERS = (0, 1, -1, 7, -7, 31, 33, 64, -100)
DIVISIONS = ("floor_div", "floor_mod", "trunc_div", "trunc_mod")


def edges(dtype):
    """Values around the ends of a dtype, and around 0 and the widths of shifts."""
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.tensor([*INTEGERS, info.min, info.max - 1, info.max], dtype=dtype)
    info = torch.finfo(dtype)
    ends = (info.min, info.max, info.tiny / 4)
    return torch.tensor([*FLOATS, *ends], dtype=torch.float64).to(dtype)


def wrong(ops, x, y):
    """For each pair of values, whether a kernel computes one of the operations otherwise."""
    want = [applied(op, x, y) for op in ops]
    # Of 16 bits torch rounds within, and where it rounds differs from device to device.
    tolerance = 2e-6 if x.dtype == torch.float32 else 8e-3

    def score_mod(score, b, h, q_idx, kv_idx):
        right = q_idx == q_idx
        for i, op in enumerate(ops):
            found, exact = applied(op, x[q_idx], y[q_idx]), want[i][q_idx]
            same = found == exact
            if want[i].is_floating_point():
                near = (
                    found.float() - exact.float()
                ).abs() <= tolerance * exact.float().abs() + 1e-37
                same = same | (torch.isnan(found) & torch.isnan(exact)) | near
            right = right & same
        return torch.where(right, 0.0, 1.0)

    q, k = torch.zeros(1, 1, len(x), 16), torch.zeros(1, 1, 1, 16)
    asked = flexattn.AuxRequest(max_scores=True)
    _, aux = flexattn.flex_attention(
        q, k, k, score_mod=score_mod, return_aux=asked, kernel_options=PREFILL
    )
    return aux.max_scores.flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_operations_at_the_ends_of_a_dtype(dtype):
    """A float's quotient by 0 and one that overflows were NaN, 8388609 // 1 was even, a bfloat16's
    quotient was truncated before it was rounded."""
    values = edges(dtype)
    x, y = values.repeat_interleave(len(values)), values.repeat(len(values))
    ops = [op for op in OPS.values() if takes(op, str(dtype)[6:])]
    dividing = [op for op in ops if op.name in DIVISIONS]
    others = [op for op in ops if op.name not in DIVISIONS]
    # torch on a CPU raises for one, and the other traps.
    defined = (y != 0) & ~((x == values.min()) & (y == -1))
    if dtype.is_floating_point:
        # torch's vectorised remainders on a CPU are off where the quotient has too many bits.
        defined = ((x.double() / y.double()).abs() < 2**22) | (y == 0) | ~(x + y).isfinite()
        assert not wrong([OPS["floor_div"]], x, y).any()
    assert not wrong(dividing, x[defined], y[defined]).any()
    for part in (others[::2], others[1::2]):
        assert not wrong(part, x, y).any()


def test_a_quotient_by_zero_masks_its_key():
    """-1 // 0.0 is -inf: key 7 was NaN, and all of the rows with it."""
    q, k, v = torch.randn(3, 1, 1, 20, 16, generator=torch.Generator().manual_seed(0))
    width = torch.ones(20)
    width[7] = 0.0
    out = flexattn.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - 1.0 // width[j])
    want = (q @ k.mT / 4 - 1.0 // width).softmax(-1) @ v
    torch.testing.assert_close(out, want)


def test_an_integer_divided_by_zero_ends_no_process():
    """torch raises on a CPU, and says nothing of a GPU: here the number is undefined, too."""
    none = torch.zeros(20, dtype=torch.int64)
    x = torch.zeros(1, 1, 20, 16)
    flexattn.flex_attention(
        x, x, x, score_mod=lambda s, b, h, i, j: s + i // none[j] + i % none[j]
    )


WIDE = (
    2**31, 2**31 - 1, -(2**31), -(2**31) - 1, 2**32 - 1, 2**32 + 1, 2**40, -(2**40), 10**10,
    2**62, 2**63 - 1, -(2**63) + 1, 3, -7, 1,
)  # fmt: skip
WINDOW = 2**40
L, S = 5, 7


def drawn(draw, depth):
    """A random integer as a function of (q_idx, kv_idx)."""
    number = draw.choice(WIDE)
    if depth == 0:
        return draw.choice(
            [lambda i, j: i, lambda i, j: i - j, lambda i, j: torch.full_like(i, number)]
        )
    x, y, z = (drawn(draw, depth - 1) for _ in "xyz")
    places, symbol = draw.choice((1, 5, 31, 33, 40, 63)), draw.choice(("lt", "le", "eq", "ge"))
    return draw.choice([
        lambda i, j: x(i, j) + y(i, j),
        lambda i, j: x(i, j) * number,
        lambda i, j: x(i, j) // number,
        lambda i, j: x(i, j) % number,
        lambda i, j: torch.div(x(i, j), number, rounding_mode="trunc"),
        lambda i, j: torch.fmod(x(i, j), number),
        lambda i, j: x(i, j) & y(i, j),
        lambda i, j: x(i, j) | number,
        lambda i, j: x(i, j) ^ number,
        lambda i, j: x(i, j) << places,
        lambda i, j: x(i, j) >> places,
        lambda i, j: torch.minimum(x(i, j), y(i, j)),
        lambda i, j: torch.clamp(x(i, j), max=number),
        lambda i, j: torch.clamp(x(i, j), min=number),
        lambda i, j: torch.where(getattr(torch, symbol)(x(i, j), number), y(i, j), z(i, j)),
    ])  # fmt: skip


def assert_integers(functions):
    """Functions of (q_idx, kv_idx) are torch's in a kernel, and in a mask's lists."""
    i, j = torch.arange(L)[:, None].expand(L, S), torch.arange(S).expand(L, S)
    bits = [(shift, 2**16 - 1) for shift in (0, 16, 32, 48)]
    want = torch.stack([f(i, j) for f in functions])

    def score_mod(score, b, h, q_idx, kv_idx):
        same = q_idx == q_idx
        for n, f in enumerate(functions):
            x = f(q_idx, kv_idx)
            for shift, part in bits:
                same = same & (((x >> shift) & part) == ((want[n, q_idx, kv_idx] >> shift) & part))
        return torch.where(same, 0.0, 1.0)

    def mask_mod(b, h, q_idx, kv_idx):
        kept = kv_idx == 0
        for f in functions:
            kept = kept ^ (f(q_idx, kv_idx) % 3 == 0)
        return kept

    q, k = torch.zeros(1, 1, L, 16), torch.zeros(1, 1, S, 16)
    asked = flexattn.AuxRequest(lse=True)
    call = {"return_aux": asked, "kernel_options": PREFILL}
    lse = flexattn.flex_attention(q, k, k, score_mod=score_mod, **call)[1].lse
    torch.testing.assert_close(lse.flatten(), torch.full((L,), math.log(S)))
    mask = block_mask(mask_mod, q, k, 16)
    lse = flexattn.flex_attention(q, k, k, block_mask=mask, **call)[1].lse
    torch.testing.assert_close(lse.flatten(), mask_mod(0, 0, i, j).sum(-1).log())


@pytest.mark.oldest
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(x, marks=pytest.mark.long) for x in range(4, 60))]
)
def test_random_integers_beyond_32_bits(seed):
    """A constant beyond 32 bits was printed beside positions of 32 bits: no kernel was built."""
    draw = random.Random(seed)
    assert_integers([drawn(draw, 2) for _ in range(4)])


def test_integers_beyond_32_bits_as_people_write_them():
    assert_integers([
        lambda i, j: j.clamp(max=WINDOW),
        lambda i, j: i & 0xFFFFFFFF,
        lambda i, j: i % (2**32 + 1),
        lambda i, j: torch.minimum(i, torch.full_like(i, 2**63 - 1)),
        lambda i, j: (j - i) // 10**10,
        lambda i, j: torch.where(i > j, 2**31, -5),
        lambda i, j: (1 << (i - j)) + (-5 >> (i - j)),  # as many places as torch has a meaning for
    ])  # fmt: skip
