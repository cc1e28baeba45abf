"""flex_attention under torch.compile: one node of the graph, launched as an eager call is."""
