"""Expressions of mods as text of Triton, Gluon and torch."""
