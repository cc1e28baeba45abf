"""Kernels are the same program where names were changed one for one, and nowhere else."""

import ast
from pathlib import Path

import pytest

from bench.same_programs import canonical, canonical_ptx, used_by, without_docstrings

GOLDENS = sorted((Path(__file__).parents[2] / "golden/files").iterdir())
BEFORE = """
import triton
from flexattn.gluon_api import load

SIZE = triton.constexpr(4)


@triton.jit
def step(slot, phase):
    if slot == SIZE:
        other, turn = 0, 1
    else:
        other, turn = slot + 1, phase
    return other, turn


@triton.jit
def kernel(OUT, size):
    told, turn = step(size, 0)
    load(OUT, told, value=turn)
"""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"SIZE": "STAGES", "step": "advance", "slot": "stage"},
        {"told": "index", " turn": " phase_bit", "=turn": "=phase_bit"},
        # Names of one function are nothing to another's.
        {"def step(slot, phase)": "def step(phase, slot)", "slot == SIZE": "phase == SIZE",
         "slot + 1, phase": "phase + 1, slot"},
        {"    told, turn": "    # What comes next.\n    told, turn"},
        {"flexattn.gluon_api": "flexattn.moved.gluon_api"},
        {"def kernel": "def flexattn_hopper_prefill"},
    ],
)  # fmt: skip
def test_names_one_for_one_are_the_same_program(changes):
    assert canonical(changed(BEFORE, changes)) == canonical(BEFORE)


@pytest.mark.parametrize(
    "changes",
    [
        # A constant, an operator, an attribute, an import, a keyword.
        {"slot + 1": "slot + 2"},
        {"slot + 1": "slot - 1"},
        {"triton.jit": "triton.autotune"},
        {"import load": "import store", "load(": "store("},
        {"value=": "other="},
        # Two names where one was, one where two were, two names for each other in one place.
        {"load(OUT, told": "index = told\n    load(OUT, index"},
        {"told, turn = step": "turn, turn = step"},
        {"slot + 1, phase": "phase + 1, slot"},
        {"return other, turn": "return turn, other"},
        # What a launcher binds by name.
        {"def kernel(OUT, size)": "def kernel(OUT, length)", "step(size": "step(length"},
        {"def kernel": "def main"},
        # Triton gives a branch its results in the order of their names.
        {"other": "whole"},
    ],
)
def test_all_else_is_another_program(changes):
    assert canonical(changed(BEFORE, changes)) != canonical(BEFORE)


PTX = """.visible .entry kernel(.param .u64 kernel_param_0)
{
	.reg .b32 	%r<4>;
	.loc	1 12 3
	mov.u32 	%r1, %tid.x;
$L__BB0_1:
	add.s32 	%r2, %r1, 8; // eight places on
	bra.uni 	$L__BB0_1;
$L__tmp0:
}
	.section	.debug_line
"""


@pytest.mark.parametrize(
    ("old", "new", "equal"),
    [
        ("%r1", "%r3", True),
        ("$L__BB0_1", "$L__BB0_7", True),
        ("1 12 3", "1 99 3", True),
        ("r<4>", "r<9>", True),
        (" // eight places on", "", True),
        ("debug_line", "debug_line of another file", True),
        (", 8;", ", 16;", False),
        ("add.s32 	%r2, %r1", "add.s32 	%r2, %r2", False),
        ("%tid.x", "%tid.y", False),
        ("%r2", "%rd2", False),
    ],
)
def test_ptx_is_the_same_up_to_registers_labels_and_lines(old, new, equal):
    assert (canonical_ptx(PTX.replace(old, new)) == canonical_ptx(PTX)) is equal


def test_arguments_swapped_by_name_are_another_program():
    """Each argument keeps its place and its use, but a launcher would bind the other's value."""
    text = "def kernel(first, second):\n    return first - second\n"
    swapped = "def kernel(second, first):\n    return second - first\n"
    assert canonical(text) != canonical(swapped)
    assert canonical(text, {"first": "second", "second": "first"}) == canonical(swapped)


def test_a_name_that_a_keyword_names_stays():
    """Renamed along with its order, a parameter given by keyword would be another one."""
    text = "def f(a, b):\n    return a - b\n\n\ndef kernel():\n    return f(a=1, b=2)\n"
    swapped = text.replace("f(a, b)", "f(b, a)").replace("a - b", "b - a")
    assert canonical(text) != canonical(swapped)


@pytest.mark.parametrize("file", GOLDENS[::7], ids=lambda file: file.name)
def test_rendered_kernels_differ_by_a_constant_and_not_by_a_name(file):
    text = file.read_text()
    assert canonical(text.replace("row_start", "row_starting")) == canonical(text)
    assert canonical(text.replace("1.4426950408889634", "1.44269504")) != canonical(text) or (
        "1.4426950408889634" not in text
    )


def changed(text, changes):
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    return text


def test_what_a_module_exports_is_no_part_of_its_program():
    parts = (
        ['"""A pass."""', "NAME = 1"],
        ['"""Its other words."""', '__all__ = ["NAME"]', "NAME = 1"],
    )
    one, other = (ast.dump(without_docstrings("\n".join(each))) for each in parts)
    assert one == other


HELPERS = """
from triton import language
from triton.hopper import tma
assert tma
load = language.load
_STEP = 1
def store(x):
    return tma.store(x, _STEP)
"""
MORE = "import os\ndef atomic_add(x):\n    return os.add(x)\n"


def test_a_module_counts_as_far_as_kernels_import_from_it():
    def dumped(module, *texts):
        return ast.dump(used_by(module, texts))

    loads = "from helpers import load\nx = tl.atomic_add(store)\n"
    stores = "from helpers import store\n"
    assert dumped(HELPERS + MORE, loads) == dumped(HELPERS, loads)
    assert dumped(HELPERS.replace("_STEP = 1", "_STEP = 2"), loads) == dumped(HELPERS, loads)
    assert dumped(HELPERS.replace("_STEP = 1", "_STEP = 2"), stores) != dumped(HELPERS, stores)
    # A stage of the compiler, of which the text says nothing, counts whole.
    assert dumped(HELPERS + MORE, "x = 1") != dumped(HELPERS, "x = 1")
