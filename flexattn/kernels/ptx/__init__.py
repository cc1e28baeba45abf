"""The steps between Triton's PTX and machine code: passes, and the choice of ptxas."""
