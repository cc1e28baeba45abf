"""Which candidate serves where another fails, what is said, and what later processes know."""

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flexattn.build import Kernel
from flexattn.device import INTERPRETER, named
from flexattn.dispatch import Dispatcher, candidates_of
from flexattn.errors import BuildError, ConfigError, DriverError, RenderError
from flexattn.fallback import chain, environment
from flexattn.fallback import memory as memory_module
from flexattn.fallback.chain import MAX_SPILLED, told
from flexattn.fallback.memory import Memory, memory
from flexattn.fallback.outcome import Outcome, outcome_of
from flexattn.options import NONE, Options, parse
from flexattn.settings import override, say_once
from flexattn.space.config import language_of
from tests.problems import problem

H200, A100 = named("nvidia-h200"), named("nvidia-a100")
ROOT = Path(__file__).parents[2]
WANTED = problem()


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A user's directory of this test's own, no records, and nothing that an earlier test knew."""
    say_once.cache_clear()
    memory.cache_clear()
    monkeypatch.setattr("flexattn.space.gluon.offered", lambda: True)
    with override(cache_dir=tmp_path, cache=(), mode="off", strict=False):
        yield tmp_path
    memory.cache_clear()


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "flexattn")
    return lambda: [record.getMessage() for record in caplog.records]


def caused(cause):
    """As build wraps what Triton raised."""
    error = BuildError("Triton could not compile /a/kernel.py for sm_90", "it compiles", "report")
    error.__cause__ = cause
    return error


def ptxas(status):
    """As Triton raises where ptxas ended with a status."""
    inner = subprocess.CalledProcessError(status, ["/bin/ptxas", "-v"])
    outer = RuntimeError(f"`ptxas` failed with error code {status}\nRepro command: /bin/ptxas -v")
    outer.__context__ = inner
    return caused(outer)


SPOKEN = "at 12:34:\n  x = sigmoid(s)\n      ^\nNameError('sigmoid is not defined')"
LASTING = {
    "the compiler": (caused(RuntimeError(SPOKEN)), "compiler", "sigmoid is not defined"),
    "ptxas": (ptxas(255), "compiler", "error code 255"),
    "a check": (BuildError("a thread knows seven bits", "rule", "do"), "check", "seven bits"),
    "a pass": (caused(RenderError("the PTX is not as known")), "check", "not as known"),
    "the loader": (DriverError("cuModuleLoadData", "CUDA_ERROR_INVALID_IMAGE"), "loader", "IMAGE"),
    "registers": (
        DriverError("kernel for 512 threads", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
        "loader",
        "OUT_OF_RESOURCES",
    ),
}
PASSING = {
    "memory": (caused(MemoryError("no memory")), "no memory"),
    "a killed ptxas": (ptxas(-9), "killed"),
    "a killed shell's ptxas": (ptxas(137), "killed"),
    "a full disk": (caused(OSError(28, "No space left on device")), "No space left"),
    "a full disk before the compiler": (OSError(28, "No space left on device"), "No space left"),
    "a timeout": (caused(subprocess.TimeoutExpired("ptxas", 60)), "TimeoutExpired"),
    "ptxas' memory": (
        caused(RuntimeError("ptxas fatal : Memory allocation failure")),
        "llocation",
    ),
    "the GPU's memory": (DriverError("cuModuleLoadData", "CUDA_ERROR_OUT_OF_MEMORY"), "MEMORY"),
}


class Builder:
    """Compiles nothing. fault: of a source, the error that building it raises, or None.

    shared, spills: of a source's kernel, in bytes, and (words in loops, bytes of stack).
    """

    def __init__(self, fault=None, shared=None, spills=None):
        self.fault = fault or (lambda source: None)
        self.shared = shared or (lambda source: 0)
        self.spills = spills or (lambda source: (0, 0))
        self.built = []

    def kernel(self, source, device, index):
        self.built.append(source)
        if (error := self.fault(source)) is not None:
            raise error
        metadata = SimpleNamespace(shared=self.shared(source))
        asm = {"cubin": self.spills(source)}
        return Kernel(source, SimpleNamespace(metadata=metadata, asm=asm), index)

    @property
    def languages(self):
        return [each.language for each in self.built]


@pytest.fixture(autouse=True)
def spills_are_told(monkeypatch):
    """A stand-in's machine code is what its loops spill."""
    monkeypatch.setattr(chain, "loop_spills", lambda code: code)


