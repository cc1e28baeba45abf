"""What is of no family of kernels."""
