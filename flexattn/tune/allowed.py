"""check_allowed(): functions that a workload file names are those that its reader allows.

A file that could name any function of any module could run any program. So its functions come from
this package's catalogue and presets, or from modules that whoever reads the file names.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexattn.errors import InputError
from flexattn.mods.path import load_path

_OWN = ("flexattn.catalogue", "flexattn.presets.mods")


def check_allowed(path: str, where: str, allow: Sequence[str]) -> None:
    """Raise InputError for a function outside of our own modules and `allow`.

    path: "module:function". allow: names of modules, which allow those inside them too. The
    function is also defined there: a module that imports os allows nothing of os.
    """
    module = path.partition(":")[0]
    if not _inside(module, allow):
        raise InputError(
            f"{where}: {path!r}",
            f"a workload names functions of {' and '.join(_OWN)}, and of modules that are allowed",
            f"if you trust {module}, add --allow-module {module}, in Python allow=[{module!r}]",
        )
    home = getattr(load_path(path), "__module__", None)
    if not _inside(str(home), allow):
        raise InputError(
            f"{where}: {path!r} is from {home}",
            "a function is defined in the module that allows it",
            f"define a function in {module} that calls it",
        )


def _inside(module: str, allow: Sequence[str]) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in (*_OWN, *allow))
