"""Tiles that others publish for AMD's GPUs, where each is from, and what it spills here.

AITER: ROCm/aiter, aiter/ops/triton/configs/MI300X-MHA-DEFAULT.json at 4b092a59 and
MI350X-MHA-DEFAULT.json at 0e220f0c. Inductor: torch 2.13, torch/_inductor/template_heuristics/
triton.py, ROCmConfigHeuristic: its defaults of 16 bits. Triton: python/tutorials/
06-fused-attention.py, whose forward on HIP has all tiles of TUTORIAL.
"""

from dataclasses import dataclass
from itertools import product

from flexattn.kernels.triton.config import AmdPrefillConfig
from flexattn.kernels.triton_backward.config import AmdBackwardConfig

CARDS = {"gfx90a": "amd-mi210", "gfx942": "amd-mi300x", "gfx950": "amd-mi355x"}
TUTORIAL = tuple(product((64, 128), (32, 64, 128), (4, 8), (1,)))


@dataclass(frozen=True)
class Published:
    """A config that somebody publishes for a kind of kernel and a head dimension on an arch."""

    source: str
    arch: str
    kind: str
    D: int
    config: AmdPrefillConfig | AmdBackwardConfig

    def __str__(self):
        c = self.config
        tile = c.tiles if isinstance(c, AmdBackwardConfig) else (c.BLOCK_M, c.BLOCK_N)
        sizes = [x[1] if isinstance(x, tuple) else x for x in tile]
        return f"{self.source} {self.arch} {self.kind} {self.D} {sizes} w{c.num_warps}"


def _forward(source, arch, D, tile, waves=0, kpack=1):
    config = AmdPrefillConfig(*tile, waves_per_eu=waves, kpack=kpack)
    return Published(source, arch, "prefill", D, config)


def _backward(source, arch, D, tile, waves=0, rows=0, kpack=1):
    config = AmdBackwardConfig(*tile, waves_per_eu=waves, matrix_instr_nonkdim=rows, kpack=kpack)
    return Published(source, arch, "backward", D, config)


def _every():
    for arch, D in product(("gfx942", "gfx950"), (64, 128)):
        yield _forward("AITER", arch, D, (128, 64, 4, 1), 2)
        yield _forward("AITER, dropout", arch, D, (32, 32, 2, 1), 1)
        yield _backward("AITER", arch, D, (32, 128, 128, 32, 4, 1), 1, 16)
    yield _backward("AITER, positions", "gfx942", 128, (32, 64, 128, 32, 4, 2), 0, 16)
    yield _forward("AITER, positions", "gfx942", 64, (256, 64, 8, 1), 1)
    yield _forward("AITER, positions", "gfx942", 128, (256, 64, 8, 1), 1)
    for D, tile in ((64, (64, 64, 8, 2)), (128, (64, 64, 8, 2)), (256, (32, 64, 8, 2))):
        yield _forward("Inductor, bfloat16", "gfx942", D, tile, kpack=2)
    for D, tile in ((64, (64, 32, 8, 1)), (128, (64, 32, 8, 1)), (256, (32, 32, 8, 1))):
        yield _forward("Inductor, float16", "gfx942", D, tile, kpack=2)
    for D, tile in ((64, (128, 64, 4, 2)), (128, (128, 64, 4, 2)), (256, (32, 64, 4, 2))):
        yield _forward("Inductor", "gfx950", D, tile)
    for arch in ("gfx942", "gfx950"):
        kpack = 2 if arch == "gfx942" else 1
        for D, tile in ((64, (64,) * 4), (128, (64, 128, 128, 64)), (256, (64,) * 4)):
            yield _backward("Inductor", arch, D, (*tile, 4, 1), kpack=kpack)
        for D, tile in product((64, 128, 256), TUTORIAL):
            yield _forward("Triton's tutorial", arch, D, tile)
    for D in (64, 128, 256):
        yield _forward("Inductor", "gfx90a", D, (128, 64, 4, 1))


EVERY = tuple(_every())

# Those whose loops spill in our templates (Triton 3.9, bfloat16, causal, buffer instructions):
# loads and stores of spilled registers inside of loops, by arch, kind, head dimension, and rows,
# keys, warps and waves_per_eu.
SPILLING = {
    ("gfx942", "prefill", 128, (128, 64, 4, 2)): 33,
    ("gfx942", "prefill", 128, (256, 64, 8, 1)): 26,
    ("gfx942", "prefill", 128, (128, 128, 8, 0)): 63,
    ("gfx950", "prefill", 128, (128, 128, 8, 0)): 4,
    ("gfx942", "prefill", 256, (64, 64, 8, 0)): 27,
    ("gfx942", "prefill", 256, (64, 128, 8, 0)): 108,
    ("gfx950", "prefill", 256, (64, 128, 8, 0)): 6,
    ("gfx942", "prefill", 256, (128, 32, 8, 0)): 50,
    ("gfx950", "prefill", 256, (128, 32, 8, 0)): 10,
    ("gfx942", "prefill", 256, (128, 64, 8, 0)): 60,
    ("gfx942", "prefill", 256, (128, 128, 4, 0)): 119,
    ("gfx950", "prefill", 256, (128, 128, 4, 0)): 135,
    ("gfx942", "prefill", 256, (128, 128, 8, 0)): 113,
    ("gfx950", "prefill", 256, (128, 128, 8, 0)): 37,
    ("gfx942", "backward", 128, (64, 128, 4, 0)): 33,
    ("gfx942", "backward", 256, (64, 64, 4, 0)): 210,
    ("gfx950", "backward", 256, (64, 64, 4, 0)): 76,
}


def spills(each):
    """Spills inside of loops of a published config; 0 for all that are not in SPILLING."""
    return SPILLING.get(_tile(each), 0)


def _tile(each):
    c = each.config
    rows, keys = (c.BLOCK_M, c.BLOCK_N) if each.kind == "prefill" else (c.BLOCK_M1, c.BLOCK_N1)
    return each.arch, each.kind, each.D, (rows, keys, c.num_warps, c.waves_per_eu)
