"""Gradients held to float64's by the accuracy rule: what the tests of backwards share."""

import torch
from torch.nn.attention.flex_attention import AuxRequest

import flexattn
from flexattn.problem.inputs import Dropout
from flexattn.reference import Precision, attention
from tests.support import assert_close_as, block_mask

SEED = 11


def drawn(p, device):
    """What a call drops that is made right after torch.manual_seed(SEED)."""
    torch.manual_seed(SEED)
    dropout = Dropout.of(p)
    return dropout and dropout.drawn(torch.device(device))


def cotangents(q, v, lse):
    """Gradients of out [B, Hq, L, Ev], and of lse where asked: the same on every device."""
    draw = torch.Generator().manual_seed(q.shape[2])
    shape = (*q.shape[:3], v.shape[-1])
    dout = torch.randn(shape, generator=draw).to(q.device, q.dtype)
    return dout, torch.randn(shape[:3], generator=draw).to(q.device) if lse else None


def gradients(attend, inputs, grads):
    """Those of inputs, from the gradients of (out, lse); zeros where nothing depends on one."""
    out, lse = attend(*inputs)
    pairs = [(x, g.to(x.dtype)) for x, g in zip((out, lse), grads, strict=True) if g is not None]
    found = torch.autograd.grad(
        [x for x, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True
    )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def assert_memory(q, k, v, **call):
    """On a GPU: gradients take themselves, lse, delta, and at most one dq of float32."""
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flexattn.flex_attention(*leaves, **call)
    dout = torch.randn_like(out)
    torch.autograd.grad(out, leaves, dout, retain_graph=True)  # what is compiled stays
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    statistics = 4 * out.numel() // out.shape[-1]
    assert peak <= sum(g.nbytes for g in grads) + 2 * grads[0].nbytes + 4 * statistics + 2**20


def assert_gradients(q, k, v, **call):
    """Hold the gradients of q, k, v, sinks and tensors to the oracle's; returns them.

    call: as `compared` takes it.
    """
    found = compared(q, k, v, **call)
    for got, exact, rounded in found:
        assert_close_as(got, exact, rounded)
    return [got for got, _, _ in found]


def compared(
    q, k, v, *, make=None, tensors=(), mask_mod=None, block=16, lse=True, sinks=None,
    kernel_options=None, scale=None, dropout_p=0.0, chosen=None,
):  # fmt: skip
    """Of q, k, v, sinks and tensors: ours, the oracle's and the reference run's gradients.

    make(*tensors) gives the score_mod that captures them. lse: its gradient comes in, too.
    dropout_p: the oracle drops the same weights. chosen: our block_mask, of the same keys.
    """
    dropout = drawn(dropout_p, q.device)
    mask = block_mask(mask_mod, q, k, block)
    grads = cotangents(q, v, lse)
    given = [q, k, v, *([] if sinks is None else [sinks]), *tensors]

    def attend(run):
        def call(q, k, v, *rest):
            own = rest[0] if sinks is not None else None
            captured = rest[sinks is not None :]
            return run(q, k, v, None if make is None else make(*captured), own)

        return call

    def ours(q, k, v, score_mod, sinks):
        torch.manual_seed(SEED)
        out, aux = flexattn.flex_attention(
            q, k, v, score_mod, chosen or mask, scale, enable_gqa=True, sinks=sinks,
            kernel_options=kernel_options, return_aux=AuxRequest(lse=lse), dropout_p=dropout_p,
        )  # fmt: skip
        return out, aux.lse

    def plain(precision):
        def run(q, k, v, score_mod, sinks):
            found = attention(
                q, k, v, score_mod=score_mod, block_mask=mask, scale=scale, sinks=sinks,
                dropout=dropout, precision=precision,
            )  # fmt: skip
            return found.out, found.lse

        return run

    wide = [x.detach().double().requires_grad_() for x in given]
    leaves = [[x.detach().clone().requires_grad_() for x in given] for _ in range(2)]
    exact = gradients(attend(plain(Precision.ORACLE)), wide, grads)
    rounded = gradients(attend(plain(Precision.ROUNDED)), leaves[0], grads)
    got = gradients(attend(ours), leaves[1], grads)
    for x, found in zip(given, got, strict=True):
        assert found.dtype == x.dtype and found.shape == x.shape
    return list(zip(got, exact, rounded, strict=True))
