"""Hopper kernels whose output goes from registers to memory: no meeting and no tile."""

import re
from dataclasses import replace

import pytest
import torch

from flexattn.build import compile_source
from flexattn.catalogue import alibi, causal, document, relative_bias, sliding_window, softcap
from flexattn.device import named
from flexattn.lone_waits import ALONE
from flexattn.render.gluon.tiles import programs_of
from flexattn.render.kernel import render
from flexattn.space import gluon
from flexattn.space.defaults import default
from flexattn.space.rules import reasons
from tests.compile.test_gluon import disassembled, wrong
from tests.problems import problem

pytestmark = [pytest.mark.compile, pytest.mark.oldest]

H200 = named("nvidia-h200")
WINDOW = {"mask_mod": sliding_window(1000), "runs": True}
CASES = {
    "full": (128, {}),
    "window": (128, WINDOW),
    "documents": (128, {"mask_mod": document(torch.zeros(8192).int()), "runs": True}),
    "sinks": (128, {"mask_mod": causal, "runs": True, "sinks": "float32"}),
    "96": (96, {"score_mod": softcap(50.0)}),
    "64": (64, {"mask_mod": causal, "runs": True}),
    "256": (256, {"mask_mod": causal, "runs": True}),
    "192": (192, {"Dv": 128, "mask_mod": causal, "runs": True}),
    "fp8": (128, {"dtype": "float8_e4m3fn"}),
}
MEETING = re.compile(r"\b(?:bar|barrier)\.sync\s+\d")


def written(case, together):
    D, mods = CASES[case]
    wanted = problem("prefill", D, **mods)
    config = replace(default(wanted, H200, "gluon"), direct=True, together=together)
    assert not reasons(config, wanted.structure, H200)
    return wanted, config


def assembly(wanted, config):
    return compile_source(render(wanted.structure, config, H200, "test"), H200).asm["ptx"]


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize("case", CASES)
def test_an_output_is_stored_16_bytes_a_thread_and_no_warp_waits_for_it(case, together):
    wanted, config = written(case, together)
    assert not (fault := wrong(wanted, config)), fault
    text = assembly(wanted, config)
    assert "cp.async.bulk.tensor" in text and "bulk_group" not in text
    programs, structure = programs_of(wanted.structure, config), wanted.structure
    stores = re.findall(r"^.*\bst\.global\.v4\.b32\b.*$", text, re.MULTILINE)
    # Of two rows a thread has eight columns of every 32; those of 96 to 127 ptxas leaves out.
    assert len(stores) == programs * (128 if case == "96" else structure.head_dim_v) // 16
    assert all("@%p" in store for store in stores), "rows behind the last one are not written"
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if "st.global.v4.b32" in line)
    last = max(i for i, line in enumerate(lines) if "st.global.v4.b32" in line)
    waits = [i for i in range(first) if "wgmma.wait_group" in lines[i]]
    met = sum(bool(MEETING.search(line)) for line in lines[waits[-1] : first])
    # Three consumers' warps, and those of a later Triton, meet once between two exchanges.
    assert met <= (case == "64" or not gluon.offered()), case
    if programs == 1:
        assert not any(MEETING.search(line) for line in lines[first:last]), case


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("case", ["full", "window", "documents", "sinks", "256"])
def test_what_warps_of_one_program_exchange_is_no_other_warps(case, watched):
    """Where the meetings before waits are taken out, each warp writes where it alone reads."""
    wanted, config = written(case, together=True)
    config = replace(config, watched=watched)
    assert programs_of(wanted.structure, config) == 1
    text = assembly(wanted, config)
    assert ALONE in text
    met, places, lines = True, set(), text.splitlines()
    for number, line in enumerate(lines):
        if ALONE in line:
            met = False
        elif MEETING.search(line):
            met = True
        if not met and re.search(r"\bst\.shared|\bstmatrix", line):
            places.add(re.search(r"\[(.*?)\]", line).group(1))
            behind = "\n".join(lines[number + 1 : number + 4])
            assert "bar.warp.sync" in behind and "ldmatrix" in behind, line
        if "warpgroup" in line and "setmaxnreg.dec" in line:
            met = True
    assert len(places) <= 1, places


