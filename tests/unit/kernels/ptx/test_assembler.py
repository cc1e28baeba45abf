"""Which ptxas Hopper's kernels are assembled with, and that no other thread's are."""

import os
import threading

import pytest
from triton.backends.nvidia import compiler

from flexattn.kernels.ptx import assembler
from flexattn.kernels.ptx.assembler import (
    assembled_by,
    assemblers,
    effective,
    own_ptxas,
    preferred,
    ptx_version,
)


@pytest.mark.parametrize(
    ("release", "own", "others", "default"),
    [
        ("3.6.0", "ptxas", (), ""),
        ("3.7.1", "ptxas", ("ptxas-blackwell",), ""),
        ("3.8.0", "ptxas", ("ptxas-blackwell",), ""),
        ("3.9.0", "ptxas-blackwell", ("ptxas",), "ptxas"),
        ("3.10.0+git1", "ptxas-blackwell", ("ptxas",), "ptxas"),
        ("", "ptxas", (), ""),
    ],
)
def test_the_older_of_a_wheels_two_is_the_default(monkeypatch, release, own, others, default):
    """Triton 3.9 takes ptxas 13.4, which spills loops that 12.9 of the same wheel does not."""
    monkeypatch.setattr(assembler, "triton_version", lambda: release)
    monkeypatch.setattr(assembler, "names_ptxas", lambda: False)
    assert own_ptxas() == own and assemblers() == ("", *others) and preferred() == default


@pytest.mark.parametrize("name", ["TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"])
def test_whoever_names_one_gets_it(monkeypatch, name):
    monkeypatch.setenv(name, "/opt/cuda/bin/ptxas")
    assert assemblers() == ("",) and preferred() == ""


def test_one_that_is_not_installed_is_not_offered(monkeypatch, tmp_path):
    monkeypatch.setattr(assembler, "triton_version", lambda: "3.9.0")
    monkeypatch.setattr(assembler, "names_ptxas", lambda: False)
    monkeypatch.setattr(assembler, "_tool", lambda name: tmp_path / name)
    assert assemblers() == ("",)


def ptxas_here():
    return compiler.get_ptxas(90).path


@pytest.mark.parametrize("wanted", ["ptxas", "ptxas-blackwell"])
def test_other_threads_keep_theirs(wanted):
    """Triton's knob is one of the process: torch's own kernels got ours."""
    own, seen = ptxas_here(), []
    environment = dict(os.environ)
    with assembled_by(wanted):
        other = threading.Thread(target=lambda: seen.append(ptxas_here()))
        other.start()
        other.join(10)
        assert ptxas_here().endswith(f"/bin/{wanted}") and dict(os.environ) == environment
        with assembled_by(""):
            assert ptxas_here().endswith(f"/bin/{wanted}"), "the innermost name counts"
    assert seen == [own] and ptxas_here() == own


def test_an_error_inside_leaves_it_as_it_was():
    own = ptxas_here()
    with pytest.raises(ValueError, match="inside"), assembled_by("ptxas-blackwell"):
        raise ValueError("inside")
    assert ptxas_here() == own


def test_what_a_config_names_and_this_triton_lacks_is_its_own(monkeypatch):
    monkeypatch.setattr(assembler, "names_ptxas", lambda: False)
    for release, expected in (("3.6.0", ""), ("3.7.1", "ptxas-blackwell"), ("3.9.0", "")):
        monkeypatch.setattr(assembler, "triton_version", lambda: release)
        assert effective("ptxas-blackwell") == expected and effective("") == ""


def test_ptx_is_of_a_release_that_its_assembler_reads():
    older, newer = ptx_version("ptxas"), ptx_version("ptxas-blackwell")
    assert older < newer and 87 <= older < 90 and ptx_version("") is None
