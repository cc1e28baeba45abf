"""The gate of the cold-start bench."""

from dataclasses import dataclass, field

import pytest

from bench.cold import BINARIES, EMPTY, WARM, ColdRow, Exported, Start, judge

SERVED = {"how": "hit", "compiled": 0, "loaded": 2, "traces": 0, "checksum": 1.0, "seconds": {}}


@dataclass(frozen=True)
class Stub(Start):
    """A start whose process is known."""

    found: dict = field(default_factory=dict)

    def __call__(self):
        return SERVED | self.found


def judged(name, x, **found):
    return judge(Stub(name, x, found), x).passed


def test_the_record_serves_and_outputs_are_equal():
    x = Exported(ColdRow("prefill"))
    assert judged(EMPTY, x, compiled=2, traces=1) and judged(WARM, x) and judged(BINARIES, x)
    assert not judged(WARM, x, how="default")
    assert not judged(WARM, x, checksum=2.0)


@pytest.mark.parametrize("worked", ["compiled", "traces"])
def test_a_process_with_binaries_that_worked_is_a_failure(worked):
    x = Exported(ColdRow("decode"))
    assert judged(EMPTY, x, **{worked: 1}) and not judged(BINARIES, x, **{worked: 1})
