"""A mod's Expr means what the callable means: both are run on the same positions and compared."""

import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import and_masks, or_masks

from flexattn.kernels.printers.torch_printer import evaluate, to_torch
from flexattn.mods import bind

B, H, Q, KV = 2, 3, 7, 9


def seeded(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def grid():
    positions = [torch.arange(n) for n in (B, H, Q, KV)]
    names = ("b", "h", "q_idx", "kv_idx")
    env = dict(zip(names, torch.meshgrid(*positions, indexing="ij"), strict=True))
    return {"score": seeded(B, H, Q, KV) * 3, **env}


def vmapped(fn, kind):
    env = grid()
    inputs = list(env.values()) if kind == "score" else list(env.values())[1:]
    for _ in range(4):
        fn = torch.vmap(fn)
    result = fn(*inputs)
    return result.float() if kind == "score" else result.bool()


def ours(fn, kind):
    bound = bind(fn, kind)
    result = evaluate(bound.mod, grid(), bound.tensors, bound.scalars)
    return result.expand(B, H, Q, KV)


def check(fn, kind="score"):
    with torch.no_grad():
        torch.testing.assert_close(ours(fn, kind), vmapped(fn, kind), equal_nan=True)


bias4, bias2, bias1 = seeded(B, H, Q, KV), seeded(Q, KV), seeded(H)
half, relative, long = seeded(H, dtype=torch.bfloat16), seeded(Q + KV), seeded(300)
doc = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 3])
which = torch.randint(0, Q, (B, Q), generator=torch.Generator().manual_seed(1))
rope_q, rope_k = seeded(B, H, Q, 16), seeded(B, 1, KV, 16)
temperature = torch.tensor(0.7)
learned = torch.nn.Parameter(seeded(H))
window, gain, scale64 = 3, 0.3, np.float64(0.25)

SCORES = {
    "identity": lambda s, b, h, q, k: s,
    "bias": lambda s, b, h, q, k: s + bias4[b, h, q, k],
    "partial index": lambda s, b, h, q, k: s + bias4[b][h][q, k] + bias4[0][h, q][k],
    "mixed index": lambda s, b, h, q, k: s + bias4[b, :, q, k][1] + bias4[..., q, k][b, 0],
    "none index": lambda s, b, h, q, k: s + bias2[q, None, k][0] + bias2[None, q][0, k],
    "by data": lambda s, b, h, q, k: s + bias2[which[b, q], k],
    "negative index": lambda s, b, h, q, k: s + relative[q - k] + bias1[-1],
    "permuted": lambda s, b, h, q, k: s + bias2.t()[k, q] + bias4.permute(3, 2, 1, 0)[k, q, h, b],
    "flat": lambda s, b, h, q, k: s + bias2.view(-1)[q * KV + k] + bias2.flatten()[q - k],
    "unsqueezed": lambda s, b, h, q, k: s + bias1.unsqueeze(0).expand(4, -1)[b, h],
    "select": lambda s, b, h, q, k: (
        s + bias4.select(1, 2)[b, q, k] + bias2[1:, ::2][q - 1, k // 2]
    ),
    "rope": lambda s, b, h, q, k: s + (rope_q[b, h, q] * rope_k[b, 0, k]).sum(),
    "dot": lambda s, b, h, q, k: s + torch.dot(rope_q[b, h, q], rope_k[b, 0, k]),
    "at": lambda s, b, h, q, k: s + rope_q[b, h, q] @ rope_k[b, 0, k],
    "matrix": lambda s, b, h, q, k: s + (rope_q[b, h, :4] @ rope_k[b, 0, k]).relu().amax(),
    "linear": lambda s, b, h, q, k: s + F.linear(rope_q[b, h, q, :4], rope_k[0, 0, :5, :4]).mean(),
    "stack": lambda s, b, h, q, k: torch.stack([s, s * 2, -s]).amax() + torch.stack([s, s])[q % 2],
    "mean": lambda s, b, h, q, k: s + rope_q[b, h].mean(0)[3] + rope_q[b, h, q].prod(),
    "softcap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "alibi": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / H)),
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "floor": lambda s, b, h, q, k: s + (k - q) // 3 + (k - q) % 4 + (q - k) % -3,
    "trunc": lambda s, b, h, q, k: (
        s + torch.div(k - q, 3, rounding_mode="trunc") + torch.fmod(q - k, 3)
    ),
    "float floor": lambda s, b, h, q, k: s // 0.7 + s % 0.6,
    "powers": lambda s, b, h, q, k: s**2 + s**3 + s.abs() ** 0.5 + 2**q + 1 / (1 + s**2),
    "casts": lambda s, b, h, q, k: (
        s.half().float() + q.float() + s.to(torch.int32) + (q > 2).long()
    ),
    "constant tensor": lambda s, b, h, q, k: (
        s * torch.tensor(0.5) + torch.tensor([1.0, 2.0, 3.0])[h]
    ),
    "zero-d capture": lambda s, b, h, q, k: s * temperature,
    "half capture": lambda s, b, h, q, k: s * half[h] + half[h] * 1.5,
    "parameter": lambda s, b, h, q, k: s * learned[h],
    "python maths": lambda s, b, h, q, k: s * math.sqrt(2.0) + math.pi * gain + window,
    "numpy scalar": lambda s, b, h, q, k: s * scale64 + np.float32(2.0) * s,
    "captured twice": lambda s, b, h, q, k: s + bias1[h] * bias1[b],
    "unused capture": lambda s, b, h, q, k: s + 0 * (bias1[h] > 0),
    "nan to num": lambda s, b, h, q, k: torch.nan_to_num(torch.log(s)),
    "clamp": lambda s, b, h, q, k: s.clamp(-1, 1) + torch.clamp(q - k, max=2) + s.clamp_min(0),
    "transcendental": lambda s, b, h, q, k: (
        torch.atan2(s, q + 1.0) + torch.erf(s) + torch.log1p(s.abs())
    ),
    "rounding": lambda s, b, h, q, k: (
        s.floor() + s.ceil() + s.round() + s.trunc() + s.sign() + q.floor()
    ),
    "silu": lambda s, b, h, q, k: F.silu(s),
    "gelu": lambda s, b, h, q, k: F.gelu(s) + F.gelu(s, approximate="tanh"),
    "softplus": lambda s, b, h, q, k: F.softplus(s) + F.leaky_relu(s) + F.relu(s) + F.elu(s),
    "sigmoid": lambda s, b, h, q, k: F.logsigmoid(s) + F.hardtanh(s) + F.relu6(s) + F.mish(s),
    "masked fill": lambda s, b, h, q, k: s.masked_fill(k > q, -1e4),
    "gather": lambda s, b, h, q, k: s + torch.index_select(bias1, 0, h)[0],
    "loop": lambda s, b, h, q, k: sum((s * i for i in range(4)), s),
    "factories": lambda s, b, h, q, k: (
        s + s.new_ones([]) + torch.zeros(()) + torch.ones_like(s) + torch.full((), 3)
    ),
    "arange": lambda s, b, h, q, k: s + (torch.arange(5) * q).sum(),
    "long slices": lambda s, b, h, q, k: (
        s * long[200:][k] + long[::3][q - k] + long.split(150)[1][h]
    ),
    "long places": lambda s, b, h, q, k: (
        s + long.roll(2)[q] + torch.arange(400, 7, -3)[k] + long.view(15, 20).tril(2)[q, k]
    ),
}

MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "true": lambda b, h, q, k: torch.full_like(q, True, dtype=torch.bool),
    "document": lambda b, h, q, k: (doc[q] == doc[k]) & (q >= k),
    "and_masks": and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k < window),
    "or_masks": or_masks(lambda b, h, q, k: q < k, lambda b, h, q, k: q - k < window),
    "logical": lambda b, h, q, k: torch.logical_or(q >= k, torch.logical_not(b == h)),
    "bits": lambda b, h, q, k: ((q << 1) ^ (k >> 1) | 5) & 3 == ~q & 1,
    "floats": lambda b, h, q, k: (q - k).float() * 0.5 != 0,
    "isin": lambda b, h, q, k: torch.isin(q, torch.tensor([1, 2])),
    "any": lambda b, h, q, k: (doc[:4] == doc[k]).any() | (torch.stack([q, k]) > 2).all(),
    "bools": lambda b, h, q, k: (q > k) * (q > 2) + (k > 3) ^ True,
    "nan": lambda b, h, q, k: torch.isnan(bias1[h]) | ~torch.isfinite(bias1[h]),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", SCORES)
