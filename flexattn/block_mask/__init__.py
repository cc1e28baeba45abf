"""Block masks: made, classified, listed and drawn."""
