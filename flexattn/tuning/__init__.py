"""tune: ask, build, gate, measure, race, record."""
