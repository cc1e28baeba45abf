"""Time compiled NKI kernels on a NeuronCore, in rounds that rotate: run by its path, alone.

It imports numpy and AWS's nrtpy and nothing of flexattn, because nrtpy and nki cannot share an
environment. [nrtpy] neuron-runtime/nrtpy/model of the AWS Neuron documentation, SDK 2.32.

    python nrt_bench.py PLAN.json

The plan: {"rounds", "min_ms", "limit_us", "kernels": [[[neff, inputs.npz], …], …]}; a kernel is
one program or several that run one after the other. Prints {"us": [[…], …], "errors": {…}}.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

WARMUP, MOST = 5, 200


def programs(parts: list[list[str]]) -> list[Any]:
    """Models with their inputs on the device."""
    import numpy
    from nrtpy import NrtpyModel, NrtpyTensor  # type: ignore[import-not-found]

    found = []
    for neff, path in parts:
        model = NrtpyModel.load_from_neff(neff)
        arrays = numpy.load(path)
        inputs = {
            name: NrtpyTensor.from_numpy(arrays[name], name=name)
            for name in model.input_tensors_info
        }
        found.append((model, inputs))
    return found


def microseconds(loaded: list[Any], iterations: int) -> float:
    """Mean device time of a kernel, its programs added up."""
    total = 0.0
    for model, inputs in loaded:
        stats = model.benchmark(
            inputs=inputs, warmup_iter=WARMUP, benchmark_iter=iterations, mode="device"
        )
        total += 1e3 * stats.mean_ms
    return total


def main(path: str) -> None:
    """Run a plan; a kernel that raises leaves the race, and the others go on."""
    with open(path, encoding="utf-8") as file:
        plan = json.load(file)
    kernels: dict[int, tuple[list[Any], int]] = {}
    us: list[list[float]] = [[] for _ in plan["kernels"]]
    errors: dict[int, list[str]] = {}
    for index, parts in enumerate(plan["kernels"]):
        try:
            loaded = programs(parts)
            first = max(microseconds(loaded, 1), 1e-3)
        except Exception as error:
            errors[index] = [type(error).__name__, str(error)]
            continue
        if plan["limit_us"] is not None and first > plan["limit_us"]:
            us[index] = [first]
        else:
            count = min(max(math.ceil(plan["min_ms"] * 1e3 / first), 1), MOST)
            kernels[index] = loaded, count
    for number in range(plan["rounds"]):
        order = sorted(kernels)
        shift = number % max(1, len(order))
        for index in order[shift:] + order[:shift]:
            try:
                us[index].append(microseconds(*kernels[index]))
            except Exception as error:
                errors[index] = [type(error).__name__, str(error)]
                del kernels[index]
    print(json.dumps({"us": us, "errors": errors}))


if __name__ == "__main__":
    main(sys.argv[1])
