"""What the bench of the first seconds of traffic says of its processes, and what it refuses."""

from bench import first_traffic
from bench.first_traffic import SIZES, workload
from flexattn.tuning.workload import parse_workload


def process(longest=9.0, **changes):
    slowest = {"call": "prompt causal 2x777", "wall_ms": longest, "host_ms": 1.0}
    walls = {"count": 3, "median": 2.0, "99 %": longest, "longest": longest}
    return {
        "warm_seconds": 12.3, "kernels": 17, "wall_ms": {"prompt": walls},
        "slowest": [slowest], "plan": "static default", "served": {"default": 8}, "imported": [],
        "compiled": 0, "traced": 0, "filled": 0,
    } | changes  # fmt: skip


def test_table_has_figures_of_each_kind_and_the_slowest_call():
    lines = first_traffic.table({"records off": process()}).splitlines()
    assert lines[2] == "| records off | prompt | 3 | 2.00 | 9.00 | 9.00 |"
    assert "slowest prompt causal 2x777, 9.0 ms (1.0 of the host)" in lines[-1]


def test_a_stall_is_a_fault_but_for_a_profiled_process():
    assert first_traffic.faults({"records off": process(50.0)}) == []
    (said,) = first_traffic.faults({"records off": process(50.1), "profiled": process(70.0)})
    assert said == "records off: a stall of 50.1 ms, 50 are allowed"


def test_what_belongs_before_traffic_is_a_fault_in_every_process():
    for what in ("compiled", "traced", "filled"):
        (said,) = first_traffic.faults({"profiled": process(**{what: 2})})
        assert said == f"profiled: 2 {what} after the warm-up"
    (said,) = first_traffic.faults({"a": process(served={"default": 3, "nearest": 1})})
    assert "tuned records served" in said


def test_warm_is_told_one_length_of_each_kind_of_call():
    rows = parse_workload(workload(SIZES), "a server", "the bench").rows
    assert [row.shape.q_len for row in rows] == [SIZES.warmed, 1, SIZES.warmed]
    assert {row.shape.kv_len for row in rows} == {SIZES.warmed}
