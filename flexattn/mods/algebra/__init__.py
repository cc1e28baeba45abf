"""algebra: what a mod says about a whole tile, before an element of it is computed."""

from flexattn.mods.algebra.lower import Bounds, TableUse, bounds_of
from flexattn.mods.algebra.tables import Extremes, tables_of, verdicts
