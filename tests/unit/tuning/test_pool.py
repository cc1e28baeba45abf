"""A pool compiles ahead of those who measure: each source once, what is waited for first."""

import threading
import time

import pytest

from flexattn.errors import MeasureError
from flexattn.records.record import Failed
from flexattn.tuning.builds import Pool
from tests.build_doubles import Order, ordered

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]


@pytest.fixture
def compiling(tmp_path):
    with Pool(ordered, jobs=1, deadline=20.0) as made:
        yield made


def ran(tmp_path):
    return [int(tag) for tag in (tmp_path / "log").read_text().split()]


def orders(tmp_path, *tags, kind="fine"):
    return [Order(tag, kind, str(tmp_path)) for tag in tags]


def test_what_is_waited_for_comes_before_what_was_ordered_ahead(compiling, tmp_path):
    compiling.ahead(orders(tmp_path, *range(1, 7)))
    assert dict(compiling.run(orders(tmp_path, 6, 9))) == {0: 60, 1: 90}
    done = ran(tmp_path)
    assert done.index(6) < 3 and done.index(9) < 4, "behind what ran, and one that followed"
    assert dict(compiling.run(orders(tmp_path, *range(1, 7)))) == {
        i: 10 * (i + 1) for i in range(6)
    }
    assert sorted(ran(tmp_path)) == [1, 2, 3, 4, 5, 6, 9], "each once"


def test_threads_that_want_one_kernel_share_it(compiling, tmp_path):
    found = []
    threads = [
        threading.Thread(
            target=lambda: found.append(dict(compiling.run(orders(tmp_path, 1, 2, 1))))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [{0: 10, 1: 20, 2: 10}] * 3
    assert sorted(ran(tmp_path)) == [1, 2]


def test_a_process_that_dies_costs_its_order_and_the_next_who_asks_tries_again(
    compiling, tmp_path
):
    troubled = orders(tmp_path, 4, kind="dies once")
    (lost,) = dict(compiling.run(troubled)).values()
    assert isinstance(lost, Failed) and lost.stage == "crash"
    assert dict(compiling.run(troubled)) == {0: 40}


def test_who_waits_for_a_closed_pool_is_told(compiling, tmp_path):
    assert dict(compiling.run(orders(tmp_path, 50))) == {0: 500}
    compiling.ahead(orders(tmp_path, *range(20)))
    errors = []

    def wait():
        with pytest.raises(MeasureError, match="compilers are closed") as caught:
            dict(compiling.run(orders(tmp_path, *range(20, 40))))
        errors.append(caught)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    begin = time.monotonic()
    compiling.close()
    thread.join(20)
    assert errors and time.monotonic() - begin < 5
    assert len(ran(tmp_path)) < 40


def test_nothing_to_build_starts_nothing(compiling):
    assert list(compiling.run([])) == []
