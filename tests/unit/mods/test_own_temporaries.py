"""A mod may change tensors that it made as a whole: `causal &= …`, `x += 1`, `out=`.

It was refused as a change of "its inputs or captured tensors", in create_mac_block_mask of
lucidrains, and so were operations that torch composes of writes, which the user never wrote.
Writes to a part of a tensor, as `row[k] = s`, are left to torch's own kernel.
"""

import pytest
import torch
import torch.nn.functional as F

from flexattn import create_block_mask, flex_attention
from flexattn.errors import NoKernelError
from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import bind
from flexattn.mods.outside import evaluated

L, S = 5, 7
TABLE = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) + 0.1
BOUNDS = torch.tensor([2, 5, 5, 6])


def augmented(s, b, h, q, k):
    i = q.clone()
    i //= 2
    i %= 3
    i |= 1
    kept = q >= k
    kept &= q - k < 4
    kept |= k < 2
    kept ^= q == 2
    return torch.where(kept, s, i)


def methods(s, b, h, q, k):
    x = s.clone()
    for _ in range(3):
        x.mul_(0.5).add_(k)
    x.relu_().sub_(1.0)
    return x.neg_()


def out(s, b, h, q, k):
    x = torch.empty_like(s)
    torch.add(s, 1, out=x)
    torch.mul(x, x, out=x)
    return x


def elements(s, b, h, q, k):
    row = TABLE[q % 8].clone()
    row[k % 8] = s
    row[0] += 1
    row[-1] *= 2
    row[1:3] = row[2:4].clone()
    row[2:].sub_(1)
    return row.sum() + row[q % 8]


def square(s, b, h, q, k):
    x = TABLE.clone()
    x[q % 8, k % 8] = s
    x[:, k % 8] += 1
    x[q % 8] = 2.0
    x.T[1] = s
    x[..., 2] = s
    x[None, q % 8, 1] = 5
    return x.mean() + x[k % 8, q % 8]


def literal(s, b, h, q, k):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    x[x > 2] = 0
    x.masked_fill_(x == 1, s)
    x.index_fill_(0, (q % 4).view(1), 2.0)
    x.index_add_(0, (k % 4).view(1), s.view(1))
    return x.clamp_(max=2.5).sum()


def views(s, b, h, q, k):
    x = s * 1
    y = x.view(1)
    wide = y.expand(3)
    y += 1
    turned = y.unsqueeze(0).t()
    turned *= 2
    return x + wide.sum()


def viewed_before(s, b, h, q, k):
    x = s * 1
    y = x.view(1)
    x += 1
    return y[0]


def padded(s, b, h, q, k):
    return s + F.pad(TABLE[q % 8], (1, 1))[0]


def parts(s, b, h, q, k):
    one, other = torch.tensor([0.0, 0.0]).unbind()
    one += s
    halves = TABLE[q % 8].clone().chunk(2)
    halves[1].add_(s)
    return one + other + halves[1].sum()


def gathered(s, b, h, q, k):
    x = torch.zeros(4)
    x.index_put_((torch.stack([q % 4, k % 4]),), torch.stack([s, s * 2]), accumulate=True)
    x[[1, 2]] = s
    y = torch.zeros(2, 3)
    y.T[k % 3] = torch.stack([s, s + 1])
    y[:, (q % 3).view(1)] += 1
    y[torch.tensor(1)] = 4.0
    y.copy_(y * 2)
    return x.sum() + x[0] + y.sum() + y[0, 1]


def composed(s, b, h, q, k):
    near = torch.isclose(s, s * 1.000001).float()
    unit = F.normalize(TABLE[q % 8], dim=0).sum() + F.rms_norm(TABLE[q % 8], (8,))[0]
    cosine = F.cosine_similarity(TABLE[q % 8], TABLE[k % 8], dim=0)
    return s + near + unit + cosine


def beside(s, b, h, q, k):
    """No write: what was refused, or ended in torch's or our own words, in the same reports."""
    places = torch.bucketize(k, BOUNDS) * 2 - torch.bucketize(q, BOUNDS, right=True)
    places += torch.searchsorted(BOUNDS, k, side="right", out_int32=True)
    rounded = torch.round(s, decimals=1) + torch.round(s * 100, decimals=-1)
    nan = torch.bucketize(s * float("nan"), torch.tensor([-0.5, 0.0, 1.0]))
    return s + places + rounded + nan + torch.bucketize(s, TABLE[0, :1])


MODS = [augmented, methods, out, composed, beside]
LEFT_TO_TORCH = [elements, square, literal, views, viewed_before, parts, gathered, padded]


def one_by_one(fn, scores, q, k):
    zero = torch.tensor(0)
    rows = [[fn(scores[i, j], zero, zero, q[i, j], k[i, j]) for j in range(S)] for i in range(L)]
    return torch.stack([torch.stack(row) for row in rows])


@pytest.mark.parametrize("fn", MODS, ids=lambda fn: fn.__name__)
def test_a_mod_that_writes_means_what_torch_computes(fn):
    scores = torch.randn(L, S, generator=torch.Generator().manual_seed(1))
    q, k = torch.meshgrid(torch.arange(L), torch.arange(S), indexing="ij")
    before = TABLE.clone()
    bound = bind(fn, "score")
    env = {"score": scores, "q_idx": q, "kv_idx": k}
    found = evaluated([bound.mod.expr], bound.tensors, env)[bound.mod.expr].value
    torch.testing.assert_close(found, one_by_one(fn, scores, q, k), rtol=1e-5, atol=1e-5)
    assert torch.equal(TABLE, before)


@pytest.mark.parametrize("fn", LEFT_TO_TORCH, ids=lambda fn: fn.__name__)
def test_a_write_to_a_part_of_a_tensor_has_no_kernel(fn):
    before = TABLE.clone()
    with pytest.raises(NoKernelError, match="own_temporaries"):
        bind(fn, "score")
    assert torch.equal(TABLE, before)


def test_a_write_is_not_forgotten_where_a_number_becomes_an_argument():
    def mod(gain):
        def call(s, b, h, q, k):
            x = s.clone()
            x += gain * k
            return x

        return call

    scores = torch.ones(3)
    found = []
    for gain in (2, 3, 5):
        bound = bind(mod(gain), "score")
        env = {"score": scores, "kv_idx": torch.arange(3)}
        found.append(evaluate(bound.mod, env, bound.tensors, bound.scalars).tolist())
    assert found == [[1, 3, 5], [1, 4, 7], [1, 6, 11]]


def memory(b, h, q, k):
    """lucidrains/titans-pytorch's create_mac_block_mask, in short."""
    causal = q >= k
    causal &= q - k < 8
    return (k < 14) | causal


POSITIONS = torch.arange(50)
APART = POSITIONS[:, None] - POSITIONS
KEPT = (POSITIONS < 14) | (APART >= 0) & (APART < 8)


def test_a_call_with_a_mask_that_writes():
    q, k, v = torch.randn(3, 1, 2, 50, 16, generator=torch.Generator().manual_seed(0))
    lists = create_block_mask(memory, None, None, 50, 50, device="cpu", BLOCK_SIZE=16)

    def twice(s, b, h, i, j):
        x = s.clone()
        x += s
        return x

    found = flex_attention(q, k, v, score_mod=twice, block_mask=lists)
    expected = F.scaled_dot_product_attention(2 * q, k, v, attn_mask=KEPT)
    torch.testing.assert_close(found, expected)
