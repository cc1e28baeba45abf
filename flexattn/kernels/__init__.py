"""Kernels: which configs there are, and what they render to."""
