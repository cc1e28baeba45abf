"""Inputs, a judged run and poison: what the tests of real kernels share.

`assert_accurate` is the only tolerance here: the gate that also guards the tuner.
"""

import functools
import math
from collections import Counter

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torch.utils._python_dispatch import TorchDispatchMode

import flexattn
from flexattn.problem import out_dtype
from flexattn.problem.inputs import Descales
from flexattn.problem.mask_lists import mask_class
from flexattn.reference import Precision, Reference, attention
from flexattn.verify.gate import judge

PREFILL, DECODE = {"BACKEND": "TRITON"}, {"BACKEND": "TRITON_DECODE"}
KINDS = {"prefill": PREFILL, "decode": DECODE}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

ON_SM_90 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="the template is for sm_90",
)


def inputs(
    B=2, Hq=3, Hkv=1, L=37, S=53, D=16, Dv=None, *, Bkv=None, dtype=torch.float32, device="cpu"
):
    """q [B, Hq, L, D], k [Bkv or B, Hkv, S, D] and v [.., Dv or D]: the same on every device."""
    draw = torch.Generator().manual_seed(B + 3 * Hq + 5 * L + 7 * S + 11 * D)
    kv = (B if Bkv is None else Bkv, Hkv, S)
    shapes = (B, Hq, L, D), (*kv, D), (*kv, D if Dv is None else Dv)
    return [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]


def tensors(*sizes, dtype=torch.bfloat16, **more):
    """Those on a GPU, in 16 bits."""
    return inputs(*sizes, dtype=dtype, device="cuda", **more)


def sinks(heads, dtype=torch.float32, device="cpu"):
    """A logit for each head, some above every score and some below: the same on every device."""
    draw = torch.Generator().manual_seed(heads)
    return (3 * torch.randn(heads, generator=draw)).to(device, dtype)


def block_mask(mask_mod, q, k, block_size=128, per_batch=True, per_head=True):
    """The block mask of a mask_mod for q and k; None for None."""
    if mask_mod is None:
        return None
    B, H = q.shape[0] if per_batch else None, q.shape[1] if per_head else None
    L, S = q.shape[2], k.shape[2]
    return flexattn.create_block_mask(mask_mod, B, H, L, S, q.device, block_size)


def call_of(case, *sizes, dtype=torch.float32, device="cpu", block=128):
    """q, k and v of B, Hq, Hkv, L, S and perhaps D, and the mods of a case by names of a call."""
    built = case.make(*sizes[:5], dtype=dtype, device=device)
    q, k, v = inputs(*sizes, dtype=dtype, device=device)
    mask = block_mask(built.mask_mod, q, k, block)
    return (q, k, v), {"score_mod": built.score_mod, "block_mask": mask}


def run(q, k, v, *, kernel_options=None, max_scores=True, **call):
    """(out, lse, max_scores) of flexattn; without max_scores None stands for them."""
    out, aux = flexattn.flex_attention(
        q, k, v, enable_gqa=True, kernel_options=kernel_options,
        return_aux=AuxRequest(lse=True, max_scores=max_scores), **call,
    )  # fmt: skip
    return Reference(out, aux.lse, aux.max_scores)


def assert_accurate(q, k, v, *, kernel_options=None, max_scores=True, **call):
    """Run flexattn and hold out, lse and max_scores to the oracle; returns what it gave."""
    with torch.no_grad():
        got = run(q, k, v, kernel_options=kernel_options, max_scores=max_scores, **call)
        assert_judged(got, q, k, v, **call)
    return got


def assert_judged(got, q, k, v, **call):
    """Hold (out, lse, max_scores) to the float64 oracle, within the reference run's budget."""
    factors = Descales(*(call.pop(f"{x}_descale", None) for x in "qkv"))
    oracle, rounded = (
        attention(q, k, v, descales=factors, precision=precision, **call)
        for precision in (Precision.ORACLE, Precision.ROUNDED)
    )
    verdict = judge(got, oracle, rounded, out_dtype(q.dtype))
    assert verdict.passed, verdict.message()


def captured(run):
    """A CUDA graph of a function, which ran before on another stream, and what it returned."""
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


def assert_close_as(got, exact, other):
    """Hold any result to the accuracy rule: its error beside that of another run of its dtype."""
    triples = [(x, None, None) for x in (got, exact.double(), other)]
    verdict = judge(*triples, got.dtype)
    assert verdict.passed, verdict.message()


def heads_inside(x):
    """[B, S, H, D] memory seen as [B, H, S, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def spaced(x):
    """Every second element of the last dimension, NaN between them."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)
    wide[..., ::2] = x
    return wide[..., ::2]


def sliced(x):
    """A part of a wider last dimension, at an odd offset, NaN beside it."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 7), math.nan)
    wide[..., 3:-4] = x
    return wide[..., 3:-4]


def length_inside(x):
    """The length has stride 1, the head dimension has not."""
    return x.mT.contiguous().mT


def all_reversed(x):
    """The batch has stride 1."""
    return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


LAYOUTS = {f.__name__: f for f in (heads_inside, spaced, sliced, length_inside, all_reversed)}


def poison(monkeypatch):
    """Make torch.empty and its kin hand out memory full of NaN, or of a large odd integer."""

    def poisoned(allocate):
        @functools.wraps(allocate)
        def call(*args, **kwargs):
            memory = allocate(*args, **kwargs)
            if memory.is_floating_point():
                return memory.fill_(math.nan)
            return memory if memory.dtype == torch.bool else memory.fill_(101)

        return call

    for name in ("empty", "empty_strided", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


def lists_of(mask):
    """A BlockMask's listed blocks: {"kv": [[key block, ...] for each row], "full_kv": ...}."""
    found = {}
    for name in ("kv", "full_kv"):
        counts, indices = getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices")
        if counts is None:
            found[name] = None
            continue
        rows = zip(counts.flatten().tolist(), indices.flatten(0, -2).tolist(), strict=True)
        found[name] = [tuple(counts.shape), *(row[:count] for count, row in rows)]
    return found


def random_runs(mask_mod, heads, q_len, kv_len, draw):
    """A BlockMask of batch 2 whose blocks of 16 join up, between ends in any order.

    Some rows have no blocks, or none that are full.
    """
    blocks = kv_len // 16
    ends = torch.randint(0, blocks + 1, (2, heads, q_len // 16, 4), generator=draw).sort(-1).values
    columns = torch.arange(blocks)
    full = (columns >= ends[..., 1:2]) & (columns < ends[..., 2:3])
    listed = (columns >= ends[..., :1]) & (columns < ends[..., 3:])
    lists = []
    for dense in (listed & ~full, full):
        order = torch.argsort(dense.int(), dim=-1, descending=True, stable=True)
        lists += [dense.sum(-1).int(), order.int()]
    mask = BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=(16, 16), mask_mod=mask_mod, seq_lengths=(q_len, kv_len)
    )
    mask_class(mask)
    return mask


class Operations(TorchDispatchMode):
    """Operations of torch that are no views, counted by name."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.found[func.name().removeprefix("aten::")] += 1
        return func(*args, **kwargs or {})
