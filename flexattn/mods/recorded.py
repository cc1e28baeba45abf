"""Mods that another process traced, as files: a callable is recognised by its digest.

    <root>/mods/<digest>.json     a Site: its mods as data, each with the numbers of its callable

They are read from an explicitly named directory alone. A file is data: it cannot run code, but it
says what a callable means, so a directory deserves the trust that the program itself gets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexattn.errors import CacheError
from flexattn.mods.codec import from_data, to_data
from flexattn.mods.digest import digest
from flexattn.mods.expr import Buffer, Mod
from flexattn.mods.identity import Identity
from flexattn.mods.site import Site, SiteLayout, Variant, interned
from flexattn.settings import say_once
from flexattn.util.files import publish, read_regular, sealed, unsealed

_SCHEMA = 2
_MAX_BYTES = 2**21
MAX_VARIANTS = 64
_FIELDS = {"schema", "first", "sized", "variants"}
_VARIANT = {"constants", "shapes", "mod", "tensors"}


def read_site(root: Path, kind: str, identity: Identity) -> Site | None:
    """What is recorded of callables with this identity; a file that is no record is a miss."""
    path = _path(root, identity)
    try:
        raw = None if path is None else read_regular(path, _MAX_BYTES, trusted=True)
        return None if raw is None else _site(unsealed(raw), kind, identity)
    except CacheError as error:
        say_once(f"{path}: not used, the mod is traced: {error.line}")
        return None


def write_site(root: Path, kind: str, identity: Identity, site: Site) -> bool:
    """Record a site beside the variants that are recorded already.

    False where the identity means nothing in another process.
    """
    path = _path(root, identity)
    if path is None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    old = read_site(root, kind, identity)
    (layout,) = site.layouts
    if old and old.asked == site.asked:
        for key, variants in layout.variants.items():
            old.layouts[0].variants.put(key, variants)
        (layout,) = old.layouts
        site = old
    publish(path, sealed(_told(site, layout)))
    return True


def _path(root: Path, identity: Identity) -> Path | None:
    name = digest(identity)
    return None if name is None else root / "mods" / f"{name}.json"


def _told(site: Site, layout: SiteLayout) -> dict[str, Any]:
    count = len(layout.constants)
    variants = [
        {
            # Zeros are kept by their text, as in the key.
            "constants": list(key[:count]),
            "shapes": [list(shape) for shape in key[count:]],
            "mod": to_data(variant.mod),
            "tensors": list(variant.tensors),
        }
        for key, variants in layout.variants.items()
        for variant in variants
    ]
    return {
        "schema": _SCHEMA,
        "first": list(site.first),
        "sized": bool(layout.asked),
        "variants": variants,
    }


def _site(data: Any, kind: str, identity: Identity) -> Site:
    """The site of such data, if it fits what the callable captures here."""
    _need(type(data) is dict and data.keys() == _FIELDS, f"an object of {sorted(_FIELDS)}")
    _need(data["schema"] == _SCHEMA, f"this version reads schema {_SCHEMA}")
    _need(type(data["sized"]) is bool, "sized is true or false")
    first = tuple(_list(data["first"], "first"))
    kinds = [*map(type, identity.scalars)]
    _need([*map(type, first)] == kinds, "first has the callable's scalars")
    variants = _list(data["variants"], "variants")
    _need(len(variants) <= MAX_VARIANTS, f"at most {MAX_VARIANTS} variants")
    site = Site(first, exported=len(variants))
    layout = site.layout(frozenset(), ("shape",) if data["sized"] else (), ())
    for each in variants:
        _need(type(each) is dict and each.keys() == _VARIANT, f"an object of {sorted(_VARIANT)}")
        mod = _mod(each["mod"], kind)
        variant = Variant(mod, _indices(each["tensors"], len(identity.tensors)), ())
        tensors = [identity.tensors[i] for i in variant.tensors]
        buffers = tuple(Buffer(str(t.dtype).removeprefix("torch."), t.dim()) for t in tensors)
        _need((buffers, ()) == (mod.buffers, mod.scalars), "slots have its dtypes")
        layout.variants.put(_key(each, layout, identity), (variant,))
    return site


def _mod(data: Any, kind: str) -> Mod:
    mod = from_data(data)
    _need(mod.kind == kind, f"it is a {kind}_mod")
    return interned(mod.kind, mod.expr, mod.buffers, mod.scalars)


def _key(data: dict[str, Any], layout: SiteLayout, identity: Identity) -> tuple[Any, ...]:
    constants = _list(data["constants"], "constants")
    _need(len(constants) == len(layout.constants), "a value for each constant")
    for value, i in zip(constants, layout.constants, strict=True):
        here = type(identity.scalars[i])
        zero = value in ("0", "0.0", "-0.0") and type(value) is str
        _need(zero or (type(value) is here and bool(value)), "constants are the scalars' kind")
    shapes = [tuple(_list(shape, "a shape")) for shape in _list(data["shapes"], "shapes")]
    _need(len(shapes) == (len(identity.tensors) if layout.asked else 0), "a shape for each tensor")
    _need(all(type(n) is int for shape in shapes for n in shape), "sizes are integers")
    return (*constants, *shapes)


def _indices(data: Any, count: int) -> tuple[int, ...]:
    found = _list(data, "indices")
    _need(all(type(i) is int and 0 <= i < count for i in found), f"indices are below {count}")
    return tuple(found)


def _list(data: Any, what: str) -> list[Any]:
    _need(type(data) is list, f"{what}: a list")
    found: list[Any] = data
    return found


def _need(holds: bool, rule: str) -> None:
    if not holds:
        raise CacheError("no record of a mod", rule)
