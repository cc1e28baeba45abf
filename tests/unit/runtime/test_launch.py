"""A launch over another number of keys is the one that would be prepared, or none."""

from dataclasses import replace

import pytest
import torch

from flexattn.kernels.choose.options import Options
from flexattn.runtime.dispatch import Dispatcher
from flexattn.runtime.launch import prepare_launch
from flexattn.settings import override
from tests.failing_builds import H200, Builder
from tests.problems import problem

ALIKE = {"kernels": ()}


@pytest.mark.parametrize("heads", [1, 8])
def test_with_kv_len_is_what_is_prepared(heads):
    """Of one head the number of splits differs within a bucket, and such a launch is not kept."""
    wanted = replace(problem("decode", 128), B=1, Hq=4 * heads, Hkv=heads)
    dispatcher, told = Dispatcher(Builder()), []

    def prepared(keys):
        q, k = (torch.empty(1, h, n, 128, dtype=torch.bfloat16, device="meta")
                for h, n in ((4 * heads, 1), (heads, keys)))  # fmt: skip
        asked = replace(wanted, kv_len=keys)
        args = asked, H200, torch.device("cpu"), dispatcher, Options(BLOCK_N=32), q, k, k, None
        return prepare_launch(*args), k

    with override(mode="off"):
        for first, *others in ((513, 544, 545, 577), (1921, 1952, 1985), (2049, 2080, 2176, 2177)):
            launch, _ = prepared(first)
            for keys in others:
                whole, k = prepared(keys)
                found = launch.with_kv_len(keys, k, k)
                told.append(found is not None)
                if found is not None:
                    assert replace(found, **ALIKE) == replace(whole, **ALIKE)
    assert told.count(False) == (5 if heads == 1 else 3)
