"""NKI as a family: kernels that flexattn.neuron interprets, models or runs."""

from __future__ import annotations

from flexattn.kernels.nki.config import NkiConfig


class _Nki:
    name = "nki"
    kind = "nki"

    def short(self, config: NkiConfig) -> str:
        """128x512 k4096 dma is tiles of 512 keys, of 4096 that stay on the chip.

        st: keys lie on the partitions.
        """
        parts = [f"{config.BLOCK_M}x{config.BLOCK_N} k{config.section}"]
        parts += [f"x{config.num_splits}"] * (config.num_splits > 1)
        parts += ["dma"] * (config.transpose == "dma") + ["scalar"] * (config.evict == "scalar")
        parts += [config.mask] * (config.mask != "range") + ["st"] * (config.form == "st")
        return " ".join(parts)


NKI = _Nki()
