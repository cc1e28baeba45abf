"""Which candidate serves where another fails, what is said, and what later processes know."""

from types import SimpleNamespace

import pytest

from flexattn.errors import BuildError, ConfigError, DriverError, RenderError
from flexattn.frontend.explain import Explanation
from flexattn.kernels.choose.options import NONE, Options, parse
from flexattn.runtime import dispatch
from flexattn.runtime.build import builder
from flexattn.runtime.candidates import candidates_of
from flexattn.runtime.dispatch import MAX_SPILLED, first_served
from flexattn.runtime.kernel_store import KernelStore
from flexattn.runtime.outcomes import memory, outcome_of
from flexattn.settings import override
from tests.failing_builds import H200, LASTING, PASSING, WANTED, Builder, gluon, served, spills
from tests.problems import problem

# one candidate fails, the next serves


@pytest.mark.parametrize("name", LASTING)
def test_what_is_refused_gives_way_and_is_remembered(name, said, place):
    """Six of 66 everyday mods once ended in BuildError: nobody asked the other template."""
    error, kind, words = LASTING[name]
    builder = Builder(gluon(error))
    found = served(builder)
    assert found.config.language == "triton" and found.attempts[-1].outcome.built
    assert found.attempts[0].outcome.kind == kind and words in str(found.attempts[0])
    assert words in found.origin
    assert len(said()) == len(builder.built) - 1
    for line in said():
        assert words in line and "serves instead" in line and "\n" not in line
    # Another dispatcher, as in another process, does not compile it again.
    memory().forget()
    again = Builder(gluon(error))
    assert served(again).config == found.config
    assert again.languages == ["triton"]
    assert served(again).attempts[0].remembered
    assert len(list(place.glob("kernels/sm_90-*/*.json"))) == len(builder.built) - 1


@pytest.mark.parametrize("name", PASSING)
def test_what_may_pass_gives_way_and_is_not_remembered(name, said, place):
    error, words = PASSING[name]
    found = served(Builder(gluon(error)))
    assert found.config.language == "triton"
    assert found.attempts[0].outcome.kind == "passing" and words in str(found.attempts[0])
    assert len(said()) == 1
    assert not list(place.glob("kernels/*/*"))
    later = Builder()
    assert served(later).config.language == "gluon" and len(later.built) == 1


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


def test_no_candidate_is_listed_behind_one_that_serves():
    """Each new length listed all of them, on every token of a cache that grows by the token."""
    listed = []

    def candidates():
        for each in candidates_of(WANTED, H200, NONE):
            listed.append(each)
            yield each

    built = Builder()
    found = first_served(
        candidates(), WANTED, H200, lambda source: built.kernel(source, H200, 0), None
    )
    assert [each.config for each in listed] == [found.config]
    failing = Builder(gluon(LASTING["the compiler"][0]))
    found = first_served(
        candidates(), WANTED, H200, lambda source: failing.kernel(source, H200, 0), None
    )
    assert found.config in [each.config for each in listed] and len(listed) > 2


def test_a_template_that_raises_gives_way(monkeypatch, said, place):
    """A printer that lacks a function raises, and the other template is asked."""
    from flexattn.kernels.hopper.family import PREFILL as HOPPER

    def broken(structure, config, device, title):
        raise KeyError("sigmoid")

    monkeypatch.setattr(HOPPER, "render", broken)
    builder().rendered.clear()
    found = served(Builder())
    assert found.config.language == "triton" and "sigmoid" in said()[0]
    assert not list(place.glob("kernels/*/*"))  # nothing was compiled that a process could save
    with override(strict=True), pytest.raises(RenderError, match="sigmoid"):
        served(Builder())
    builder().rendered.clear()


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


def test_what_spills_in_a_loop_gives_way():
    builder = Builder(spills=spills(gluon=4556, triton=0))
    found = served(builder)
    assert builder.languages == ["gluon", "gluon", "triton"]  # the last of Hopper's has most left
    assert found.config.language == "triton" and "4556 spills" in found.origin
    memory().forget()
    later = Builder(spills=spills(gluon=4556, triton=0))
    assert served(later).config == found.config and later.languages == ["triton"]


def test_of_those_that_spill_the_least_serves():
    few = iter((4000, 3000, 2000, 5000))
    counts = {}

    def told_once(source):
        if source.hash not in counts:
            counts[source.hash] = next(few), 512
        return counts[source.hash]

    builder = Builder(spills=told_once)
    found = served(builder)
    assert len(set(builder.built)) == MAX_SPILLED == 4
    assert counts[found.source.hash][0] == 2000 and "least" in found.attempts[-1].candidate
    memory().forget()
    later = Builder(spills=told_once)
    assert served(later).config == found.config and len(later.built) == 1


@pytest.mark.parametrize(("words", "language"), [(100, "gluon"), (101, "triton")])
def test_a_loop_may_spill_one_instruction_in_sixteen(monkeypatch, words, language):
    """A Hopper kernel that spills a few beats the Triton template, which spills none."""
    code = {"gluon": (words, 1600, 512), "triton": (0, 1600, 0)}
    monkeypatch.setattr(dispatch, "loop_spills", lambda cubin: code[cubin])
    builder = Builder(spills=lambda source: source.language)
    assert served(builder).config.language == language


@pytest.mark.parametrize("name", ["a pass", "ptxas"])
def test_what_a_pass_may_have_broken_is_compiled_without_it(name):
    error = LASTING[name][0]
    wanted = problem(D=64)
    assert next(candidates_of(wanted, H200, NONE)).config.merges
    builder = Builder(lambda source: error if source.stages.passes else None)
    found = served(builder, wanted)
    assert set(builder.languages) == {"gluon"} and not found.config.merge_consumers


def test_a_few_words_that_ptxas_spills_by_choice_are_no_reason():
    builder = Builder(spills=lambda source: (2, 16))
    assert served(builder).config.language == "gluon" and len(builder.built) == 1


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
    monkeypatch.setattr("flexattn.runtime.candidates.find", lambda problem, device, first: record)
    with override(mode="replay"):
        found = served(Builder(spills=spills(gluon=0, triton=999)))
    assert (found.how == "hint") is kept


def test_a_kernel_that_nobody_can_disassemble_serves(monkeypatch, said):
    def missing(code):
        raise BuildError("nvdisasm failed: no such file")

    monkeypatch.setattr(dispatch, "loop_spills", missing)
    assert served(Builder()).config.language == "gluon" and "nvdisasm" in said()[0]


# what explain says


def test_explain_lists_what_was_tried():
    choice = served(Builder(gluon(LASTING["the compiler"][0])))
    why = Explanation("kernel", "on the GPU", candidates=choice.attempts)
    assert "tried" in str(why) and "sigmoid is not defined" in str(why) and "serves" in str(why)
    assert "tried" not in str(Explanation("kernel", "here", candidates=choice.attempts[-1:]))


# exported kernels


def test_what_an_exporter_took_is_looked_for_first(tmp_path):
    """A server of exported kernels would compile the candidates that its exporter passed over."""
    *_, last = candidates_of(WANTED, H200, NONE)
    choice = last.choice()
    KernelStore(tmp_path).write_sources(WANTED.structure, choice.config, H200, (choice.source,))
    with override(binaries=tmp_path):
        assert next(candidates_of(WANTED, H200, NONE, stored=True)).config == choice.config
        assert next(candidates_of(WANTED, H200, NONE)).config != choice.config
    builder().rendered.clear()


# causes


def test_a_chain_of_causes_that_turns_in_a_circle_ends():
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one
    assert outcome_of(one).kind == "compiler"
