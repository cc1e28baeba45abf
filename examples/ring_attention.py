"""Ring attention: a sequence in shards, one a process, whose keys go round.

    torchrun --nproc-per-node 2 examples/ring_attention.py

Every process holds the queries, keys and values of its own part of the sequence. In each step its
queries attend to the keys that it holds, whose results are merged by their log-sum-exps, and the
keys go on to the next process. Masks and score mods see positions in the whole sequence. What
autograd sees is plain torch around calls: the gradients of keys go round the other way.
Method: Ring Attention (Liu et al., arXiv 2310.01889).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flexattn
from flexattn import AuxRequest, MaskMod, ScoreMod


class Rotate(torch.autograd.Function):
    """Sends a tensor `by` processes on, and receives that of the process as far behind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: int) -> Tensor:
        ctx.by = by
        rank, world = dist.get_rank(), dist.get_world_size()
        x, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        requests = [
            dist.P2POp(dist.isend, x, (rank + by) % world),
            dist.P2POp(dist.irecv, received, (rank - by) % world),
        ]
        for request in dist.batch_isend_irecv(requests):
            request.wait()
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Rotate.apply(grad, -ctx.by), None


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) over the keys of both; each row of `one` has a key."""
    lse = torch.logaddexp(one[1], other[1])
    parts = [out.float() * torch.exp(each - lse)[..., None] for out, each in (one, other)]
    return parts[0] + parts[1], lse


class RingAttention:
    """Attention of [B, H, length, D] shards, the part of each process in the order of ranks.

    mask_mod, score_mod: in positions of the whole sequence; a row sees a key of its own shard,
    as itself. Masks are made once, here; heads of keys may be fewer than those of queries.
    """

    def __init__(
        self,
        length: int,
        mask_mod: MaskMod,
        score_mod: ScoreMod | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.length = length
        self.steps = [
            self._step((self.rank - step) % self.world, mask_mod, score_mod, device)
            for step in range(self.world)
        ]

    def _step(
        self,
        source: int,
        mask_mod: MaskMod,
        score_mod: ScoreMod | None,
        device: torch.device | str,
    ) -> tuple[ScoreMod | None, BlockMask]:
        """The mods of these queries beside the keys of process `source`."""
        row, key = self.rank * self.length, source * self.length

        def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return mask_mod(b, h, q_idx + row, kv_idx + key)

        def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            assert score_mod is not None
            return score_mod(s, b, h, q_idx + row, kv_idx + key)

        size = self.length
        blocks = flexattn.create_block_mask(mask, None, None, size, size, device)
        return (None if score_mod is None else score), blocks

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out in q's dtype, and lse [B, H, length] of the rows of this process."""
        width, found = k.shape[-1], None
        # In one message. Every process takes every step, also where its mask is empty: so all
        # send, and in the backward all receive.
        going = torch.cat([k, v], -1)
        for step, (score_mod, mask) in enumerate(self.steps):
            if step:
                going = Rotate.apply(going, 1)
            keys, values = going[..., :width], going[..., width:]
            out, aux = flexattn.flex_attention(
                q, keys, values, score_mod, mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
            )
            found = (out, aux.lse) if found is None else merge(found, (out, aux.lse))
        assert found is not None
        return found[0].to(q.dtype), found[1]


def compare(device: torch.device, length: int = 192) -> float:
    """The largest difference of output, lse and gradients to one process with all keys."""
    rank, world = dist.get_rank(), dist.get_world_size()
    documents = torch.arange(world * length, device=device) // 150

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (documents[q_idx] == documents[kv_idx]) & (q_idx >= kv_idx)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return 20 * torch.tanh(s / 20) - (q_idx - kv_idx) / 64

    torch.manual_seed(0)  # the same whole sequence everywhere
    size = world * length
    whole = [torch.randn(2, heads, size, 32, device=device) for heads in (4, 2, 2)]
    ring = RingAttention(length, mask_mod, score_mod, device)
    blocks = flexattn.create_block_mask(mask_mod, None, None, size, size, device)

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flexattn.flex_attention(
            q, k, v, score_mod, blocks, enable_gqa=True, return_lse=True
        )

    here = slice(rank * length, (rank + 1) * length)
    results = []
    for attend, tensors in ((ring, [x[:, :, here] for x in whole]), (alone, whole)):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out, lse = attend(*leaves)
        (out.square().sum() + lse.square().sum()).backward()
        results.append([out, lse, *(x.grad for x in leaves)])
    return max(
        float((mine - other[:, :, here]).abs().max().detach())
        for mine, other in zip(*results, strict=True)
    )


def main() -> None:
    """One process of the ring."""
    cuda = torch.cuda.is_available() and torch.cuda.device_count() > 1
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    error = compare(device)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: largest difference {error:.1e}")
    dist.destroy_process_group()
    assert error < (5e-2 if cuda else 1e-4), error


if __name__ == "__main__":
    main()
