"""Prefill on Hopper, in Gluon."""
