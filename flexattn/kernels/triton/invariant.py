"""The one tile of a batch-invariant call, by dtype and head dimensions alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flexattn.device import Device, is_rdna
from flexattn.errors import ConfigError
from flexattn.kernels.base.features import fp32_products
from flexattn.kernels.triton.amd import for_device
from flexattn.kernels.triton.config import PrefillConfig
from flexattn.kernels.triton.defaults import of_parts
from flexattn.kernels.triton.limits import LIMITS
from flexattn.kernels.triton.tiles import fit_to_mask
from flexattn.problem import DENSE, Problem, Structure


def invariant_config(problem: Problem, device: Device) -> PrefillConfig:
    """The config of every call of these dtypes and head dimensions, cut to the mask's blocks.

    Without splits each row walks its keys in their order, from tiles that begin at fixed
    positions: of decoding a program for each head. Raises ConfigError where nothing can run.
    """
    wanted = problem.structure
    # Mods, statistics and how tensors lie choose no other tile.
    plain = replace(
        wanted, score=None, mask=None, sparsity=None, layout=DENSE, lse=False, max_scores=False,
        sinks="", rules_off=(), tanh="auto", dropout=False,
    )  # fmt: skip
    for each in _tiles(wanted, device):
        config = for_device(each, device)
        if not LIMITS.violated(config, plain, device):
            config = fit_to_mask(config, wanted)
            broken = LIMITS.reasons(config, wanted, device)
            if not broken:
                return config
            raise _none(problem, "; ".join(broken))
    raise _none(problem, "no tile of these head dimensions can run")


def _tiles(structure: Structure, device: Device) -> Iterator[PrefillConfig]:
    widest = max(structure.head_dim_qk, structure.head_dim_v)
    products = fp32_products(structure)
    if products == "bf16x6":
        yield from of_parts(widest, device)
    elif products:
        yield PrefillConfig(64, 32, 8, 2)
    elif device.backend == "hip":
        yield PrefillConfig(32, 16, 2, 1) if is_rdna(device) else PrefillConfig(64, 32, 4, 1)
    elif widest <= 128:
        yield PrefillConfig(128, 64, 8, 2) if device.has_wgmma else PrefillConfig(64, 64, 4, 2)
    elif widest <= 256:
        yield PrefillConfig(128, 64, 8, 2) if device.has_wgmma else PrefillConfig(64, 32, 4, 2)
    else:
        yield PrefillConfig(64, 32, 8, 1)
    yield from (PrefillConfig(32, 32, 8, 1), PrefillConfig(32, 16, 4, 1))
    yield PrefillConfig(16, 16, 4, 1)


def _none(problem: Problem, why: str) -> ConfigError:
    return ConfigError(
        f"BATCH_INVARIANT for {problem.describe()}",
        why,
        "compute it without, or with smaller head dimensions",
    )