def test_score_mod_means_the_same(name):
    check(SCORES[name])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", MASKS)
def test_mask_mod_means_the_same(name):
    check(MASKS[name], "mask")


class Softcap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cap):
        ctx.save_for_backward(x)
        return torch.tanh(x / cap) * cap

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def nested(w):
    def outer(t):
        def inner(g):
            return lambda s, b, h, q, k: torch.where(q - k < w, s * g + t[h], s)

        return inner

    return outer(bias1)(0.5)


class Callable:
    def __init__(self):
        self.table, self.gain = bias1, 0.5

    def __call__(self, s, b, h, q, k):
        return s + self.table[h] * self.gain

    def method(self, s, b, h, q, k):
        return self(s, b, h, q, k) * 2


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(seeded(H))
        self.inner = torch.nn.Linear(1, 1)
        self.register_buffer("offset", torch.tensor(2.0))

    def forward(self, s, b, h, q, k):
        return self.inner((s * self.weight[h]).view(1))[0] + self.offset


def many(s, b, h, q, k, table, *, gain):
    return s + table[h] * gain


@pytest.mark.parametrize(
    "fn",
    [
        nested(3),
        Callable(),
        Callable().method,
        Module(),
        functools.partial(many, table=bias1, gain=0.5),
        functools.partial(lambda t, s, b, h, q, k: s + t[h], bias1),
        lambda s, b, h, q, k: s + Callable().table[h],
    ],
    ids=["nested", "object", "method", "module", "partial", "positional partial", "built inside"],
)
def test_every_kind_of_callable(fn):
    check(fn)


def test_custom_autograd_function_is_read_by_its_forward():
    def mod(s, b, h, q, k):
        return Softcap.apply(s, 20.0)

    torch.testing.assert_close(ours(mod, "score"), 20 * torch.tanh(grid()["score"] / 20))


def test_out_of_range_reads_zero():
    bound = bind(lambda s, b, h, q, k: bias1[q], "score")
    result = evaluate(bound.mod, {"q_idx": torch.tensor([0, 2, 3, -1, -4])}, bound.tensors, ())
    expected = torch.stack([bias1[0], bias1[2], torch.tensor(0.0), bias1[2], torch.tensor(0.0)])
    assert torch.equal(result, expected)


def test_printed_source_reads_as_torch():
    source = to_torch(bind(lambda b, h, q, k: q >= k, "mask").mod.expr)
    assert "t0 = torch.le(kv_idx, q_idx)" in source


def test_unrolled_sums_are_not_deep_recursion():
    wide = seeded(4, 128)
    check(lambda s, b, h, q, k: s + (wide[b] * wide[h]).sum())
