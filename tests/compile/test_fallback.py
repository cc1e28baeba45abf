"""Where Hopper's template does not compile, for real, Triton's serves; nothing here has a GPU."""

import logging
from dataclasses import replace
from functools import partial

import pytest

from bench.rows import prefill_rows
from bench.tasks import task
from flexattn.catalogue import softcap
from flexattn.device import named
from flexattn.errors import BuildError
from flexattn.kernels.base.source import digest_of
from flexattn.kernels.choose.options import NONE, parse
from flexattn.runtime.build import builder, unloaded
from flexattn.runtime.candidates import candidates_of
from flexattn.runtime.dispatch import chosen
from flexattn.runtime.outcomes import Memory, outcome_of
from flexattn.runtime.resources import loop_spills, resources
from flexattn.settings import override
from flexattn.tuning.builds import compile_one, orders_for
from tests.compile.devices import DEVICES
from tests.problems import H200, problem

WANTED = problem("prefill", 64, score_mod=softcap(50.0))


@pytest.fixture(autouse=True)
def place(tmp_path):
    with override(cache_dir=tmp_path, mode="off", strict=False):
        yield tmp_path


@pytest.fixture
def broken(monkeypatch):
    """Hopper's template with a name that nothing defines, as a printer once wrote sigmoid."""
    from flexattn.kernels.hopper import source

    make = source.make_source

    def spoiled(name, *rest, **named):
        made = make(name, *rest, **named)
        text = made.text.replace("gl.warp_specialize(", "gl.no_such_function(")
        assert text != made.text
        return replace(made, text=text, hash=digest_of(replace(made, text=text)))

    monkeypatch.setattr(source, "make_source", spoiled)
    builder().rendered.clear()
    yield
    builder().rendered.clear()


def test_what_hoppers_template_cannot_compile_is_served_by_tritons(broken, place, caplog, capsys):
    """A mod with sigmoid ended in BuildError at every head dimension."""
    caplog.set_level(logging.WARNING, "flexattn")
    counted = []

    def build(source):
        counted.append(source.language)
        return unloaded(source, H200)

    for _ in range(2):  # the second as another process
        choice = chosen(WANTED, H200, NONE, build, Memory())
        assert choice.config.language == "triton" and choice.kernels[0].compiled.asm["cubin"]
        assert "no_such_function" in str(choice.attempts[0])
    assert counted == ["gluon", "triton", "triton"]
    (line,) = (record.getMessage() for record in caplog.records)
    assert "no_such_function" in line and "serves instead" in line and "\n" not in line
    with override(strict=True), pytest.raises(BuildError, match="no_such_function"):
        chosen(WANTED, H200, NONE, build)
    assert capsys.readouterr().out == ""


def test_what_ptxas_refuses_is_one_line_and_prints_no_ptx(place, capsys):
    source = next(candidates_of(WANTED, H200, parse({"BACKEND": "TRITON"}))).sources()[0]
    starving = replace(source, registers=24)
    starving = replace(starving, hash=digest_of(starving))
    with pytest.raises(BuildError) as caught:
        unloaded(starving, H200)
    outcome = outcome_of(caught.value)
    assert outcome.kind == "compiler" and "registers" in outcome.reason.lower()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_the_size_of_a_stack_stands_in_a_cubin(arch):
    """What cuobjdump says, without it: kernels whose loops cannot spill are not disassembled."""
    device = named(DEVICES[arch])
    source = next(candidates_of(problem("decode", 256), device, NONE)).sources()[0]
    limited = replace(source, registers=64)  # few, for it to spill
    limited = replace(limited, hash=digest_of(limited))
    compiled = unloaded(limited, device).compiled
    taken = resources(compiled, device)
    assert taken.stack > 16
    spills, code, stack = loop_spills(compiled.asm["cubin"])
    assert (spills, stack) == (taken.loop_spills, taken.stack) and 100 < code < 50_000


def test_a_tuner_counts_what_is_refused_as_infeasible(broken, place):
    """It was a failure to build, as a killed compiler is, and each tune compiled it again."""
    config = next(candidates_of(WANTED, H200, NONE)).config
    (order,) = orders_for(WANTED, [config], H200)
    first, second = compile_one(order), compile_one(order)
    assert (first.stage, second.stage) == ("infeasible", "infeasible")
    assert "no_such_function" in first.message and "no_such_function" in second.message
    assert second.error == "compiler", "it was known, and not compiled"


ROWS = {
    row.name: row
    for row in prefill_rows()
    if row.group in ("grid", "mods") and "16k" not in row.name and "qa" not in row.name
}


@pytest.mark.full_matrix
@pytest.mark.oldest
@pytest.mark.releases
@pytest.mark.parametrize("name", ROWS)
def test_hoppers_template_is_first_for_the_grid_and_its_mods(name):
    """With Triton 3.9 the Triton template served all of them: it was asked for its release."""
    wanted = task(ROWS[name], H200, "cpu").problem
    choice = chosen(wanted, H200, NONE, partial(unloaded, device=H200))
    assert choice.config.language == "gluon" and len(choice.attempts) == 1
