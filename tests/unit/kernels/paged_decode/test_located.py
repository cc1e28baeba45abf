"""What a Triton serving kernel knows of a batch: no thread has another's request."""

from dataclasses import replace

import pytest

from flexattn.device import named
from flexattn.kernels.paged_decode.config import ServingForm
from flexattn.kernels.paged_decode.located import located, request_elements

FORM = ServingForm("bfloat16", "bfloat16", 128, 128, 4, 8, 16, requests=1, rows=4)


@pytest.mark.parametrize(
    ("device", "batch", "warps", "wanted"),
    [
        ("nvidia-h200", 1, 4, 128),
        ("nvidia-h200", 128, 4, 128),
        ("nvidia-h200", 64, 8, 256),
        ("nvidia-h200", 512, 4, 512),
        ("amd-mi300x", 8, 4, 256),
    ],
)
def test_there_is_an_element_for_each_thread(device, batch, warps, wanted):
    assert request_elements(replace(FORM, requests=batch), named(device), warps) == wanted


def test_what_is_computed_from_the_request_alone_is_not_passed_on():
    names = [name for name, _ in located(FORM)]
    assert names == ["b", "ends_at", "kv_len"]
    chunks = replace(FORM, rows=0, offset=True)
    assert [name for name, _ in located(chunks)] == [*names, "row", "q_len", "first_key"]
