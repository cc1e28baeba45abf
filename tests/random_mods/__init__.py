"""Random score_mods and mask_mods: compiled for an H200 with no GPU, and checked on one."""
