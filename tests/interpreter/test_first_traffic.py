"""The bench of the first seconds of traffic, on the CPU: after warm() there is nothing to do."""

import json

import torch

from bench.first_traffic import KEPT, Sizes, launch_cache, run

TINY = Sizes((2, 1), 16, longest=40, batch=1, requests=2, window=9, warmed=30, dtype=torch.float32)


def test_traffic_compiles_traces_and_fills_nothing(tmp_path):
    launch_cache.clear()  # those of other tests would count as served
    trace = tmp_path / "trace.json"
    found = run(TINY, "cpu", seconds=300, trace=trace, most=12)
    assert (found["compiled"], found["traced"], found["filled"]) == (0, 0, 0)
    assert not [name for name in found["imported"] if name.startswith(("flexattn", "sympy"))]
    assert found["served"].keys() == {"default"}
    assert {kind: walls["count"] for kind, walls in found["wall_ms"].items()} == {
        "prompt": 4, "decode": 4, "plan": 4,
    }  # fmt: skip
    walls = [each["wall_ms"] for each in found["slowest"]]
    assert walls == sorted(walls, reverse=True) and len(walls) == KEPT
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {each["call"] for each in found["slowest"]} <= names
