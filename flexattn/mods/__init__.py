"""mods: the user's score_mod or mask_mod as data."""

from flexattn.mods.bind import Bound, bind
from flexattn.mods.expr import Buffer, Expr, Mod

__all__ = ["Bound", "Buffer", "Expr", "Mod", "bind"]
