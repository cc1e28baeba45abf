"""The kernels that find which keys a falling score leaves no weight."""
