"""Which ptxas Hopper's kernels are assembled with, and that no other thread's are."""

import threading

import pytest
from triton import knobs

from flexattn.ptx import assembler
from flexattn.ptx.assembler import assembled_by, assemblers, own_ptxas, preferred


@pytest.fixture(autouse=True)
def asked_anew():
    assemblers.cache_clear()
    yield
    assemblers.cache_clear()


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


def test_threads_that_want_another_wait():
    """Triton reads one knob of the process: two kernels at once got each other's ptxas."""
    with assembled_by(""):
        own = knobs.nvidia.ptxas_blackwell.path
    seen, inside, leave = [], threading.Event(), threading.Event()

    def older():
        with assembled_by("ptxas"):
            inside.set()
            leave.wait(10)
            seen.append(knobs.nvidia.ptxas_blackwell.path)

    def by_default():
        with assembled_by(""):
            seen.append(knobs.nvidia.ptxas_blackwell.path)

    first, second = threading.Thread(target=older), threading.Thread(target=by_default)
    first.start()
    assert inside.wait(10)
    with assembled_by("ptxas"):  # several that want the same do not wait
        second.start()
        second.join(0.2)
        assert second.is_alive() and not seen
        leave.set()
        first.join(10)
    second.join(10)
    assert seen[0].endswith("bin/ptxas") and seen[1] == own
    assert knobs.nvidia.ptxas_blackwell.path == own


def test_an_error_inside_leaves_the_knob_as_it_was():
    own = knobs.nvidia.ptxas.path, knobs.nvidia.ptxas_blackwell.path
    with pytest.raises(ValueError, match="inside"), assembled_by("ptxas-blackwell"):
        assert knobs.nvidia.ptxas.path.endswith("ptxas-blackwell")
        raise ValueError("inside")
    assert own == (knobs.nvidia.ptxas.path, knobs.nvidia.ptxas_blackwell.path)
