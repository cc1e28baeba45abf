"""serving: decoding over contiguous and paged caches, for batches of any lengths."""

from flexattn.serving.plan import DecodePlan

__all__ = ["DecodePlan"]
