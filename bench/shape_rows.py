"""Forward rows off the grid: head dimensions between, and shapes of public models."""

from __future__ import annotations

from bench.rows import Row
from bench.shapes import Shape

__all__ = ["DIMS", "shape_rows"]

# Multiples of 8 up to 256 that are on no grid: of diffusion, vision, small and latent models.
DIMS = (40, 48, 72, 80, 96, 112, 160, 192, 224)
# As many elements of a token's heads as the grid has.
WIDTH = 2048


def shape_rows() -> list[Row]:
    """Each dimension of DIMS at 4k, full and causal; then a shape each of public models."""
    rows = []
    for d in DIMS:
        shape = Shape(8, WIDTH // d, WIDTH // d, 4096, 4096, d)
        rows.append(Row(f"dim{d}-4k-full", "dims", shape))
        rows.append(Row(f"dim{d}-4k-causal", "dims", shape, "causal"))
    return [
        *rows,
        Row("phi2-2k", "public", Shape(8, 32, 32, 2048, 2048, 80), "causal", dtype="float16"),
        Row("siglip-729", "public", Shape(32, 16, 16, 729, 729, 72)),
        Row("sd15-4k", "public", Shape(4, 8, 8, 4096, 4096, 40)),
        Row("deepseek-4k", "public", Shape(2, 32, 32, 4096, 4096, 192), "causal", dv=128),
        Row("bert-512", "public", Shape(64, 16, 16, 512, 512, 64)),
        Row("cross-4k-77", "public", Shape(16, 20, 20, 4096, 77, 64)),
        Row("gemma4-4k", "public", Shape(1, 8, 8, 4096, 4096, 512), "causal"),
        Row("gemma4-4k-full", "public", Shape(1, 8, 8, 4096, 4096, 512)),
        Row("gemma4-16k", "public", Shape(1, 8, 8, 16384, 16384, 512), "causal"),
        Row("gemma4-16k-full", "public", Shape(1, 8, 8, 16384, 16384, 512)),
        Row("fp32-2k", "public", Shape(4, 16, 16, 2048, 2048, 64), "causal", dtype="float32"),
    ]
