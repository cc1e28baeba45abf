"""Which configs there are for a problem, which of them can run, and which one to start from."""
