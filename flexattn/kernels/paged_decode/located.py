"""How the threads of a Triton serving kernel come to know the same of a batch.

Lengths may change while a launch reads them, and threads that meet at barriers must go one way.
"""

from __future__ import annotations

from flexattn.device import Device
from flexattn.problem.serving import ServingForm


def request_sizes(
    form: ServingForm, device: Device, num_warps: int, by_request: bool = False
) -> dict[str, int]:
    """Elements of a vector of requests, and of the one that is loaded where that is longer.

    Triton gives threads that a short vector leaves over copies of its elements, each of which is
    loaded at a time of its own. So no two threads have the same element of what is loaded. What
    fits in one warp is then copied to all, which need no other warp from there on.

    by_request: warps go their own ways, and load for themselves.
    """
    # The interpreter has no threads. As if it had 8, few requests are copied and many are not.
    threads = 8 if device.backend == "interpreter" else num_warps * device.warp_size
    if by_request or form.requests >= threads:
        return {"REQUESTS": form.requests}
    if form.requests > device.warp_size:
        return {"REQUESTS": threads}
    return {"REQUESTS": form.requests, "LOADERS": threads}


def located(form: ServingForm) -> tuple[tuple[str, str], ...]:
    """What is known of a work tile's request, and the vectors of all requests that it is from."""
    found = [("b", "requests"), ("ends_at", "ends"), ("kv_len", "kv_lens")]
    if form.ragged:
        found += [("row", "rows_at"), ("q_len", "q_lens")]
    if form.offset:
        found.append(("first_key", "first_keys"))
    return tuple(found)
