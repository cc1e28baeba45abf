"""What servers ask of an attention backend, as read in their sources: names, signatures, fields.

Doubles stand in for packages that need a GPU build, and say of which release they are.
"""

import importlib
import inspect
import sys


def imported(monkeypatch, modules, name):
    """A module of flexattn, imported with these in the place of the packages that it needs."""
    for root in {each.partition(".")[0] for each in modules}:
        for loaded in [each for each in sys.modules if each.split(".")[0] == root]:
            monkeypatch.delitem(sys.modules, loaded)
    for each, module in modules.items():
        monkeypatch.setitem(sys.modules, each, module)
    monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, found)  # and gone again behind the test
    return found


def assert_same_signatures(double, other):
    """That another class has a double's methods, with its arguments first; it may take more."""
    for name in vars(double):
        theirs = getattr(other, name, None)
        if (name.startswith("__") and name != "__init__") or not inspect.isroutine(theirs):
            continue
        wanted, got = (_arguments(getattr(each, name)) for each in (double, other))
        assert got[: len(wanted)] == wanted or got[-1][1].name == "VAR_KEYWORD", name


def _arguments(method):
    return [
        (each.name, each.kind, each.default is each.empty)
        for each in inspect.signature(method).parameters.values()
    ]
