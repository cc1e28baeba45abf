"""The registry of families, and which of their configs serve a problem."""
