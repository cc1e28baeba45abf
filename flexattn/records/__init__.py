"""cache: what tuning found, as files that dispatch reads, people merge, and nothing executes."""