def served(builder, wanted=WANTED, options=NONE, device=H200):
    return Dispatcher(builder).kernels(wanted, device, 0, options)[0]


def gluon(error):
    return lambda source: error if source.language == "gluon" else None


# one candidate fails, the next serves


@pytest.mark.parametrize("name", LASTING)
def test_what_is_refused_gives_way_and_is_remembered(name, said, place):
    """Six of 66 everyday mods once ended in BuildError: nobody asked the other template."""
    error, kind, words = LASTING[name]
    builder = Builder(gluon(error))
    found = served(builder)
    assert language_of(found.config) == "triton" and found.attempts[-1].outcome.built
    assert found.attempts[0].outcome.kind == kind and words in str(found.attempts[0])
    assert words in found.origin
    assert len(said()) == len(builder.built) - 1
    for line in said():
        assert words in line and "serves instead" in line and "\n" not in line
    # Another dispatcher, as in another process, does not compile it again.
    memory.cache_clear()
    again = Builder(gluon(error))
    assert served(again).config == found.config
    assert again.languages == ["triton"]
    assert served(again).attempts[0].remembered
    assert len(list(place.glob("outcomes/sm_90-*/*.json"))) == len(builder.built) - 1


@pytest.mark.parametrize("name", PASSING)
def test_what_may_pass_gives_way_and_is_not_remembered(name, said, place):
    error, words = PASSING[name]
    found = served(Builder(gluon(error)))
    assert language_of(found.config) == "triton"
    assert found.attempts[0].outcome.kind == "passing" and words in str(found.attempts[0])
    assert len(said()) == 1
    assert not list(place.glob("outcomes/*/*"))
    later = Builder()
    assert language_of(served(later).config) == "gluon" and len(later.built) == 1


def test_a_compiler_that_refuses_a_text_is_not_asked_for_it_with_each_tile():
    """A mod that one template cannot spell costs one failed compile, not one for each tile."""
    builder = Builder(gluon(LASTING["the compiler"][0]))
    served(builder)
    assert builder.languages == ["gluon", "triton"]


def test_what_does_not_fit_tries_the_next_tile():
    first = next(candidates_of(WANTED, H200, NONE)).sources()[0]
    builder = Builder(shared=lambda source: 2**20 * (source.hash == first.hash))
    found = served(builder)
    assert builder.languages == ["gluon", "gluon"] and len(found.attempts) == 2
    assert found.attempts[0].outcome.kind == "shared memory"


def test_a_template_that_raises_gives_way(monkeypatch, said, place):
    """A printer that lacks a function raises, and the other template is asked."""
    from flexattn import dispatch

    render = dispatch.render

    def broken(structure, config, device, title):
        if language_of(config) == "gluon":
            raise KeyError("sigmoid")
        return render(structure, config, device, title)

    monkeypatch.setattr(dispatch, "render", broken)
    dispatch._rendered.cache_clear()
    found = served(Builder())
    assert language_of(found.config) == "triton" and "sigmoid" in said()[0]
    assert not list(place.glob("outcomes/*/*"))  # nothing was compiled that a process could save
    with override(strict=True), pytest.raises(RenderError, match="sigmoid"):
        served(Builder())
    dispatch._rendered.cache_clear()


def test_the_combine_kernel_of_decode_is_part_of_a_candidate():
    wanted = problem("decode")
    builder = Builder(
        lambda source: LASTING["a check"][0] if "combine" in source.text[:80] else None
    )
    with pytest.raises(BuildError, match="seven bits"):
        served(builder, wanted)


# nothing serves


def test_an_error_lists_every_candidate_with_its_reason():
    with pytest.raises(BuildError) as caught:
        served(Builder(lambda source: LASTING["the compiler"][0]))
    text = str(caught.value)
    assert text.count("sigmoid is not defined") >= 3 and "gluon" in text and "triton" in text
    assert "BLOCK_M=16 BLOCK_N=16" in text, "the smallest tile is the last"


