"""What a compile turns off is turned back, and stays off where somebody else turned it."""

import gc

import pytest
from triton import knobs

from flexattn.runtime.codecache import source_lines, without_collections, without_dumps


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    # Triton writes what is set to the environment too.
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = False
        yield


def test_lines_are_left_out_meanwhile():
    with source_lines(False):
        assert knobs.compilation.disable_line_info
    assert not knobs.compilation.disable_line_info


def test_lines_that_are_wanted_are_kept():
    with source_lines(True):
        assert not knobs.compilation.disable_line_info


def test_the_last_of_several_turns_the_switch_back():
    first, second = source_lines(False), source_lines(False)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert knobs.compilation.disable_line_info
    second.__exit__(None, None, None)
    assert not knobs.compilation.disable_line_info


def test_a_failure_turns_it_back():
    with pytest.raises(ZeroDivisionError), source_lines(False):
        raise ZeroDivisionError
    assert not knobs.compilation.disable_line_info


def test_what_somebody_else_turned_stays():
    knobs.compilation.disable_line_info = True
    with source_lines(False):
        assert knobs.compilation.disable_line_info
    assert knobs.compilation.disable_line_info


def test_nothing_is_collected_meanwhile():
    with without_collections(), without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_kernel_that_ptxas_refuses_is_not_printed_whole(capsys):
    """Where another template serves, two thousand lines of PTX would be all that is seen."""
    from triton.backends.nvidia import compiler

    with without_dumps():
        compiler.print("\n.version 9.4\nplease share the reproducer above with Triton project.")
        compiler.print("ptxas info: 168 registers")  # what somebody asks for by a knob
    assert capsys.readouterr().out == "ptxas info: 168 registers\n"
    assert not hasattr(compiler, "print")
