"""The load test: what clients ask, how one asks, and what must hold at the end."""
