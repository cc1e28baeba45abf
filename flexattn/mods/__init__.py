"""mods: the user's score_mod or mask_mod as data."""

from flexattn.mods.bind import bind, look, watch
from flexattn.mods.expr import Buffer, Expr, Mod
from flexattn.mods.guards import Guards
from flexattn.mods.identity import Identity
from flexattn.mods.registered import register_op
from flexattn.mods.site import Bound
