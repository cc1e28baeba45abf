"""base: what kernels of every family are rendered with."""
