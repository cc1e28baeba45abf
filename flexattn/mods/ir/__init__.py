"""ir: the operations that an Expr is made of, one row each; flexattn.mods.ops has them by name."""
