"""Prefill on Blackwell, in Gluon: scores, weights and outputs are in tensor memory."""
