"""Kernels made before they are asked for."""
