"""One of two ranks that train the example's GPT: python -m tests.training_rank RANK FILE.

Each kind of training is held to gradients that this process makes alone, of both ranks' batches.
"""

import os
import sys
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from examples.train_gpt import GPT, batches
from flexattn.frontend.autograd import GradCall
from tests.quick_interpreter import hurry

BATCHES = [next(batches(seed, 1, 21, "cpu")) for seed in range(2)]
_attend, ran = GradCall.attend, []


def counted(*arguments):
    ran.append(arguments)
    return _attend(*arguments)


def made(checkpointed=False):
    torch.manual_seed(0)
    model = GPT(16, 2, 1, reach=5)
    for block in model.blocks if checkpointed else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def alone():
    """Gradients by name of the mean of both ranks' losses, and this rank's loss."""
    model = made()
    losses = [model(*each) for each in BATCHES]
    (sum(losses) / 2).backward()
    return {name: x.grad for name, x in model.named_parameters()}, losses[dist.get_rank()].detach()


def ddp(model):
    return DistributedDataParallel(model)


def fsdp(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def main(rank, path):
    hurry()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    GradCall.attend = counted
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    wanted, known = alone()
    for wrap, checkpointed in ((ddp, False), (fsdp, False), (fsdp, True)):
        model = made(checkpointed)
        wrapped = wrap(model)
        ran.clear()
        loss = wrapped(*BATCHES[rank])
        loss.backward()
        assert ran, "kernels were differentiated"
        torch.testing.assert_close(loss.detach(), known)
        for name, x in model.named_parameters():
            grad = x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad
            assert grad.any(), name
            torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-6)
        print(wrap.__name__, "checkpointed" if checkpointed else "", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    # All is compared. Once in a while a process that leaves after FSDP ends in std::terminate, in
    # a thread of torch's that nobody joined.
    os._exit(0)
