"""algebra: what a mod says about a whole tile, before an element of it is computed."""

from flexattn.mods.algebra.bounds import (
    Bounds,
    SearchTable,
    TableUse,
    bounds_of,
    tables_of,
    verdicts,
)
