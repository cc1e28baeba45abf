"""A strict interpreter of the subset of NKI (stable since 0.3) that our kernels use.

It is written from the public documentation of nki.isa and nki.language and holds a kernel to the
documented limits; it says nothing of what the NKI compiler does with it.
"""
