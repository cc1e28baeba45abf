"""What names no family of kernels: Source, arguments by name, tiles, rules, Jinja."""
