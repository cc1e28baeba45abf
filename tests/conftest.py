"""What every folder of tests shares."""

import atexit
import gc
import os
import sys
from contextlib import suppress
from zlib import crc32

# Read once, when flexattn is imported: batches, and what mods read, are checked in every test.
os.environ.setdefault("FLEXATTN_CHECK", "1")
# A kernel that does not build is an error, and no other one passes its test in its place.
os.environ.setdefault("FLEXATTN_STRICT", "1")
# Tests compare whole tensors themselves; those of the check of first launches ask for it.
os.environ.setdefault("FLEXATTN_VERIFY", "off")

import pytest

from flexattn.mods.bind import clear
from flexattn.settings import say_once
from tests.support import poison

with suppress(ImportError):  # the tests of a GPU run without it
    from hypothesis import settings

    # Of one revision every run says the same; `--hypothesis-profile=default` draws new examples.
    settings.register_profile("repeatable", derandomize=True, database=None)
    settings.load_profile("repeatable")


def pytest_addoption(parser):
    parser.addoption(
        "--accept-golden", action="store_true", help="write the rendered kernels as the goldens"
    )
    parser.addoption(
        "--half-matrix",
        choices=("first", "second"),
        help="a half of full_matrix tests marked oldest, and some of a space's configs",
    )


def pytest_collection_modifyitems(config, items):
    """The newest Triton and the oldest compile a half each of the long matrix that they share."""
    half = config.getoption("--half-matrix")
    if half is None:
        return

    def left(item):
        shared = {"full_matrix", "oldest"} <= {mark.name for mark in item.iter_markers()}
        return shared and crc32(item.nodeid.encode()) % 2 == (half == "first")

    config.hook.pytest_deselected(items=[item for item in items if left(item)])
    items[:] = [item for item in items if not left(item)]


def pytest_itemcollected(item):
    """Tests of these folders have its name for a mark."""
    if (folder := item.path.parent.name) in ("gpu", "compile", "interpreter"):
        item.add_marker(folder)


# A tenth of the time went into looking for garbage among modules and collected tests, a second of
# it when pytest ends.
gc.disable()
atexit.register(gc.unfreeze)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture
def poisoned(request, monkeypatch):
    """Memory that torch.empty hands out holds NaN, so an output that nobody wrote is seen.

    Not in compiled graphs: Dynamo traces torch.empty, and Inductor fills memory of its own.
    """
    if request.node.get_closest_marker("compiled") is None:
        poison(monkeypatch)
    elif rules := sys.modules.get("torch._dynamo.trace_rules"):
        # Made while an earlier test had its own torch.empty, its table does not know torch's.
        rules.get_torch_obj_rule_map.cache_clear()


@pytest.fixture(autouse=True)
def nothing_traced_or_said():
    """A number that another test traced with another value would be an argument."""
    clear()
    say_once.cache_clear()
