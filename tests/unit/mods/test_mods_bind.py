"""bind() traces once, sees every change, and keeps nothing of the user's alive."""

import gc
import threading
import weakref

import pytest
import torch

from flexattn.mods import bind
from flexattn.mods.bind import clear, stats
from tests.bound import value
from tests.processes import python

FIRST = """
import torch
from flexattn.mods import bind
from flexattn.mods.bind import stats
from flexattn.mods.recorded import digest
from flexattn.mods.identity import identify

def mod(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx > kv_idx, torch.abs(score), score)

found = [digest(identify(mod, "score"))]
for _ in range(2):
    bind(mod, "score")
    found.append(digest(identify(mod, "score")))
assert stats().traces == 1, stats()
assert found[0] is not None and len(set(found)) == 1, found
"""


def test_the_first_mod_of_a_process_is_traced_once():
    """A library met for the first time was told once for each of its names that the code reads,
    and later once: the second call had another key, and another digest than a recorder's."""
    python("-c", FIRST)


def test_values_that_come_back_find_the_mod_they_had():
    """The first value's mod was forgotten when its number became an argument."""

    def windowed(lo, hi):
        return lambda b, h, q, k: (q - k > lo) & (q - k < hi)

    calls = [(0, 4), (0, 5), (1, 5), (2, 9), (0, 7), (0, 4)]
    mods = [bind(windowed(*each), "mask").mod for each in calls]
    traces = stats().traces
    assert [bind(windowed(*each), "mask").mod for each in calls] == mods
    assert mods[-1] is mods[0] and len(set(mods)) == 3 and stats().traces == traces


def biased(t, w=1):
    return lambda s, b, h, q, k: s + t[h] * w


def test_none_is_none():
    assert bind(None, "score") is None


def test_same_code_with_other_tensors_traces_once():
    tables = [torch.full((n + 1,), float(n)) for n in range(300)]
    mods = {bind(biased(t), "score").mod for t in tables}
    assert len(mods) == 1 and stats().traces == 1
    assert bind(biased(tables[7]), "score").tensors[0] is tables[7]


def test_in_place_change_needs_no_trace():
    t = torch.zeros(3)
    fn = biased(t)
    assert value(fn) == 1
    t.fill_(5)
    assert value(fn) == 6 and stats().traces == 1


def test_moving_offset_gives_two_mods():
    offset = torch.zeros(1)
    mods = set()
    for w in range(12):
        bound = bind(biased(offset, w), "score")
        mods.add(bound.mod)
        assert w == 0 or bound.scalars == (w,)
    assert len(mods) == 2


def test_two_scalars_become_arguments_on_their_own():
    def window(lo, hi):
        return lambda b, h, q, k: (q - k > lo) & (q - k < hi)

    for lo, hi in [(0, 4), (0, 5), (1, 5), (2, 9), (3, 10)]:
        assert value(window(lo, hi), "mask", q_idx=4) == (lo < 4 < hi)
    assert bind(window(7, 9), "mask").scalars in [(7, 9), (9, 7)]


def test_hidden_tensors_are_found_by_the_trace():
    class Hidden:
        def __call__(self, s, b, h, q, k):
            return s + self.table()[h]

        def table(self):
            return tables[-1] * 1

    tables = [torch.ones(3)]
    hidden = Hidden()
    assert value(hidden) == 2
    tables.append(torch.full((3,), 5.0))
    assert value(hidden) == 6


def test_sizes_matter_only_where_the_code_asks_for_them():
    def indexed(t):
        return lambda s, b, h, q, k: s + t[h][0] + t[-1, q]

    def flat(t):
        return lambda s, b, h, q, k: s + t.view(-1)[q]

    def summed(t):
        return lambda s, b, h, q, k: s + t[h].sum() / t.shape[0]

    for make, traces in [(indexed, 1), (flat, 3), (summed, 3)]:
        clear()
        for n in (2, 3, 4):
            t = torch.arange(float(n * n)).view(n, n)
            expected = make(t)(torch.tensor(1.0), 0, 1, 1, 0).item()
            assert value(make(t), h=1, q_idx=1) == pytest.approx(expected)
        assert stats().traces == traces


def test_dtype_rank_and_aliasing_are_part_of_the_identity():
    def mod(x, y):
        return lambda s, b, h, q, k: s + x[h] * y[h]

    t, u = torch.ones(2), torch.ones(2)
    assert len(bind(mod(t, u), "score").tensors) == 2
    assert len(bind(mod(t, t), "score").tensors) == 1
    assert bind(mod(t, u.double()), "score").mod.buffers[0].dtype == "float64"
    assert stats().traces == 3


def test_buffers_are_numbered_as_they_appear_and_vanish_unused():
    x, y, z = torch.ones(2), torch.ones(2, 2), torch.ones(2, 2, 2)

    def mod(s, b, h, q, k):
        unused = x[h]
        return s + z[b, h, q] + y[q, k] + unused * 0 if False else s + z[b, h, q] + y[q, k]

    bound = bind(mod, "score")
    assert {id(t) for t in bound.tensors} == {id(y), id(z)}
    assert [b.rank for b in bound.mod.buffers] == [t.dim() for t in bound.tensors]


def test_no_tensor_is_kept_alive():
    t = torch.ones(3)
    watch = weakref.ref(t)
    bind(biased(t), "score")
    del t
    gc.collect()
    assert watch() is None


def test_threads_agree():
    mods, errors = [], []
    barrier = threading.Barrier(4)

    def work(i):
        try:
            barrier.wait()
            for n in range(5):
                mods.append(bind(biased(torch.ones(2), n + i), "score"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors and len({m.mod.fingerprint for m in mods}) <= 6


def test_a_function_without_source():
    scope = {}
    exec("def mod(s, b, h, q, k):\n    return s * 2 + q", scope)
    assert value(scope["mod"], q_idx=3) == 5


def test_a_recursive_helper_and_a_cycle():
    def double(x, n):
        return x if n == 0 else double(x + x, n - 1)

    ring = {}
    ring["self"] = ring

    def mod(s, b, h, q, k):
        return double(s, 3) + len(ring)

    assert value(mod) == 9
    ring["other"] = 1
    assert value(mod) == 10
