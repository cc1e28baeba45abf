"""Stable Diffusion 2.1 self-attention, (4096, 64), on a NeuronCore that is not there.

AWS's tutorial "fused self attention" computes this case with fixed tiles of 128 x 128. Here our
template with that tiling and with every other of its space goes through the cost model, the best
config's kernel is run in the strict interpreter and held to the accuracy gate, and the arithmetic
behind the ranking is printed. Every time is the model's (flexattn/neuron/model.py): nothing was
measured on a device, and the tutorial's own kernel is not what is compared.

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
from flexattn.neuron.family import target_survey
from flexattn.neuron.model import nki_estimate
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


def compare(target, mixed, is_causal):
    """(the task, the tutorial's tiling, the best config) with their estimates."""
    task = task_of(target, "float32" if mixed else "bfloat16", is_causal)
    configs = [
        replace(each, mixed=mixed) for each in target_survey(task.problem, target, "quick").configs
    ]
    mask = configs[0].mask
    tutorial = NkiPrefillConfig(128, 128, LENGTH, 1, 1, 1, mask=mask, mixed=mixed)
    ranked = sorted(
        ((nki_estimate(task, each, target), each) for each in configs), key=lambda x: x[0].time
    )
    return task, (nki_estimate(task, tutorial, target), tutorial), ranked[0]


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


def show(name, found):
    guess, config = found
    busy = "  ".join(f"{engine} {us:.0f}" for engine, us in guess.busy)
    counts = dict(guess.counts)
    issued = "  ".join(
        f"{e} {counts.get(f'{e} instructions', 0)}" for e in ("tensor", "vector", "scalar")
    )
    print(
        f"  {name:<9} {guess.time:8.1f} us in source order, {guess.bound:7.1f} us if all overlaps"
    )
    print(f"            {describe(config)}")
    print(f"            busy, us: {busy}")
    print(f"            instructions of a sample: {issued}")
    print(
        f"            SBUF {guess.sbuf_bytes} bytes of a partition, PSUM {guess.psum_banks} banks"
    )


def main():
    target = sys.argv[1] if len(sys.argv) > 1 else "trn2"
    for mixed in (False, True):
        for is_causal in (False, True):
            words = "float32, products in bfloat16" if mixed else "bfloat16"
            print(f"{target}, {LENGTH} x {DIM}, {words}{', causal' if is_causal else ''}")
            task, tutorial, best = compare(target, mixed, is_causal)
            show("tutorial", tutorial)
            show("tuned", best)
            times, bounds = tutorial[0].time / best[0].time, tutorial[0].bound / best[0].bound
            ours, theirs = best[0], tutorial[0]
            print(
                f"  ratio     {theirs.time:.1f} / {ours.time:.1f} = {times:.2f} in source order, "
                f"{theirs.bound:.1f} / {ours.bound:.1f} = {bounds:.2f} if all overlaps"
            )
            verdict, seconds = gated(task, best[1], target)
            print(f"  interpreted in {seconds:.1f} s: {verdict.message().splitlines()[0]}\n")


if __name__ == "__main__":
    main()
