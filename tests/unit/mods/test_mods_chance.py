"""Random numbers and clocks in a mod are refused by any name; what is seeded is not."""

import random
import threading
import time

import numpy as np
import pytest

from flexattn.errors import UnsupportedError
from flexattn.mods import bind
from tests.bound import value

numpys = np.random.default_rng(0)
own = random.Random(0)
DRAWS = {
    "random.random": lambda: random.random(),
    "random.randint": lambda: random.randint(0, 1),
    "by another name": random.uniform,
    "numpy.random.rand": lambda: float(np.random.rand()),
    "numpy's generator": lambda: float(numpys.random()),
    "a generator of one's own": lambda: own.random(),
    "what the system draws": lambda: random.SystemRandom().random(),
    "time.time": lambda: time.time(),
    "time.perf_counter": time.perf_counter,
}


@pytest.mark.parametrize("draw", DRAWS)
def test_chance_and_clocks_are_refused(draw):
    """torch.rand was refused; a number of Python's or numpy's stayed what the first call drew."""
    drawn = DRAWS[draw]
    arguments = (0.0, 1.0) if draw == "by another name" else ()
    with pytest.raises(UnsupportedError, match=r"(draws|asks for another).*\n.*\n.*capture"):
        bind(lambda s, b, h, q, k: s * drawn(*arguments), "score")


def test_a_generator_imported_by_the_mod_itself():
    def mod(s, b, h, q, k):
        from random import gauss

        return s * gauss(0, 1)

    with pytest.raises(UnsupportedError, match="draws random numbers"):
        bind(mod, "score")


def test_seeded_numbers_and_other_threads_are_no_chance():
    """What another thread draws while a mod is traced says nothing of the mod."""

    def seeded(s, b, h, q, k):
        return s * random.Random(3).random() * float(np.random.default_rng(3).random())

    def held(s, b, h, q, k):
        return s * own.x if hasattr(own, "x") else s

    expected = random.Random(3).random() * np.random.default_rng(3).random()
    assert value(seeded) == pytest.approx(expected)
    assert value(held) == 1

    stop = threading.Event()

    def busy():
        while not stop.wait(0.0001):
            random.random()

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        assert value(lambda s, b, h, q, k: s * max(2.0, 1.0)) == 2
    finally:
        stop.set()
        thread.join()


def test_dead_code_that_reads_a_clock_is_no_fault():
    verbose = False

    def mod(s, b, h, q, k):
        if verbose:
            print(time.time())
        return s * 2

    assert value(mod) == 2
