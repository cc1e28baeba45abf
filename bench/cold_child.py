"""One fresh process of the cold-start bench: a first call with the time of each step before it.

The first call comes before any other work of flexattn's, as in a server that starts; what may be
counted as imports is timed apart. Run by `bench.cold`; prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

LENGTHS = {"prefill": 2048, "decode": 1}
KEYS = 2048
# Of tuning: what a cold start costs does not depend on how good the config is.
SECONDS = 2.0


def step(times: dict[str, float], name: str, since: float) -> float:
    """Note the seconds since then under a name; returns now."""
    now = time.perf_counter()
    times[name] = now - since
    return now


def inputs(kind: str) -> Any:
    """q [1, 32, length, 128], k and v [1, 8, keys, 128] in bfloat16, on the GPU."""
    import torch

    draw = torch.Generator("cuda").manual_seed(0)
    shapes = ((1, 32, LENGTHS[kind], 128), (1, 8, KEYS, 128), (1, 8, KEYS, 128))
    return [
        torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16) for shape in shapes
    ]


def run(kind: str, compiler: str) -> dict[str, Any]:
    """Seconds of each step up to the first output, and what had to be done for it."""
    times: dict[str, float] = {}
    at = time.perf_counter()
    import torch

    at = step(times, "import torch", at)
    import flexattn

    at = step(times, "import flexattn", at)
    q, k, v = inputs(kind)
    torch.cuda.synchronize()
    at = step(times, "CUDA context", at)
    if compiler != "none":
        # What make_fx and a compile import: 0 s where a directory makes both needless.
        import torch._dynamo
        import torch._inductor
        import triton.experimental.gluon.language  # noqa: F401

    at = step(times, "import tracer and compiler", at)
    from flexattn.catalogue import causal, softcap
    from flexattn.frontend.call import make_call
    from flexattn.frontend.plan import plan
    from flexattn.mods.bind import stats
    from flexattn.runtime.build import builder

    with torch.no_grad():
        at = time.perf_counter()
        mask = None
        if kind == "prefill":
            mask = flexattn.create_block_mask(causal, None, None, LENGTHS[kind], KEYS, "cuda")
            torch.cuda.synchronize()
        at = step(times, "block mask", at)
        cap = softcap(30.0)
        call = {"score_mod": cap, "block_mask": mask, "enable_gqa": True}
        out = flexattn.flex_attention(q, k, v, **call)
        torch.cuda.synchronize()
        at = step(times, "first call", at)
        flexattn.flex_attention(q, k, v, **call)
        torch.cuda.synchronize()
        step(times, "second call", at)
        worked = builder().compiled, stats().traces
        again = plan(make_call(q, k, v, cap, mask, None, True, False, None, None))
    return {
        "seconds": times,
        "how": again.launch.choice.how,
        "compiled": worked[0],
        "loaded": builder().loaded,
        "traces": worked[1],
        "checksum": out.double().sum().item(),
    }


def export(kind: str, out: Path) -> dict[str, Any]:
    """Tune a kind's problem for a moment into `records` beside `out`; make the directory of both.

    A run serves that record: it is found through FLEXATTN_CACHE.
    """
    import torch

    import flexattn
    from flexattn.catalogue import causal, softcap
    from flexattn.deploy.binaries import export as write
    from flexattn.frontend.call import make_call
    from flexattn.frontend.plan import plan
    from flexattn.measure.task import Task
    from flexattn.mods import bind
    from flexattn.records.store import Store
    from flexattn.runtime.launch import Lists
    from flexattn.tuning.builds import compilers
    from flexattn.tuning.evaluator import SILENT, method_for
    from flexattn.tuning.tuner import GpuTuner
    from flexattn.tuning.workload import policy_for

    q, k, v = inputs(kind)
    mask = None
    if kind == "prefill":
        mask = flexattn.create_block_mask(causal, None, None, LENGTHS[kind], KEYS, "cuda")
    cap = softcap(30.0)
    with torch.no_grad():
        choice = plan(make_call(q, k, v, cap, mask, None, True, False, None, None)).launch.choice
    problem, device = choice.problem, choice.device
    lists = None
    if mask is not None:
        lists = Lists(*(None if each is None else each.cpu() for each in Lists.of(mask)))
    task = Task(
        f"cold {kind}", problem, device, policy_for(problem.structure.kind, device), 128**-0.5,
        bind(cap, "score"), None if mask is None else bind(causal, "mask"), lists,
    )  # fmt: skip
    store = Store(out.parent / "records")
    method = method_for("quick", SECONDS)
    with compilers() as pool, GpuTuner(method, pool, SILENT) as tuner:
        store.write(tuner.tune(task), replace=True)
    found = write([task], device, out, store, mods=[(cap, "score"), (causal, "mask")])
    return {"kernels": found.kernels, "block_masks": found.block_masks, "mods": found.mods}


if __name__ == "__main__":
    what, kind, where = sys.argv[1:]
    found = export(kind, Path(where)) if what == "export" else run(kind, where)
    print(json.dumps(found))
