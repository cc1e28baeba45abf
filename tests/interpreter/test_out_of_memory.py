"""Memory that runs out in the middle of a plan or a call: nothing of it stays."""

import gc
import weakref

import pytest
import torch
from torch.overrides import TorchFunctionMode

from flexattn import flex_attention
from flexattn.catalogue import softcap
from flexattn.mods import bind
from flexattn.serving import ServingConfig
from tests.serving import assert_right, batch, plan_for, poisoned_pages
from tests.support import assert_accurate, inputs

ALLOCATE = {torch.empty, torch.empty_strided, torch.full, torch.zeros}


class Scarce(TorchFunctionMode):
    """Memory for some allocations, and for none after them; made: the tensors, not kept alive."""

    def __init__(self, allocations):
        super().__init__()
        self.left, self.made = allocations, []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function not in ALLOCATE:
            return function(*args, **kwargs or {})
        if not self.left:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        self.left -= 1
        tensor = function(*args, **kwargs or {})
        self.made.append(weakref.ref(tensor))
        return tensor


def scarcer(call):
    """Run a call with memory for none of its allocations, for one, and so on until it ends.

    Yields after each that failed, when all that it had allocated must be gone.
    """
    for allocations in range(100):
        scarce = Scarce(allocations)
        try:
            with scarce:
                call()
            return
        except torch.OutOfMemoryError:
            pass
        gc.collect()
        assert [each() for each in scarce.made] == [None] * allocations
        yield allocations


def test_a_plan_half_made_leaves_nothing():
    """Beside a plan that goes on, and before one that is made when there is memory again."""
    each = batch([1] * 3, [53, 1, 17], 6, 2)
    cache, table = poisoned_pages(each, 4)
    call = {"seq_lens": each.numbers(each.kv_lens), "block_table": table}

    def make():
        return plan_for(each, page=4, config=ServingConfig(16, 16, 4, 2))

    first, failed = make(), 0
    for _ in scarcer(make):
        failed += 1
        for plan in (first, make()):
            got = plan.run(each.q[:, None], cache, **call)
            assert_right([x.flatten(0, 1) for x in got], each)
    assert failed == 4, "workspace, counters, outputs and log-sum-exps"


@pytest.mark.parametrize(("L", "S"), [(3, 700), (70, 70)], ids=["decode", "prefill"])
def test_a_call_that_ran_out_is_no_later_calls_trouble(L, S):
    q, k, v = inputs(1, 4, 2, L, S)
    mod, failed = softcap(20.0), 0
    bind(mod, "score")  # a trace allocates on the host

    def call():
        with torch.no_grad():
            return flex_attention(q, k, v, mod, enable_gqa=True, return_lse=True)

    for _ in scarcer(call):
        failed += 1
        assert_accurate(q, k, v, score_mod=mod)
    assert failed >= 2 and call()[0].isfinite().all()
