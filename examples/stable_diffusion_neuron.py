"""Stable Diffusion 2.1 self-attention, (4096, 64), on a NeuronCore that is not there.

AWS's tutorial "fused self attention" computes this case with fixed tiles of 128 x 128. Here our
template with that tiling, and with the config that a call uses, runs in the strict interpreter and
is held to the accuracy gate. Nothing is timed, and the tutorial's own kernel is not what runs.

    python examples/stable_diffusion_neuron.py [trn1|trn2|trn3]
"""

import sys
import time
from dataclasses import replace

import torch

from flexattn.block_mask.create import create_block_mask
from flexattn.catalogue import causal
from flexattn.device import NEURON
from flexattn.kernels.base.config import describe
from flexattn.measure.task import Task
from flexattn.mods import bind
from flexattn.neuron.config import NkiPrefillConfig
from flexattn.neuron.family import default_config
from flexattn.neuron.run import prepare
from flexattn.problem import Shape, make_problem
from flexattn.records.record import Policy
from flexattn.runtime.launch import Lists
from flexattn.verify.oracle import oracle

LENGTH, DIM, SCALE = 4096, 64, 0.125
SHAPE = Shape(1, 1, 1, LENGTH, LENGTH, DIM, DIM)


def task_of(target, dtype, is_causal):
    """The tutorial's call: one head, its scale of 1/8."""
    mask = lists = sparsity = None
    if is_causal:
        blocks = create_block_mask(causal, None, None, LENGTH, LENGTH, "cpu")
        mask, lists = bind(causal, "mask"), Lists.of(blocks)
        sparsity = lists.sparsity(blocks.BLOCK_SIZE, 1)
    problem = make_problem("prefill", dtype, SHAPE, None, mask, sparsity)
    return Task(
        "sd21", problem, NEURON[target], Policy(False, False, 1, 0.0), SCALE, None, mask, lists
    )


def gated(task, config, target):
    """Run the kernel on numbers; the verdict and the seconds it took on the CPU."""
    draw = torch.Generator().manual_seed(0)
    dtype = getattr(torch, task.problem.structure.dtype)
    q, k, v = (torch.randn(1, 1, LENGTH, DIM, generator=draw).to(dtype) for _ in range(3))
    begin = time.process_time()
    prepared = prepare(task.problem, config, target, scale=SCALE, mask=task.mask, lists=task.lists)
    out = prepared.interpret(q, k, v).out
    seconds = time.process_time() - begin
    if config.mixed:  # products of bfloat16: judged as such
        q, k, v, out = (each.to(torch.bfloat16) for each in (q, k, v, out))
    judge = oracle(q, k, v, SCALE, None, task.mask, task.lists, task.problem.structure.sparsity)
    return judge((out, None, None)), seconds


def main():
    target = sys.argv[1] if len(sys.argv) > 1 else "trn2"
    for mixed in (False, True):
        for is_causal in (False, True):
            words = "float32, products in bfloat16" if mixed else "bfloat16"
            print(f"{target}, {LENGTH} x {DIM}, {words}{', causal' if is_causal else ''}")
            task = task_of(target, "float32" if mixed else "bfloat16", is_causal)
            ours = replace(default_config(task.problem, target), mixed=mixed)
            tutorial = NkiPrefillConfig(128, 128, LENGTH, 1, 1, 1, mask=ours.mask, mixed=mixed)
            for name, config in (("tutorial", tutorial), ("default", ours)):
                verdict, seconds = gated(task, config, target)
                print(f"  {name:<9} {describe(config)}")
                print(f"            {seconds:.1f} s: {verdict.message().splitlines()[0]}")


if __name__ == "__main__":
    main()
