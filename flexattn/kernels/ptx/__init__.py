"""The steps of a kernel between Triton's PTX and its machine code: passes, and the choice of
ptxas.
"""
