"""How the threads of a Triton serving kernel come to know the same of a batch.

Lengths may change while a launch reads them, and threads that meet at barriers must go one way.
"""

from __future__ import annotations

from flexattn.device import Device
from flexattn.kernels.paged_decode.config import ServingForm


def request_elements(form: ServingForm, device: Device, num_warps: int) -> int:
    """Elements of a vector of requests, of which no two threads have the same.

    Triton gives threads that a short vector leaves over copies of its elements, each of which is
    loaded at a time of its own.
    """
    threads = num_warps * device.warp_size
    return form.requests if device.backend == "interpreter" else max(form.requests, threads)


def located(form: ServingForm) -> tuple[tuple[str, str], ...]:
    """What is known of a work tile's request, and the vectors of all requests that it is from."""
    found = [("b", "requests"), ("ends_at", "ends"), ("kv_len", "kv_lens")]
    if form.ragged:
        found += [("row", "rows_at"), ("q_len", "q_lens")]
    if form.offset:
        found.append(("first_key", "first_keys"))
    return tuple(found)
