"""What servers ask of an attention backend, as read in their sources: names, signatures, fields.

Doubles stand in for packages that need a GPU build, and say of which release they are.
"""

import importlib
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
