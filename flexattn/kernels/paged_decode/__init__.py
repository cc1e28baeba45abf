"""Decode over paged caches, as a DecodePlan launches it, with its join and merges."""
