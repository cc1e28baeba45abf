"""The archs that the compile tests stand for: one device of each."""

DEVICES = {
    "sm_80": "nvidia-a100",
    "sm_90": "nvidia-h200",
    "sm_120": "nvidia-rtx-5090",
    "gfx942": "amd-mi300x",
}
