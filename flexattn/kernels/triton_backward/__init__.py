"""The Triton backward: gradients of queries, keys, values and what score_mods capture."""
