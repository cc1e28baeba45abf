"""From a rendered source to a launched kernel."""
