"""NKI kernels run in the interpreter and held to the oracle: what the tests of Neuron share."""

import torch

from flexattn.device import NEURON
from flexattn.device.neuroncore import CORES
from flexattn.measure.task import Task
from flexattn.mods import bind
from flexattn.neuron.config import memory_of
from flexattn.neuron.family import default_config
from flexattn.neuron.interpreter.interpret import interpret
from flexattn.neuron.run import prepare
from flexattn.problem import DTYPES, Shape, Sparsity, make_problem
from flexattn.records.record import Policy
from flexattn.reference import Precision, attention
from flexattn.runtime.launch import Lists
from flexattn.verify.gate import judge
from tests.support import block_mask, inputs

TARGETS = tuple(CORES)
# Lines that begin a kernel of one instruction: a tile of each dtype and memory.
TILES = """
f = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.sbuf)
g = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.sbuf)
h = nl.ndarray((128, 512), dtype=nl.bfloat16, buffer=nl.sbuf)
c = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
u = nl.ndarray((128, 512), dtype=nl.uint8, buffer=nl.sbuf)
p = nl.ndarray((128, 1024), dtype=nl.float32, buffer=nl.psum)
"""
MATMUL = "nisa.nc_matmul(dst={}, stationary={}, moving={}, accumulate={})"
HEADER = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def kernel(x):
    out = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.shared_hbm)
"""


def kernel_of(body):
    """A kernel's source that runs these lines on the HBM tensor x, [4, 8] float32."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return f"{HEADER}{lines}    return out\n"


def run_lines(body, target="trn2", x=None, **options):
    """Run lines of NKI; `out` may be given anew as another tensor in nl.shared_hbm."""
    x = torch.arange(32.0).reshape(4, 8) if x is None else x
    return interpret(kernel_of(body), (x,), CORES[target], **options)


def problem_of(
    kind, shape, dtype=torch.bfloat16, score_mod=None, mask_mod=None, block=(128, 128), **options
):
    """A problem without tensors, its mods bound: (problem, score, mask)."""
    score, mask = bind(score_mod, "score"), bind(mask_mod, "mask")
    sparsity = None if mask is None else Sparsity(*block, True, False)
    problem = make_problem(kind, DTYPES[dtype], shape, score, mask, sparsity, **options)
    return problem, score, mask


def task_of(kind, shape, target="trn2", **mods):
    """A task of a problem without tensors, as `problem_of` makes it."""
    problem, score, mask = problem_of(kind, shape, **mods)
    policy = Policy(False, False, 1, 0.0)
    return Task("t", problem, NEURON[target], policy, 0.125, score, mask)


def assert_memory_counted(kind, configs, built, **statistics):
    """The formula that decides feasibility and a kernel's allocations agree to the byte."""
    mods = {"score_mod": built.score_mod, "mask_mod": built.mask_mod}
    problem, score, mask = problem_of(
        kind, Shape(1, 4, 2, 131, 259, 192, 64), **mods, **statistics
    )
    q, k, v = inputs(1, 4, 2, 131, 259, 192, 64, dtype=torch.bfloat16)
    for config in configs:
        prepared = prepare(problem, config, "trn2", scale=1.0, score=score, mask=mask)
        run = prepared.interpret(q, k, v).runs[0]
        found = memory_of(problem, config, dict(prepared.source.tiles))
        assert found == (run.sbuf_bytes, run.psum_banks)


def check(
    B, Hq, Hkv, L, S, D=16, Dv=None, *, dtype=torch.float32, kind="prefill", target="trn2",
    config=None, score_mod=None, mask_mod=None, block=128, Bkv=None, scale=None,
    statistics=(True, True),
):  # fmt: skip
    """Run attention in the interpreter, hold it to the oracle by the gate; returns the outputs.

    statistics: whether lse and max_scores are asked for.
    """
    q, k, v = inputs(B, Hq, Hkv, L, S, D, Dv, Bkv=Bkv, dtype=dtype)
    blocks = block_mask(mask_mod, q, k, block)
    score, mask = bind(score_mod, "score"), bind(mask_mod, "mask")
    lists = sparsity = None
    if blocks is not None:
        lists = Lists.of(blocks)
        sparsity = lists.sparsity(blocks.BLOCK_SIZE, Hq // Hkv)
    scale = D**-0.5 if scale is None else scale
    problem = make_problem(
        kind, DTYPES[dtype], Shape(B, Hq, Hkv, L, S, D, Dv or D), score, mask, sparsity,
        lse=statistics[0], max_scores=statistics[1], positive_scale=scale > 0,
    )  # fmt: skip
    config = config or default_config(problem, target)
    prepared = prepare(problem, config, target, scale=scale, score=score, mask=mask, lists=lists)
    got = prepared.interpret(q, k, v)
    call = {"score_mod": score_mod, "block_mask": blocks, "scale": scale}
    oracle = attention(q, k, v, precision=Precision.ORACLE, **call)
    rounded = attention(q, k, v, precision=Precision.ROUNDED, **call)
    verdict = judge((got.out, got.lse, got.max_scores), oracle, rounded, dtype)
    assert verdict.passed, verdict.message()
    return got
