"""Where records hold exactly: what this process, its templates and its device are, as fields."""

from __future__ import annotations

from functools import lru_cache

import torch

from flexattn.device import Device, cuda_driver
from flexattn.kernels.ptx.assembler import triton_version
from flexattn.records.record import SCHEMA, Environment, Policy
from flexattn.records.renderers import RecordKind, source_hash


def serving_policy(kind: RecordKind, device: Device) -> tuple[bool, bool]:
    """(graph, cold_l2) of the records that dispatch takes for its own.

    Servers replay decode as CUDA graphs and launch prefill eagerly, as training does a backward;
    in all of them the rest of a model has run since the same layer's last call, so the L2 cache
    holds nothing of it. The interpreter and Neuron have neither.
    """
    if device.backend in ("interpreter", "neuron"):
        return False, False
    return kind not in ("prefill", "backward"), True


def environment(kind: RecordKind, device: Device, policy: Policy | None = None) -> Environment:
    """The environment of records of a kind's template, measured by a policy (dispatch's if None).

    It is computed once per process, kind and device.
    """
    graph, cold = (
        serving_policy(kind, device) if policy is None else (policy.graph, policy.cold_l2)
    )
    return _environment(kind, device, graph, cold)


@lru_cache(maxsize=64)
def _environment(kind: RecordKind, device: Device, graph: bool, cold_l2: bool) -> Environment:
    return Environment(
        schema=SCHEMA,
        template=source_hash(kind, device),
        triton=triton_version(),
        # A plain text: torch's own class parses both versions at every comparison.
        torch=str(torch.__version__),
        driver=_driver(),
        device=device.name,
        arch=device.arch,
        num_sms=device.num_sms,
        graph=graph,
        cold_l2=cold_l2,
    )


def _driver() -> str:
    """The major version of CUDA that the driver speaks, or HIP's; "" without either."""
    if torch.version.hip:
        return torch.version.hip.split(".")[0]
    # The driver's own word: not every torch that runs on it passes it on.
    version = cuda_driver.version()
    return str(version // 1000) if version else ""
