"""The table of the cold-start bench, and its status."""

from bench import cold


def sample(first, compiled=0, traces=0):
    return {"seconds": {"import torch": 1.0, "first call": first}, "compiled": compiled,
            "loaded": 2, "traces": traces, "checksum": 0.0}  # fmt: skip


def test_table_has_medians_and_what_was_done():
    found = {"prefill": {"empty": [sample(1.0, 2, 1), sample(1.25, 2, 1), sample(9.0, 2, 1)],
                         "binaries": [sample(0.0604)] * 3}}  # fmt: skip
    lines = cold.table(found).splitlines()
    assert lines[0].endswith("| import torch ms | first call ms | compiled | traced |")
    assert lines[2] == "| prefill | empty | 1000.0 | 1250.0 | 2 | 1 |"
    assert lines[3] == "| prefill | binaries | 1000.0 | 60.4 | 0 | 0 |"


def test_a_process_with_binaries_that_worked_is_a_failure():
    assert not cold._worked(sample(0.1))
    assert cold._worked(sample(0.1, compiled=1)) and cold._worked(sample(0.1, traces=1))
