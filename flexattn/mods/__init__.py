"""mods: the user's score_mod or mask_mod as data."""

from flexattn.mods.bind import bind, look, watch
from flexattn.mods.expr import Buffer, Expr, Mod
from flexattn.mods.identity import Identity
from flexattn.mods.operators import register_op
from flexattn.mods.site import Bound, Guards
