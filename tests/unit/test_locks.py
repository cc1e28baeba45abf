"""Locks across a fork: a child waits for no thread of its parent."""

import ast
import gc
import os
import threading
from pathlib import Path

import pytest

import flexattn
from flexattn.errors import MeasureError
from flexattn.runtime.codecache import without_collections
from flexattn.tuning.builds import Pool
from flexattn.util.locks import Lru, Ranked, Turns, awaited, renewed
from tests.build_doubles import number

PACKAGE = Path(flexattn.__file__).parent
PRIMITIVES = {"Lock", "RLock", "Condition", "Event", "Semaphore", "Barrier"}
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def in_child(check):
    """Whether check() holds in a forked child, within ten seconds."""
    child = os.fork()
    if not child:
        code = 3
        try:
            worker = threading.Thread(target=lambda: done.append(check()), daemon=True)
            done = []
            worker.start()
            worker.join(10)
            code = 0 if done == [True] else 2
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


class Held:
    """A thread that holds a lock until the block ends."""

    def __init__(self, lock):
        self.lock, self.begun, self.go = lock, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.hold, daemon=True)

    def hold(self):
        with self.lock:
            self.begun.set()
            self.go.wait(30)

    def __enter__(self):
        self.thread.start()
        assert self.begun.wait(10)

    def __exit__(self, *error):
        self.go.set()
        self.thread.join()


@pytest.mark.parametrize("kind", ["Lock", "RLock", "Condition"])
def test_a_held_lock_is_free_in_a_child(kind):
    lock = renewed(getattr(threading, kind)())
    with Held(lock):
        assert not lock.acquire(blocking=False)
        assert in_child(lambda: lock.acquire(timeout=5))
        assert not lock.acquire(blocking=False)
    assert lock.acquire(blocking=False)


def test_a_child_of_a_child():
    lock = renewed(threading.Lock())
    with Held(lock):
        assert in_child(
            lambda: lock.acquire(timeout=5) and in_child(lambda: lock.acquire(timeout=5))
        )


def test_turns_of_a_key():
    turns = Turns()
    with Held(turns.of("a")):
        assert not turns.of("a").acquire(blocking=False)
        with turns.of("b"), turns.of("b"):
            pass
        assert in_child(lambda: turns.of("a").acquire(timeout=5))
    with turns.of("a"):
        pass
    assert not len(turns._locks)


def test_the_highest_rank_is_next():
    """Kernels of a server were compiled in any order, and the longest one came last."""
    lock, order = Ranked(), []

    def take(rank):
        with lock.of(rank):
            order.append(rank)

    threads = [threading.Thread(target=take, args=(rank,)) for rank in (3, 1, 4, 4, 2)]
    with Held(lock.of(9)):
        for each in threads:
            each.start()
        while len(lock._waiting) < len(threads):
            pass
    for each in threads:
        each.join()
    assert order == [4, 4, 3, 2, 1]


def test_a_ranked_lock_is_free_in_a_child():
    lock = Ranked()

    def takes():
        with lock.of(1):
            return True

    with Held(lock.of(2)):
        assert in_child(takes)
    assert takes()


def test_a_fork_waits_for_what_changes_other_libraries(monkeypatch):
    lock = awaited(threading.RLock())
    held = Held(lock)
    with held:
        threading.Timer(0.2, held.go.set).start()
        assert in_child(lambda: lock.acquire(timeout=5))
        assert held.go.is_set()
    assert lock.acquire(blocking=False)


def test_a_remembered_item_is_found_in_a_child():
    items = Lru(2)
    items.put(1, "one")
    with Held(items._lock):
        assert in_child(lambda: items.put(2, "two") or items.items() == [(1, "one"), (2, "two")])


def test_garbage_is_collected_in_a_child_of_a_process_that_compiles():
    """A thread that compiles keeps the collector off; in a child nobody turned it on again."""
    assert gc.isenabled()
    with Held(without_collections()):
        assert not gc.isenabled()
        assert in_child(gc.isenabled)
    assert gc.isenabled()
    with without_collections():
        assert in_child(lambda: not gc.isenabled())


def test_a_pool_of_compilers_says_that_it_is_another_process():
    def asks():
        with pytest.raises(MeasureError, match="the process that forked"):
            list(pool.run([1]))
        return True

    pool = Pool(number, jobs=1, deadline=1.0)
    with Held(pool._lock):
        assert in_child(asks)


def test_every_lock_is_renewed():
    """Whoever adds a lock says what becomes of it in a child."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        calls = [each for each in nodes if isinstance(each, ast.Call)]
        wrapped = {
            arg
            for call in calls
            if ast.unparse(call.func) in ("renewed", "awaited")
            for arg in call.args
        }
        found += [
            str(path.relative_to(PACKAGE))
            for call in calls
            if call not in wrapped
            and ast.unparse(call.func).removeprefix("threading.") in PRIMITIVES
        ]
    # The owners of these renew themselves.
    assert set(found) == {"runtime/codecache.py", "util/locks.py"}
