"""A kernel's module, made of the text that was rendered: no file is read, and no bytecode."""

from __future__ import annotations

import linecache
from pathlib import Path
from types import ModuleType


def module_of(path: Path, text: str) -> ModuleType:
    """Execute a text as the module of a path.

    Triton takes a function's source from `inspect.getsourcelines`, when it is decorated or, in the
    interpreter, when it is first launched. Both read Python's table of lines, which gets the same
    text here: what lies at the path by then does not count.
    """
    name = str(path)
    lines = [f"{line}\n" for line in text.removesuffix("\n").split("\n")]
    # Without a time of change, `linecache.checkcache` never asks the disk.
    linecache.cache[name] = (len(text), None, lines, name)
    module = ModuleType(path.stem)
    module.__file__ = name
    # The __future__ imports of this file are not the kernel's.
    exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)
    return module
