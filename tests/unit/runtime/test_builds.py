"""Building in processes: one that crashes, hangs or raises costs its own config alone."""

import os
import time
from dataclasses import replace

import pytest

from flexattn.device import named
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig
from flexattn.runtime.resources import Resources, sections
from flexattn.settings import override
from flexattn.tuning.builds import BuiltConfig, Pool, build_all, unfit
from tests import build_doubles
from tests.build_doubles import CRASHES, HANGS, RAISES, REFUSED, SCALAR, SPILLS, number, troubled
from tests.problems import problem

pytestmark = pytest.mark.usefixtures("forked")
DEVICE = named("nvidia-h200")
TAKEN = Resources(100, 0, 0, 4096, 4, 0)


@pytest.mark.slow
def test_trouble_of_every_kind_stays_with_its_config(tmp_path):
    stages = (1, CRASHES, HANGS, RAISES, REFUSED, SPILLS, SCALAR, 2)
    configs = [PrefillConfig(64, 64, 4, n) for n in stages]
    said = []
    with override(cache_dir=tmp_path):
        found = build_all(
            problem(), configs, DEVICE, jobs=2, deadline=1.5, say=said.append, work=troubled
        )
    assert [built.config for built in found] == configs
    assert sorted(map(repr, said)) == sorted(map(repr, found))
    failures = [built.failed and (built.failed.stage, built.failed.error) for built in found]
    assert failures == [
        None,
        ("crash", "SIGSEGV"),
        ("hang", "Deadline"),
        ("build", "RuntimeError"),
        ("build", "CompilationError"),
        ("resources", "spills"),
        ("resources", "no matrix instruction"),
        None,
    ]
    assert "1.5 s" in found[2].failed.message and "out of luck" in found[3].failed.message
    assert found[5].registers == 100, "what spills is known as such"
    assert found[7].code == found[0].code and len({built.code for built in found}) > 1
    pid = int((tmp_path / "pid").read_text())
    assert gone(pid), "what a hanging process started ends with it"


def gone(pid):
    """A killed process is no more, or waits for an init that may be slow to collect it."""
    for _ in range(50):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_configs_of_one_source_are_compiled_once(tmp_path):
    """The number of splits is an argument of the kernel; as a config it is another one."""
    configs = [DecodeConfig(16, 64, 4, 2, splits) for splits in (0, 4, 9)]
    with override(cache_dir=tmp_path):
        found = build_all(problem("decode"), configs, DEVICE, jobs=1, work=troubled)
    assert [built.seconds for built in found] == [0.5, 0.0, 0.0]
    assert len({built.code_hash for built in found}) == 1
    assert len({built.code for built in found}) == 3


@pytest.mark.slow
def test_a_pool_keeps_its_processes_between_runs():
    with Pool(number, jobs=2, deadline=20.0) as pool:
        first, second = (dict(pool.run(range(6))) for _ in range(2))
        assert [first[i][0] for i in range(6)] == list(range(6))
        pids = {pid for found in (first, second) for _, pid in found.values()}
        assert len(pids) <= 2 and os.getpid() not in pids
        assert list(pool.run([])) == []


@pytest.mark.slow
def test_an_interrupted_build_leaves_a_pool_that_works(tmp_path):
    def interrupt(built):
        raise KeyboardInterrupt

    configs = [PrefillConfig(64, width, 4, 2) for width in (16, 32, 64)]
    with override(cache_dir=tmp_path), Pool(troubled, jobs=1, deadline=20.0) as pool:
        with pytest.raises(KeyboardInterrupt):
            build_all(problem(), configs, DEVICE, say=interrupt, pool=pool)
        found = build_all(problem(), configs[::-1], DEVICE, pool=pool)
    assert [int(built.code_hash) for built in found] == [64, 32, 16]


def test_nothing_to_build_starts_nothing():
    assert build_all(problem(), [], DEVICE) == []


@pytest.mark.parametrize(
    ("taken", "dtype", "error"),
    [
        (TAKEN, "bfloat16", None),
        (replace(TAKEN, shared=240_000), "bfloat16", "shared memory"),
        (replace(TAKEN, loop_spills=3, stack=200), "bfloat16", "spills"),
        (replace(TAKEN, loop_spills=3, stack=8), "bfloat16", None),
        (replace(TAKEN, matrix_instructions=0), "bfloat16", "no matrix instruction"),
        (replace(TAKEN, matrix_instructions=0), "float32", None),
    ],
)
def test_what_is_not_worth_timing(taken, dtype, error):
    found = unfit(taken, dtype != "float32", DEVICE)
    assert (found and found.error) == error and (found is None or found.stage == "resources")


def test_equal_code_is_launched_in_the_same_way():
    """Stages that load nothing ahead give one code; more shared memory makes it another launch."""
    code = BuiltConfig(PrefillConfig(64, 64, 4, 2), shared_memory=4096, code_hash="c" * 64)
    found = [
        BuiltConfig(PrefillConfig(64, 64, 4, 1)),
        code,
        replace(code, config=PrefillConfig(64, 64, 4, 3)),
        replace(code, shared_memory=8192),
        replace(code, config=PrefillConfig(128, 64, 4, 2)),
        replace(code, config=PrefillConfig(64, 32, 4, 2), code_hash="d" * 64),
    ]
    codes = [each.code for each in found]
    assert codes[0] == "" and [codes.index(code) for code in codes] == [0, 1, 1, 3, 4, 5]


@pytest.mark.parametrize("binary", [b"", b"\x7fELF\x01\x01" + bytes(60), b"not ELF at all"])
def test_only_elf_files_have_sections(binary):
    with pytest.raises(ValueError, match="64-bit little-endian ELF"):
        list(sections(binary))


def test_the_double_is_where_a_new_process_finds_it():
    assert build_doubles.__name__ == "tests.build_doubles"
