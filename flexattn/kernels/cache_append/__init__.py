"""The kernel that stores new keys and values in a paged cache."""
