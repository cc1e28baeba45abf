"""What happens to Hopper's kernels between PTX and machine code: the pass, and which ptxas."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import triton

from flexattn.catalogue import alibi, causal
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.hopper.source import PASS
from flexattn.kernels.ptx.assembler import assemblers
from flexattn.runtime import build
from flexattn.runtime.build import compile_source
from flexattn.runtime.resources import loop_spills, spills_too_much
from tests.families import render
from tests.problems import H200, problem

pytestmark = [pytest.mark.oldest, pytest.mark.releases]

SMALL = HopperPrefillConfig(3, 64, 2, 160)
CAUSAL = {"score_mod": alibi(32, "cpu"), "mask_mod": causal, "runs": True}


def test_a_kernel_that_was_compiled_without_the_hook_is_compiled_anew(monkeypatch, tmp_path):
    """Somebody's who opened the rendered file: it lay in Triton's cache under the same name."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    source = render(problem("prefill", 64).structure, SMALL, H200, "test")
    with monkeypatch.context() as alone:
        alone.setattr(build, "compiled_by", lambda stages: nullcontext())
        alone.setattr(build, "block_warps", lambda stages, text: None)
        assert compile_source(source, H200).metadata.num_warps == 8
    for _ in range(2):
        assert compile_source(source, H200).metadata.num_warps == 16


@pytest.mark.parametrize("mods", [{}, CAUSAL], ids=["noop", "ALiBi"])
def test_without_the_pass_each_consumer_is_compiled(mods):
    """Whoever opens and launches the file of the merged form waits for ever; this one runs."""
    wanted = problem("prefill", 128, **mods)
    start = replace(default(wanted, H200, "gluon"), merge_consumers=True)
    merged, plain = (
        render(wanted.structure, replace(start, merge_consumers=merge), H200, "test")
        for merge in (True, False)
    )
    assert merged.stages.passes == (PASS,) and not plain.stages.passes
    assert (
        f"# pass: {PASS} (flexattn/kernels/hopper/merge_consumers.py)" in merged.text
        and "# pass:" not in plain.text
    )
    products, warps = zip(
        *(
            (found.asm["ptx"].count("wgmma.mma_async"), found.metadata.num_warps)
            for found in (compile_source(source, H200) for source in (merged, plain))
        ),
        strict=True,
    )
    assert products[1] == start.consumers * products[0] and warps[0] == warps[1] == 12


@pytest.mark.parametrize("D", [pytest.param(64, marks=pytest.mark.full_matrix), 128])
def test_a_mask_of_every_fourth_key_is_served(D):
    """It was refused: "a thread knows seven bits of its number", which its code does not need."""

    def dilated(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx >= 0) & (q_idx - kv_idx < 256) & ((q_idx - kv_idx) % 4 == 0)

    wanted = problem("prefill", D, mask_mod=dilated, runs=True)
    source = render(wanted.structure, default(wanted, H200, "gluon"), H200, "test")
    cubin = compile_source(source, H200).asm["cubin"]
    assert source.stages.passes and not spills_too_much(*loop_spills(cubin))


def test_a_config_names_its_ptxas():
    """The release of PTX is that of the assembler; the same source is another kernel."""
    wanted = problem("prefill", 64)
    made = {
        ptxas: render(wanted.structure, replace(SMALL, ptxas=ptxas), H200, "test")
        for ptxas in assemblers()
    }
    assert len({source.hash for source in made.values()}) == len(made)
    written = {
        re.search(r"\.version (\S+)", compile_source(source, H200).asm["ptx"])[1]
        for source in made.values()
    }
    assert len(written) == len(made)
