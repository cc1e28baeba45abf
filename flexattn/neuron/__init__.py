"""Support of AWS Neuron alone: an interpreter of NKI, a lint, a cost model, and a runner."""
