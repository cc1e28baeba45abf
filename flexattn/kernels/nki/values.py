"""Values of an NKI kernel's mods: where they lie, and the memory they take while needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

_Place = Literal["static", "column", "tile"]


@dataclass(frozen=True, slots=True)
class NkiValue:
    """A printed operand.

    place: a number that Python knows, a column of one float32 a row, or a tile. text: how the
    kernel writes it. slot: of a tile or column in its pool, -1 for what the template owns.
    """

    place: _Place
    text: str
    pool: str = ""
    slot: int = -1


@dataclass
class Pools:
    """Tiles and columns by dtype, each handed out again when its value is no longer needed.

    used: how many of each pool the kernel must allocate. keys_first: tiles are [keys, chunks,
    rows] and columns [keys, 1], instead of [rows, keys] and [rows, 1].
    """

    keys_first: bool = False
    free: dict[str, list[int]] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)

    def take(self, pool: str) -> NkiValue:
        """A place in a pool: "tile_f32", _bf16, _f16, _i32 or _u8, "column" or "column_i32"."""
        spare = self.free.setdefault(pool, [])
        if spare:
            slot = spare.pop()
        else:
            slot = self.used.get(pool, 0)
            self.used[pool] = slot + 1
        if pool.startswith("column"):
            name = pool.replace("column", "columns")
            lanes = "keys" if self.keys_first else "rows"
            return NkiValue("column", f"{name}[:{lanes}, {slot}:{slot + 1}]", pool, slot)
        return NkiValue("tile", f"{pool}{self.tile(str(slot))}", pool, slot)

    def tile(self, slot: str = "") -> str:
        """The index of a tile, of a slot or, without one, of memory that holds one tile."""
        slot = f", {slot}" if slot else ""
        return f"[:keys{slot}, :count, :rows]" if self.keys_first else f"[:rows{slot}, :cols]"

    def first(self, tile: NkiValue) -> str:
        """The first column of a tile."""
        if self.keys_first:
            return f"{tile.pool}[:keys, {tile.slot}, 0, 0:1]"
        return f"{tile.pool}[:rows, {tile.slot}, 0:1]"

    def give(self, value: NkiValue) -> None:
        """The value is no longer needed. Columns stay: they are made once, before all tiles."""
        if value.slot >= 0 and value.place == "tile":
            self.free[value.pool].append(value.slot)