def test_too_much_shared_memory_everywhere_is_an_error_of_the_config():
    with pytest.raises(ConfigError, match="shared memory"):
        served(Builder(shared=lambda source: 2**20))


def test_a_forced_config_keeps_its_own_error():
    error = LASTING["the compiler"][0]
    with pytest.raises(BuildError) as caught:
        served(Builder(lambda source: error), options=Options(num_stages=2))
    assert caught.value is error
    with pytest.raises(BuildError, match="sigmoid is not defined"):  # remembered
        served(Builder(), options=Options(num_stages=2))


def test_a_broken_device_is_said_at_once():
    """After an illegal address no kernel loads: to compile all candidates would tell nothing."""
    error = DriverError("cuModuleLoadData", "CUDA_ERROR_ILLEGAL_ADDRESS")
    builder = Builder(lambda source: error)
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        served(builder)
    assert len(builder.built) == 1


@pytest.mark.parametrize("name", [*LASTING, *PASSING])
def test_strict_raises_the_first_candidates_own_error(name):
    error = (LASTING.get(name) or PASSING[name])[0]
    with override(strict=True), pytest.raises(type(error)) as caught:
        served(Builder(gluon(error)))
    assert caught.value is error
    if name in LASTING:
        with override(strict=True), pytest.raises(BuildError, match="FLEXATTN_STRICT"):
            served(Builder())


def test_strict_takes_a_smaller_tile():
    """An estimate of shared memory that was too low is what smaller tiles are for."""
    first = next(candidates_of(WANTED, H200, NONE)).sources()[0]
    with override(strict=True):
        assert served(Builder(shared=lambda source: 2**20 * (source.hash == first.hash)))


# loops that spill


def spills(**words):
    """Words that kernels of a language spill in loops."""
    return lambda source: (words[source.language], 8 * words[source.language])


def test_what_spills_in_a_loop_gives_way():
    builder = Builder(spills=spills(gluon=4556, triton=0))
    found = served(builder)
    assert builder.languages == ["gluon", "gluon", "triton"]  # the last of Hopper's has most left
    assert language_of(found.config) == "triton" and "4556 spills" in found.origin
    memory.cache_clear()
    later = Builder(spills=spills(gluon=4556, triton=0))
    assert served(later).config == found.config and later.languages == ["triton"]


def test_of_those_that_spill_the_least_serves():
    few = iter((40, 30, 20, 50))
    counts = {}

    def told_once(source):
        if source.hash not in counts:
            counts[source.hash] = next(few), 512
        return counts[source.hash]

    builder = Builder(spills=told_once)
    found = served(builder)
    assert len(set(builder.built)) == MAX_SPILLED == 4
    assert counts[found.source.hash][0] == 20 and "least" in found.attempts[-1].candidate
    memory.cache_clear()
    later = Builder(spills=told_once)
    assert served(later).config == found.config and len(later.built) == 1


def test_a_few_words_that_ptxas_spills_by_choice_are_no_reason():
    builder = Builder(spills=lambda source: (2, 16))
    assert language_of(served(builder).config) == "gluon" and len(builder.built) == 1


def test_a_forced_config_serves_whatever_it_spills():
    builder = Builder(spills=lambda source: (999, 999))
    assert served(builder, options=Options(num_stages=2)).how == "forced"
    assert len(builder.built) == 1


@pytest.mark.parametrize(
    ("differing", "kept"), [((), True), (("torch",), True), (("triton",), False)]
)
def test_a_record_serves_whatever_it_spills_where_this_compiler_was_measured(
    monkeypatch, differing, kept
):
    config = next(candidates_of(WANTED, H200, parse({"BACKEND": "TRITON"}))).config
    record = SimpleNamespace(config=config, how="hint", origin="hint", differing=differing)
    monkeypatch.setattr("flexattn.dispatch.find", lambda problem, device: record)
    with override(mode="replay"):
        found = served(Builder(spills=spills(gluon=0, triton=99)))
    assert (found.how == "hint") is kept


def test_a_kernel_that_nobody_can_disassemble_serves(monkeypatch, said):
    def missing(code):
        raise BuildError("nvdisasm failed: no such file")

    monkeypatch.setattr(chain, "loop_spills", missing)
    assert language_of(served(Builder()).config) == "gluon" and "nvdisasm" in said()[0]


