"""What serving kernels ask for ahead of captured tensors: lines of their own memory alone."""

from itertools import product

import pytest
import torch

from flexattn.kernels.paged_decode.reads import AHEAD, prefetched
from flexattn.mods import bind
from flexattn.problem import captures_of
from flexattn.serving.kernels import KV_DTYPES

VIEWS = {
    "a row": torch.zeros(40),
    "one element": torch.zeros(1, dtype=torch.bool),
    "rows of a few bytes": torch.zeros(8, 8, dtype=torch.bool),
    "a row a request": torch.zeros(8, 4, 4),
    "long rows": torch.zeros(3, 1000, dtype=torch.int16),
    "turned": torch.zeros(70, 30).T,
    "with gaps": torch.zeros(40, 90)[::3, 7:81:5],
    "expanded": torch.zeros(6, 1).expand(6, 50),
    "empty": torch.zeros(0, 5),
    "empty rows": torch.zeros(5, 0),
}


def mod(x):
    """Reads the first of each dimension of x, and so captures it."""

    def score_mod(score, b, h, q, kv):
        return score + x[(b * 0,) * x.ndim].to(torch.float32)

    return score_mod


@pytest.mark.parametrize("name", VIEWS)
def test_only_elements_are_asked_for(name):
    x = VIEWS[name]
    captures = captures_of(bind(mod(x), "score"))
    assert captures is not None
    sizes = {f"score_buf0_size{d}": size for d, size in enumerate(x.shape)}
    strides = {f"score_buf0_stride{d}": stride for d, stride in enumerate(x.stride())}
    elements = {
        sum(i * stride for i, stride in zip(index, x.stride(), strict=True))
        for index in product(*map(range, x.shape))
    }
    asked = [
        eval(each.address, {**sizes, **strides, "line": line, "score_buf0": 0})
        for each in prefetched(captures)
        for line in range(128)
        if eval(each.exists, {**sizes, **strides, "line": line})
    ]
    assert set(asked) <= elements
    assert bool(asked) == bool(elements) and len(asked) <= AHEAD * x.ndim
    small = x.numel() * x.itemsize <= 1024 and x.is_contiguous()
    lines = {each * x.itemsize // 128 for each in elements}
    assert not small or {each * x.itemsize // 128 for each in asked} == lines


def test_nothing_is_asked_for_without_captured_tensors():
    assert not tuple(prefetched(None))
    captures = captures_of(bind(lambda score, b, h, q, kv: score * 2.0 - q, "score"))
    assert not tuple(prefetched(captures))


def test_every_cache_dtype_has_a_name_that_triton_knows():
    assert all(isinstance(name, str) and "torch" not in name for name in KV_DTYPES.values())
