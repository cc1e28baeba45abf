"""The parts that all families of kernels share: Source, arguments by name, tiles, rules, Jinja."""
