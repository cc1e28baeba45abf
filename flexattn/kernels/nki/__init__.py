"""Kernels for NeuronCores, in NKI."""
