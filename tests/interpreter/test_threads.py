"""Calls from several threads, in Triton's interpreter."""

import threading

from flexattn.catalogue import causal
from tests.support import assert_accurate, block_mask, inputs


def test_two_threads_call_at_once():
    """The interpreter keeps the number of the program that runs in its module: two threads read
    each other's, and raised "x >= grid_dim[0]", or wrote into each other's tiles."""
    begin, wrong = threading.Barrier(2), []

    def calls(number):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score + 0.1 * number * (q_idx - kv_idx)

        q, k, v = inputs(B=1, Hq=1, L=19 + 16 * number, S=33 + 7 * number)
        mask = block_mask(causal, q, k, 16)
        begin.wait()
        try:
            assert_accurate(q, k, v, score_mod=score_mod, block_mask=mask)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong, wrong
