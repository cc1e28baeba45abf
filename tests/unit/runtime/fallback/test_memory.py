"""What is remembered of builds on disk, where it holds, and what damages it."""

import os
from dataclasses import replace

import pytest

from flexattn.device import INTERPRETER
from flexattn.kernels.choose.options import NONE
from flexattn.runtime import outcomes
from flexattn.runtime.candidates import candidates_of
from flexattn.runtime.dispatch import told
from flexattn.runtime.outcomes import Memory, Outcome, memory
from flexattn.settings import override
from tests.failing_builds import H200, LASTING, WANTED, Builder, gluon, served
from tests.problems import A100, problem
from tests.processes import ROOT, python

SOURCE = next(candidates_of(problem("decode"), H200, NONE)).sources()[0]
REFUSED = Outcome("compiler", "NameError('sigmoid is not defined')")


def test_a_memory_is_one_of_its_environment(monkeypatch, place):
    known = Memory()
    known.note(SOURCE, H200, REFUSED, "a problem")
    assert Memory().find(SOURCE, H200) == REFUSED
    assert Memory().find(SOURCE, A100) is None
    assert Memory().find(replace(SOURCE, hash="f" * 64), H200) is None
    for name, other in (
        ("compiler_of", lambda device: "Triton 3.9.0, ptxas 12.9.86 at /other"),
        ("_code", lambda: "changed"),
    ):
        with monkeypatch.context() as here:
            here.setattr(outcomes, name, other)
            assert Memory().find(SOURCE, H200) is None, name
    (noted,) = Memory().entries(H200)
    assert (noted.outcome, noted.title, noted.source) == (REFUSED, "a problem", SOURCE.hash)
    assert "ptxas" in noted.compiler and Memory().entries(A100) == []
    assert known.clear() == 1 and known.find(SOURCE, H200) is None
    assert not list(place.glob("kernels/*"))


@pytest.mark.parametrize("folder", ["a" * 300, "file", "loop", "closed"])
def test_a_cache_directory_that_cannot_be_looked_into_has_no_outcomes(
    monkeypatch, tmp_path, said, folder
):
    """Path.is_dir raised OSError of a name of 300 letters, and where it may not search."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    looks = os.stat

    def closed(path, *rest, **more):
        if "closed" in str(path):
            raise PermissionError(13, "Permission denied")
        return looks(path, *rest, **more)

    monkeypatch.setattr(os, "stat", closed)
    with override(cache_dir=tmp_path / folder):
        known = Memory()
        assert known.find(SOURCE, H200) is None
        known.note(SOURCE, H200, REFUSED, "a problem")
        assert known.find(SOURCE, H200) == REFUSED


def test_all_passes_are_of_its_environment():
    """What one of another text makes is another kernel, which may fail or spill otherwise."""
    package = ROOT / "flexattn"
    texts = {each: each.read_text() for each in package.glob("kernels/*/*.py")}
    passes = {each for each, text in texts.items() if "\ndef merged(ptx: str)" in text}
    assert len(passes) >= 4
    assert passes <= {package / name for name in outcomes._COMPILING}


@pytest.mark.parametrize("fault", ["bytes", "schema", "kind", "another source", "a link"])
def test_a_file_that_is_not_sound_is_ignored_and_said(fault, place, said):
    Memory().note(SOURCE, H200, REFUSED, "a problem")
    (path,) = place.glob("kernels/*/*.json")
    from flexattn.util.files import sealed, unsealed

    data = unsealed(path.read_bytes())
    match fault:
        case "bytes":
            path.write_bytes(path.read_bytes()[:50])
        case "schema":
            path.write_text(sealed(data | {"schema": 99}))
        case "kind":
            path.write_text(sealed(data | {"outcome": {"kind": "miracle"}}))
        case "another source":
            path.write_text(sealed(data | {"source": "0" * 64}))
        case "a link":
            moved = place / "elsewhere.json"
            path.rename(moved)
            path.symlink_to(moved)
    known = Memory()
    assert known.find(SOURCE, H200) is None and known.find(SOURCE, H200) is None
    assert len(said()) == (fault != "another source")


def test_a_directory_that_cannot_be_written_stops_no_call(place, said):
    (place / "kernels").write_text("a file")
    found = served(Builder(gluon(LASTING["the compiler"][0])))
    assert found.config.language == "triton"
    assert len(said()) == 2 and any("not kept" in each for each in said())


def test_a_memory_has_an_end(monkeypatch, place):
    monkeypatch.setattr(outcomes, "MAX_FILES", 3)
    known = Memory()
    for number in range(5):
        source = replace(SOURCE, hash=f"{number:064}"[::-1])
        known.note(source, H200, REFUSED, "a problem")
        (path,) = place.glob(f"kernels/*/{source.hash[:32]}.json")
        os.utime(path, (number, number))
    kept = {each.stem[0] for each in place.glob("kernels/*/*.json")}
    assert kept == {"2", "3", "4"}


def test_without_a_compiler_that_can_be_named_nothing_is_remembered(monkeypatch, place):
    def missing(device):
        raise RuntimeError("Cannot find ptxas")

    monkeypatch.setattr(outcomes, "compiler_of", missing)
    known = Memory()
    known.note(SOURCE, H200, REFUSED, "a problem")
    assert known.find(SOURCE, H200) is None and not list(place.iterdir())
    known.note(SOURCE, INTERPRETER, REFUSED, "a problem")


CHILD = """
from flexattn.runtime import dispatch
from tests import failing_builds as here

dispatch.loop_spills = lambda code: (code[0], 0, code[1])
builder = here.Builder(here.gluon(here.LASTING["the compiler"][0]))
choice = here.served(builder)
print(" ".join(builder.languages), choice.config.language, choice.attempts[0].remembered)
"""


def test_a_second_process_does_not_compile_what_the_first_was_refused(place):
    about = {"FLEXATTN_CACHE_DIR": place, "FLEXATTN_MODE": "off", "FLEXATTN_STRICT": 0}
    assert [python("-c", CHILD, **about)[0].split() for _ in range(2)] == [
        ["gluon", "triton", "triton", "False"],
        ["triton", "triton", "True"],
    ]


def test_what_is_known_is_told_without_compiling():
    served(Builder(gluon(LASTING["the compiler"][0])))
    found = told(candidates_of(WANTED, H200, NONE), H200, memory())
    assert found[0].remembered and "sigmoid" in str(found[0])
    assert found[1].outcome is None and str(found[1]).endswith("not tried")
