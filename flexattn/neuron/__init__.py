"""What only AWS Neuron needs: an interpreter of NKI, a lint, a cost model, and a runner."""
