"""NKI from a problem: mods as tables and instructions, templates filled, sources with a hash."""
