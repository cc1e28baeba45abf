"""What happens to a kernel between Triton's PTX and its machine code: passes, and which ptxas."""
