"""From a call to the launch: what the user calls, and what a repeated call is told by."""
