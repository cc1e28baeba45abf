"""Real kernels built in parallel: what is known of them, and what is left in Triton's cache."""

from dataclasses import replace

import pytest

from flexattn.catalogue import causal, softcap
from flexattn.device import named
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig
from flexattn.kernels.triton.source import render
from flexattn.runtime.build import compile_source, path_of
from flexattn.runtime.resources import code_hash, resources
from flexattn.settings import override
from flexattn.tuning.builds import build_all
from tests.compile.devices import DEVICES
from tests.problems import problem

pytestmark = pytest.mark.oldest


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Empty caches: one of ours, and one of Triton's, which its processes find by the variable."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    with override(cache_dir=tmp_path / "ours"):
        yield tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prefill", pytest.param("decode", marks=pytest.mark.long)])
def test_another_process_finds_every_kernel_compiled(kind, caches):
    device = named("nvidia-h200")
    make, more = (
        (PrefillConfig, {"order": "group"})
        if kind == "prefill"
        else (DecodeConfig, {"num_splits": 3})
    )
    wanted = problem(kind, 16, score_mod=softcap(50.0), mask_mod=causal)
    first = make(64 if kind == "prefill" else 16, 32, 4, 2)
    configs = [first, replace(first, **more)]
    found = build_all(wanted, configs, device, jobs=2)
    files = sorted((caches / "triton").rglob("*"))
    for config, built in zip(configs, found, strict=True):
        assert built.config == config and built.failed is None and len(built.code_hash) == 64
        compiled = compile_source(render(wanted.structure, config, device, "again"), device)
        taken = resources(compiled, device)
        assert (taken.registers, taken.shared, taken.spills, taken.matrix_instructions) == (
            built.registers, built.shared_memory, built.spills, built.matrix_instructions,
        )  # fmt: skip
        assert code_hash(compiled, device) == built.code_hash
    assert sorted((caches / "triton").rglob("*")) == files and files
    assert found[0].code != found[1].code


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_names_and_lines_of_a_source_are_not_its_code(arch, caches):
    """The same kernel from two files of other names and lines; then one that differs."""
    device = named(DEVICES[arch])
    structure = problem(D=16, mask_mod=causal).structure
    config = PrefillConfig(16, 16, 1, 1)
    source = render(structure, config, device, "one")
    moved = replace(source, text="# another\n# two lines\n" + source.text, hash="0" * 64)
    other = render(structure, replace(config, order="first"), device, "three")
    hashes = [code_hash(compile_source(each, device), device) for each in (source, moved, other)]
    assert path_of(source) != path_of(moved)
    assert hashes[0] == hashes[1] != hashes[2]
