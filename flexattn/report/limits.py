"""What devices can do at best: peak rates as their vendors state them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits", "limits_of"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Dense peak rates in TFLOP/s by the type of the inputs, and memory bandwidth in TB/s.

    half: float16 and bfloat16 with fp32 sums. tf32: float32 inputs on matrix units. single:
    float32 without them. e4m3 is multiplied twice as fast as half, where it is at all.
    """

    half: float
    tf32: float
    single: float
    bandwidth: float

    def peak(self, dtype: str, tf32: bool) -> float:
        """TFLOP/s for inputs of a dtype."""
        if dtype == "float8_e4m3fn":
            return 2 * self.half
        if dtype != "float32":
            return self.half
        return self.tf32 if tf32 else self.single

    def ridge(self, dtype: str, tf32: bool) -> float:
        """FLOP per byte above which arithmetic is the limit."""
        return self.peak(dtype, tf32) / self.bandwidth


# Part of a device's name, the longer before the shorter. Rates without sparsity; where a data
# sheet has them with sparsity only, half of that.
_KNOWN: tuple[tuple[str, Limits], ...] = (
    # NVIDIA H200 data sheet: SXM; the NVL card has the same memory and a lower power limit.
    ("h200-nvl", Limits(835.5, 417.5, 60.0, 4.8)),
    ("h200", Limits(989.5, 494.5, 67.0, 4.8)),
    # NVIDIA H100 data sheet: NVL, PCIe, SXM.
    ("h100-nvl", Limits(835.5, 417.5, 60.0, 3.9)),
    ("h100-pcie", Limits(756.5, 378.0, 51.0, 2.0)),
    ("h100", Limits(989.5, 494.5, 67.0, 3.35)),
    # NVIDIA A100 data sheet: 40 GB, then 80 GB SXM.
    ("a100-sxm4-40gb", Limits(312.0, 156.0, 19.5, 1.555)),
    ("a100-pcie-40gb", Limits(312.0, 156.0, 19.5, 1.555)),
    ("a100", Limits(312.0, 156.0, 19.5, 2.039)),
    # NVIDIA HGX B200 data sheet, an eighth of eight GPUs.
    ("b200", Limits(2250.0, 1125.0, 75.0, 8.0)),
    # NVIDIA Ampere GA102, Ada and RTX Blackwell architecture papers, appendix A: sums in fp32.
    ("rtx-3090", Limits(71.0, 35.6, 35.6, 0.936)),
    ("rtx-4090", Limits(165.2, 82.6, 82.6, 1.008)),
    ("rtx-5090", Limits(209.5, 104.8, 104.8, 1.792)),
    # AMD Instinct MI300X data sheet; MI355X data sheet, which has no tf32.
    ("mi300x", Limits(1307.4, 653.7, 163.4, 5.3)),
    ("mi355x", Limits(2516.6, 157.3, 157.3, 8.0)),
    # AMD's pages of the products; RDNA has no tf32. Strix Halo: 40 CUs at 2.9 GHz, LPDDR5X-8000.
    ("rx-7900-xtx", Limits(122.8, 61.4, 61.4, 0.96)),
    ("8060s", Limits(59.4, 29.7, 29.7, 0.256)),
    ("rx-9070-xt", Limits(195.0, 48.7, 48.7, 0.64)),
)


def limits_of(device: str) -> Limits | None:
    """The limits of a device by its name ("nvidia-h200", "nvidia-h100-80gb-hbm3"), if known."""
    name = device.lower().replace(" ", "-")
    return next((limits for part, limits in _KNOWN if part in name), None)