# what is kept on disk


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
            here.setattr(environment, name, other)
            assert Memory().find(SOURCE, H200) is None, name
            assert known.find(SOURCE, H200) is None, name
    (noted,) = Memory().entries(H200)
    assert (noted.outcome, noted.title, noted.source) == (REFUSED, "a problem", SOURCE.hash)
    assert "ptxas" in noted.compiler and Memory().entries(A100) == []
    assert known.clear() == 1 and known.find(SOURCE, H200) is None
    assert not list(place.glob("outcomes/*"))


@pytest.mark.parametrize("fault", ["bytes", "schema", "kind", "another source", "a link"])
def test_a_file_that_is_not_sound_is_ignored_and_said(fault, place, said):
    Memory().note(SOURCE, H200, REFUSED, "a problem")
    (path,) = place.glob("outcomes/*/*.json")
    from flexattn.files import sealed, unsealed

    data = unsealed(path.read_bytes())
    match fault:
        case "bytes":
            path.write_bytes(path.read_bytes()[:50])
        case "schema":
            path.write_text(sealed(data | {"schema": 99}))
        case "kind":
            path.write_text(sealed(data | {"kind": "miracle"}))
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
    (place / "outcomes").write_text("a file")
    found = served(Builder(gluon(LASTING["the compiler"][0])))
    assert language_of(found.config) == "triton"
    assert len(said()) == 2 and any("not kept" in each for each in said())


def test_a_memory_has_an_end(monkeypatch, place):
    monkeypatch.setattr(memory_module, "MAX_FILES", 3)
    known = Memory()
    for number in range(5):
        source = replace(SOURCE, hash=f"{number:064}"[::-1])
        known.note(source, H200, REFUSED, "a problem")
        (path,) = place.glob(f"outcomes/*/{source.hash[:32]}.json")
        os.utime(path, (number, number))
    kept = {each.stem[0] for each in place.glob("outcomes/*/*.json")}
    assert kept == {"2", "3", "4"}


def test_without_a_compiler_that_can_be_named_nothing_is_remembered(monkeypatch, place):
    def missing(device):
        raise RuntimeError("Cannot find ptxas")

    monkeypatch.setattr(environment, "compiler_of", missing)
    known = Memory()
    known.note(SOURCE, H200, REFUSED, "a problem")
    assert known.find(SOURCE, H200) is None and not list(place.iterdir())
    known.note(SOURCE, INTERPRETER, REFUSED, "a problem")


CHILD = """
import sys
from flexattn.dispatch import Dispatcher
from tests.unit import test_fallback as here
from flexattn.options import NONE

here.chain.loop_spills = lambda code: code
here.say_once.cache_clear()
builder = here.Builder(here.gluon(here.LASTING["the compiler"][0]))
choice = Dispatcher(builder).kernels(here.WANTED, here.H200, 0, NONE)[0]
print(" ".join(builder.languages), here.language_of(choice.config), choice.attempts[0].remembered)
"""


def test_a_second_process_does_not_compile_what_the_first_was_refused(place):
    told_environment = dict(os.environ) | {
        "FLEXATTN_CACHE_DIR": str(place), "FLEXATTN_MODE": "off", "FLEXATTN_STRICT": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    told_environment.pop("TRITON_INTERPRET", None)
    said = [
        subprocess.run(
            [sys.executable, "-c", CHILD], cwd=ROOT, env=told_environment, text=True,
            capture_output=True, check=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    assert [each.stdout.split() for each in said] == [
        ["gluon", "triton", "triton", "False"],
        ["triton", "triton", "True"],
    ]


def test_what_is_known_is_told_without_compiling():
    served(Builder(gluon(LASTING["the compiler"][0])))
    found = told(candidates_of(WANTED, H200, NONE), H200, memory())
    assert found[0].remembered and "sigmoid" in str(found[0])
    assert found[1].outcome is None and str(found[1]).endswith("not tried")


# causes


def test_a_chain_of_causes_that_turns_in_a_circle_ends():
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one
    assert outcome_of(one).kind == "compiler"