IDS = torch.zeros(2, 8192)
TOLD = {
    "int32": (lambda b, h, q, k: IDS32[q] == IDS32[k], {}),
    "int64": (lambda b, h, q, k: (IDS64[b, q] == IDS64[b, k]) & (q >= k), {}),
    "lists": (lambda b, h, q, k: PER_HEAD[h % 2, q] <= PER_HEAD[h % 2, k], {"runs": False}),
    "numbers": (lambda b, h, q, k: IDS[0, q] * 2.0 < IDS[0, k], {}),
    "alibi": (lambda b, h, q, k: IDS32[q] == IDS32[k], {"score_mod": alibi(32, "cpu")}),
}
IDS32, IDS64, PER_HEAD = IDS[0].int(), IDS.long(), IDS.int()


@pytest.mark.parametrize("case", TOLD)
def test_the_loading_warp_reads_what_a_mask_compares_with_each_key(case):
    mask, more = TOLD[case]
    wanted = problem("prefill", 128, mask_mod=mask, **{"runs": True, **more})
    config = replace(default(wanted, H200, "gluon"), direct=True, together=True)
    assert programs_of(wanted.structure, config) == 1
    assert not (fault := wrong(wanted, config)), fault
    text = assembly(wanted, config)
    checked = 0
    for before in re.split(r"expect_tx", text)[:-1]:
        read = before[before.rfind("ld.global") :] if "ld.global" in before else ""
        writes = [found.end() for found in re.finditer(r"st\.shared|stmatrix", read)]
        if writes:
            assert "bar.warp.sync" in read[writes[-1] :], "all have written"
            checked += 1
    assert checked


@pytest.mark.parametrize(
    "mods",
    [
        {"mask_mod": lambda b, h, q, k: (IDS32[q] == IDS32[k]) & (IDS32[k] + 1 > h)},
        {"mask_mod": lambda b, h, q, k: (IDS32[q] == IDS32[k]) & (IDS64[0, k] > h)},
        {"score_mod": relative_bias(torch.zeros(32, 16384), 8191), "mask_mod": TOLD["int32"][0]},
        # Where they read is a number of each key too.
        {"mask_mod": lambda b, h, q, k: (IDS32[q // 16] == IDS32[k // 16]) & (q // 16 != k // 16)},
        {"mask_mod": lambda b, h, q, k: (IDS32[k + 1] == IDS32[q]) & ((k + 1) * q % 3 == 0)},
    ],
    ids=["computed", "two", "table", "blocks", "shifted"],
)
def test_what_else_is_read_by_key_keeps_consumers_apart(mods):
    wanted = problem("prefill", 128, runs=True, **mods)
    config = replace(default(wanted, H200, "gluon"), direct=True, together=True)
    assert programs_of(wanted.structure, config) == 2
    assert "keyed" not in render(wanted.structure, config, H200, "test").text


def test_a_window_is_compiled_once_for_both_consumers():
    wanted, config = written("window", together=True)
    both, each = (assembly(wanted, replace(config, together=one)) for one in (True, False))
    assert both.count("wgmma.mma_async") * 2 == each.count("wgmma.mma_async")


@pytest.mark.parametrize("direct", [True, False])
def test_consumers_of_one_program_do_not_meet_in_a_turn(direct):
    """The other one waits for its turn meanwhile, and would never come."""
    wanted = problem("prefill", 128, score_mod=softcap(30.0), mask_mod=causal, runs=True)
    config = replace(default(wanted, H200, "gluon"), direct=direct)
    assert config.together and config.ping_pong and config.long_turns
    source = render(wanted.structure, config, H200, "test")
    if not gluon.offered():
        # Of these Tritons all threads meet behind a product: turns end before it.
        short = render(wanted.structure, replace(config, long_turns=False), H200, "test")
        assert source.text.split("import triton")[1:] == short.text.split("import triton")[1:]
        return
    code = disassembled(compile_source(source, H200))
    turns = re.findall(r"BAR\.SYNC\S* R\d+, 0x100(.*?)BAR\.ARV R\d+, 0x100", code, re.DOTALL)
    assert turns and not any(re.search(r"BAR\.SYNC\S* 0x0", turn) for turn in turns)
