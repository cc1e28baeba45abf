"""Meetings of a program's warps that are taken out of its PTX, and the hook that does it."""

import threading

import pytest
from triton import knobs

from flexattn.compiler_context import without_meetings
from flexattn.lone_waits import ALONE, alone, taken_out

WAIT = "\tmbarrier.try_wait.parity.shared.b64 complete, [%r1], %r2;\n"
PTX = (
    "\tbar.sync \t0, 256;\n"
    f"\tmov.b32 %r3, 0; // {ALONE}\n"
    "\tadd.s32 \t%r1, %r4, 8;\n"
    "\tbar.sync \t0, 256;\n"
    f"{WAIT}"
    "\tbar.sync \t0, 256;\n"
    f"{WAIT}"
)


def test_only_meetings_before_a_wait_that_says_so_are_taken_out():
    assert taken_out(PTX) == PTX.replace("8;\n\tbar.sync \t0, 256;\n", "8;\n")
    assert taken_out(taken_out(PTX)) == taken_out(PTX)
    assert taken_out(PTX.replace(ALONE, "another comment")) == PTX.replace(
        ALONE, "another comment"
    )


@pytest.mark.parametrize(
    "line",
    [
        "\tbar.sync \t%r5, 256; mov.b32 %r6, 0;\n",  # a turn, or a tile given back
        "\tbar.arrive \t0, 256;\n",
        "\tbarrier.sync \t1;\n",  # where programs begin and end
    ],
)
def test_other_barriers_stay(line):
    text = f"\tmov.b32 %r3, 0; // {ALONE}\n{line}{WAIT}"
    assert taken_out(text) == text


def test_the_hook_stands_behind_the_one_there_was():
    seen = []

    def before(*given):
        seen.append(given)
        return ("key", "hash") if not given else None

    hook = alone(before)
    stages = {"llir": None, "ptx": lambda source, metadata: source + PTX}
    hook("backend", stages, "options", "language", 90)
    assert stages["ptx"]("", {}) == taken_out(PTX)
    assert hook() == (f"key {ALONE}", f"hash {ALONE}")
    assert len(seen) == 2 and alone(None)() == (f" {ALONE}", f" {ALONE}")


def test_the_hook_is_there_while_someone_compiles_and_then_as_before(monkeypatch):
    def before(*given):
        return None

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", before)
    entered, leave = threading.Event(), threading.Event()

    def compiles():
        with without_meetings(True):
            entered.set()
            leave.wait(10)

    other = threading.Thread(target=compiles)
    other.start()
    assert entered.wait(10)
    ours = knobs.runtime.add_stages_inspection_hook
    with without_meetings(True):
        # One hook for both: of two, the last to leave would leave the first.
        assert knobs.runtime.add_stages_inspection_hook is ours is not before
    leave.set()
    other.join(10)
    assert knobs.runtime.add_stages_inspection_hook is before
    with without_meetings(False):
        assert knobs.runtime.add_stages_inspection_hook is before
