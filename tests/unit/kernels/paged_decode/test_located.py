"""What a Triton serving kernel knows of a batch: no thread has another's request."""

from dataclasses import replace

import pytest

from flexattn.device import INTERPRETER, named
from flexattn.kernels.paged_decode.reads import located, request_sizes
from flexattn.problem.serving import ServingForm

FORM = ServingForm(
    dtype="bfloat16",
    kv_dtype="bfloat16",
    head_dim_qk=128,
    head_dim_v=128,
    group=4,
    kv_heads=8,
    page=16,
    requests=1,
    rows=4,
)


@pytest.mark.parametrize(
    ("device", "batch", "warps", "wanted"),
    [
        ("nvidia-h200", 1, 4, (1, 128)),
        ("nvidia-h200", 32, 8, (32, 256)),
        ("nvidia-h200", 64, 4, (128,)),
        ("nvidia-h200", 128, 4, (128,)),
        ("nvidia-h200", 64, 8, (256,)),
        ("nvidia-h200", 512, 4, (512,)),
        ("amd-mi300x", 64, 4, (64, 256)),
    ],
)
def test_there_is_an_element_for_each_thread(device, batch, warps, wanted):
    """Where a warp holds all requests, in the vector that is loaded."""
    found = request_sizes(replace(FORM, requests=batch), named(device), warps)
    assert found == dict(zip(("REQUESTS", "LOADERS"), wanted, strict=False))


def test_the_interpreter_runs_both_ways():
    sizes = [request_sizes(replace(FORM, requests=each), INTERPRETER, 4) for each in (1, 8)]
    assert sizes == [{"REQUESTS": 1, "LOADERS": 8}, {"REQUESTS": 8}]


def test_warps_that_go_their_own_ways_load_for_themselves():
    assert request_sizes(FORM, named("nvidia-h200"), 4, by_request=True) == {"REQUESTS": 1}


def test_what_is_computed_from_the_request_alone_is_not_passed_on():
    names = [name for name, _ in located(FORM)]
    assert names == ["b", "ends_at", "kv_len"]
    chunks = replace(FORM, rows=0, offset=True)
    assert [name for name, _ in located(chunks)] == [*names, "row", "q_len", "first_key"]
