"""report: records as numbers, pictures, and one page that needs nothing else."""
