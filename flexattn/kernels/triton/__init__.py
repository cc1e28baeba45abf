"""The Triton templates: prefill and decode, for every GPU."""
