"""codecache: the texts of kernels as files that people open, and as modules that are executed."""
