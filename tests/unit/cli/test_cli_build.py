"""`flexattn build`: a space compiled for a device that is not here, its lines and its status."""

import os
import re
import signal
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from flexattn.cli import tune as verb
from flexattn.cli.app import app
from flexattn.kernels.triton.config import PrefillConfig
from flexattn.records.record import Failed
from flexattn.settings import override
from flexattn.tuning.builds import BuiltConfig
from tests.processes import started

GOOD = BuiltConfig(
    PrefillConfig(64, 64, 4, 2, True, "group"), 155, shared_memory=4096,
    matrix_instructions=12, code_hash="c" * 64, seconds=1.25,
)  # fmt: skip
TWIN = replace(GOOD, config=replace(GOOD.config, num_stages=3))
SPILLED = replace(
    GOOD, code_hash="d" * 64, spills=9,
    failed=Failed("resources", "spills", "9 spills in loops, 64 bytes of stack a thread"),
)  # fmt: skip
CRASHED = BuiltConfig(
    PrefillConfig(128, 64, 4, 2),
    failed=Failed("crash", "SIGSEGV", "its process ended with SIGSEGV"),
)


@pytest.fixture
def flexattn(tmp_path):
    """Run the command line in this process, with rendered files in a folder of the test's own."""

    def call(*arguments, status=0):
        with override(cache_dir=tmp_path):
            result = CliRunner().invoke(app, ["build", *arguments], terminal_width=200)
        assert result.exit_code == status, result.output
        return result

    return call


@pytest.fixture
def built(monkeypatch):
    """What the compiler is said to have made, whatever is asked for."""
    answers = []

    def build_all(problem, configs, device, jobs, **options):
        for each in answers:
            options["say"](each)
        return answers

    monkeypatch.setattr(verb, "build_all", build_all)
    return answers


@pytest.mark.parametrize(
    ("found", "status", "timed"),
    [
        ((GOOD,), 0, 1),
        ((GOOD, TWIN, SPILLED), 0, 1),
        ((GOOD, CRASHED), 1, 1),
        ((SPILLED,), 1, 0),
        ((), 1, 0),
    ],
)
def test_the_status_is_red_for_a_compiler_that_failed_and_for_nothing_left(
    flexattn, built, found, status, timed
):
    built += found
    assert f" configs, {timed} worth timing; " in flexattn("causal", status=status).stdout


def test_there_is_a_line_for_each_config_and_the_compilers_words(flexattn, built):
    built += [GOOD, SPILLED, CRASHED]
    told = flexattn("causal", "--device", "h200", status=1)
    head, good, spilled, crashed, counts = told.stdout.splitlines()
    assert head.startswith("prefill bfloat16") and head.endswith("effort full")
    assert re.match(r"1/\d+ 64x64 w4 s2 tma group: 155 registers, 0 spills, 4096 bytes", good)
    assert "12 matrix instructions, 1.2 s" in good
    assert re.match(r"2/\d+ .*: resources: 9 spills in loops, 64 bytes of stack", spilled)
    assert re.match(r"3/\d+ .*: crash: SIGSEGV$", crashed)
    assert "its process ended with SIGSEGV" in told.stderr and "headroom" in counts


INTERRUPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from flexattn.cli import main
sys.argv = "flexattn build noop --kind decode --head-dim 16 --device h200 --jobs 1".split()
main()
"""


@pytest.mark.compile
@pytest.mark.slow
def test_ctrl_c_ends_a_build_in_words(tmp_path):
    """It ended in the tracebacks of all processes, whose terminal it is as well."""
    process = started(
        "-c", INTERRUPT, apart=True, FLEXATTN_CACHE_DIR=tmp_path, TRITON_CACHE_DIR=tmp_path / "t"
    )
    assert "effort full" in process.stdout.readline()
    first = process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert re.match(r"1/\d+ ", first), first + stderr
    assert process.returncode == 130, stderr
    last = stderr.splitlines()[-1]
    assert re.match(r"interrupted with \d+ of \d+ configs compiled; ", last)
    assert "goes on from there" in last and "Traceback" not in stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["causal", "--jobs", "-1"], ["--jobs -1"]),
    ],
    ids=lambda value: value[-1],
)
def test_errors_say_what_was_got(flexattn, arguments, words):
    result = flexattn(*arguments, status=2)
    assert all(word in result.stderr for word in words)


@pytest.mark.compile
@pytest.mark.slow
def test_a_tiny_space_for_a_device_that_is_not_here(flexattn):
    """The A100 has one tile for a head dimension of 256, in as many orders as make sense."""
    arguments = ("noop", "--head-dim", "256", "--device", "nvidia-a100", "--heads", "8")
    told = flexattn(*arguments, "--jobs", "1")
    count, timed = re.search(r"(\d+) configs, (\d+) worth timing", told.stdout).groups()
    assert count == timed in ("1", "2")
    assert len(re.findall(r": [1-9]\d* registers, \d+ spills", told.stdout)) == int(count)
