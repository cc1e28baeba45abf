"""The serving kernels for an H200 without one: they fit, spill nothing, and copy ahead."""

import re
from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import alibi, causal, sliding_window, softcap
from flexattn.device import named
from flexattn.kernels.paged_decode.config import ServingConfig, workspace
from flexattn.kernels.paged_decode.limits import serving_reasons
from flexattn.kernels.paged_decode.merges import join_programs, render_join, render_merge_states
from flexattn.kernels.paged_decode.source import render_serving, render_serving_combine
from flexattn.runtime.build import compile_source
from flexattn.runtime.kernel_store import binary_of
from flexattn.runtime.resources import _disassembled, resources
from tests.compile.shares import LONG, share
from tests.problems import plan_of, serving_candidates, serving_space

pytestmark = pytest.mark.oldest
DEVICE = named("nvidia-h200")
BF16 = torch.bfloat16


def form(**options):
    return plan_of(keys=131072, **options).structure


LATENT = {"D": (576, 512), "shared_kv": True, "page": 64, "selection": (2048, 1)}
CASES = {
    "paged": {},
    "contiguous": {"page": 0},
    "one page a tile": {"page": 64, "lse": True},
    "window": {"mask": sliding_window(1024), "score": softcap(30.0), "sinks": True},
    "eight bits": {"kv": torch.float8_e4m3fn, "scaled": True},
    "mixed": {"total_q": 2048, "mask": causal, "lse": True},
    "prefix": {"prefix": True, "lse": True},
    "odd pages": {"page": 3, "heads": (6, 2), "D": (64, 64)},
    "one request": {"B": 1},
    "many requests": {"B": 512, "mask": causal},
    "256 columns": {"D": (256, 256), "heads": (8, 4), "mask": sliding_window(1024)},
    "16 rows of 256 columns": {"D": (256, 256), "heads": (16, 2), "q_len": 2},
    "8 rows of 256 columns": {"D": (256, 256), "heads": (16, 2), "score": softcap(30.0)},
    "chosen pages": {"selection": (128, 16)},
    "chosen tokens": {"selection": (2048, 1), "page": 0, "mask": sliding_window(1024)},
    "chosen of eight bits": {"kv": torch.float8_e4m3fn, "scaled": True, "selection": (64, 32)},
    "chosen by chunks": {"total_q": 2048, "mask": causal, "selection": (64, 64), "page": 64},
    "latent": {**LATENT, "heads": (16, 1)},
    "latent of 128 heads": {**LATENT, "heads": (128, 1)},
    "latent of eight bits": {
        **LATENT, "heads": (16, 1), "kv": torch.float8_e4m3fn, "scales": "token"
    },
}  # fmt: skip
AWAITED = {
    "heads": ServingConfig(8, 64, 4, 1, 2, 1, "await", "heads"),
    "round": ServingConfig(8, 128, 8, 1, 1, 1, "await", "round"),
    "16 rows": ServingConfig(16, 64, 4, 1, 2, 1, "await", "heads"),
}


def spills_by_tile(compiled):
    """Loads and stores of spilled registers in the innermost loops that multiply."""
    lines = _disassembled(compiled.asm["cubin"]).splitlines()
    begins = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.L\w+):", line))}
    loops = [
        range(begins[m[1]], i)
        for i, line in enumerate(lines)
        if (m := re.search(r"BRA.*?(\.L\w+)", line)) and begins.get(m[1], i) < i
    ]
    loops = [each for each in loops if any("MMA" in lines[i] for i in each)]
    assert loops
    inner = [
        x for x in loops if not any(y != x and y[0] >= x[0] and y[-1] <= x[-1] for y in loops)
    ]
    return sum(bool(re.search(r"\b(STL|LDL)\b", lines[i])) for each in inner for i in each)


QUICK = (
    "chosen pages",
    "latent of 128 heads",
    "paged",
    "window",
    "eight bits",
    "mixed",
    "odd pages",
    "256 columns",
)


@pytest.mark.releases
@pytest.mark.parametrize("name", share(CASES, lambda name: name in QUICK))
def test_the_default_config(name):
    wanted = form(**CASES[name])
    # Those that a warp loads for: test_mla.py.
    config = next(x for x in serving_candidates(wanted, DEVICE) if not x.by_tma)
    source = render_serving(wanted, config, DEVICE, name)
    compiled = compile_source(source, DEVICE)
    taken = resources(compiled, DEVICE)
    assert taken.matrix_instructions > 0
    # Between units of work a few words may wait in memory; in a loop over tiles none does.
    assert spills_by_tile(compiled) == 0
    assert config.warp_private or taken.loop_spills <= (24 if wanted.unit else 0)
    threads = 32 * config.num_warps * config.per_sm
    assert taken.registers * threads <= DEVICE.registers
    assert (taken.shared + 1024) * config.per_sm <= 228 * 1024
    # As the launcher counts: every argument, and Triton's two scratch pointers.
    assert binary_of(compiled, "sm_90").parameters == len(source.arguments) + 2
    copies = compiled.asm["ttgir"].count("async_copy_global_to_local")
    if config.warp_private:
        assert copies == 0 and taken.shared <= 32768, "K and V go to registers"
        assert not re.search(r"ld\.global\.[a-z0-9.]*b16", compiled.asm["ptx"]), "16 bytes at once"
    else:
        assert copies == (4 if wanted.scales else 2) * config.num_stages, (
            "K and V are copied ahead, and page ids never are"
        )


@pytest.mark.parametrize("name", AWAITED)
def test_who_awaits_parts_asks_for_all_of_them_at_once(name):
    """No fence and no counter, and no word is looked at before all are asked for."""
    config = AWAITED[name]
    about = {"B": 1} if name == "round" else {"q_len": config.BLOCK_M // 4, "sinks": True}
    wanted = form(**about)
    assert not serving_reasons(config, wanted, DEVICE)
    compiled = compile_source(render_serving(wanted, config, DEVICE, name), DEVICE)
    ptx = compiled.asm["ptx"]
    assert resources(compiled, DEVICE).loop_spills == 0
    assert "atom." not in ptx and "fence" not in ptx and "membar" not in ptx
    # And no longer than it takes to see that nothing comes: the host's word says so.
    assert "@again st.relaxed.sys.global.b32" in ptx
    asked = [m.start() for m in re.finditer(r"ld\.relaxed\.gpu\.global\.v\d\.b32", ptx)]
    assert len(asked) == 16 and "max.u32" not in ptx[asked[0] : asked[-1]]
    assert "st.relaxed.gpu.global.v" in ptx, "a part is stored in vectors"


@pytest.mark.parametrize(
    ("Hq", "D", "numbers", "threads", "own"),
    [
        (32, 128, (8, 128, 4, 1, 2, 1), 32, 32),
        (32, 128, (8, 128, 8, 1, 1, 1), 64, 64),
        (8, 64, (8, 128, 8, 1, 1, 1), 256, 64),
    ],
)
def test_one_thread_stores_a_word(Hq, D, numbers, threads, own):
    """Of the threads of a row the first stores its weight, and a vector who has it first."""
    wanted = form(heads=(Hq, 8), D=(D, D))
    config = ServingConfig(*numbers, "await", "heads")
    ptx = compile_source(render_serving(wanted, config, DEVICE, "once"), DEVICE).asm["ptx"]
    assert re.search(rf"and\.b32 thread, thread, {threads - 1};", ptx)
    assert re.search(rf"setp\.lt\.and\.u32 own, thread, {own}, wanted;", ptx)
    assert re.search(r"@first st\.relaxed\.gpu\.global\.b32", ptx)


def draft_tree(kind=torch.bool):
    """Of each request all keys in the past, and of its last 8 those that a table shows."""
    past, above = torch.arange(8, dtype=torch.int32), torch.ones(8, 8, dtype=kind)

    def mask(b, h, q, kv):
        return (kv < past[b]) | (above[q - past[b], (kv - past[b]).clamp(min=0)] != 0)

    return mask


READS = {
    torch.bool: "u8",
    torch.int8: "u8",
    torch.float16: "u16",
    torch.float32: "b32",
    torch.int64: "b64",
}


@pytest.mark.parametrize("kind", share(READS, lambda kind: kind == torch.bool), ids=str)
def test_a_mask_that_reads_the_last_keys_costs_the_other_tiles_nothing(kind):
    """A tree's table took on a layout of its own, scores and sums with it, and a second loop."""
    numbers = (32, 64, 4, 3, 2, 1)
    plain, tree = (
        compile_source(
            render_serving(form(B=8, q_len=8, **about), ServingConfig(*numbers), DEVICE, "test"),
            DEVICE,
        )
        for about in ({}, {"mask": draft_tree(kind)})
    )
    moved = [each.asm["ttgir"].count("ttg.convert_layout") for each in (plain, tree)]
    assert moved[0] == moved[1], "no score moves between threads for the table"
    assert tree.asm["ttgir"].count("async_copy_global_to_local") == 2 * 3, "one pipeline"
    assert resources(tree, DEVICE).matrix_instructions == 64, "one loop"
    assert spills_by_tile(tree) == 0
    assert resources(tree, DEVICE).spills < 10
    width = len(re.findall(rf"@p ld\.global\.{READS[kind]} word", tree.asm["ptx"]))
    assert width == 32 * 64 // 128


ASKED = {
    "program": ServingConfig(16, 64, 4, 3, 2, 1),
    "heads": AWAITED["heads"],
    "round": AWAITED["round"],
}


@pytest.mark.parametrize("name", share(ASKED, lambda name: name == "heads"))
def test_the_first_lines_of_captured_tensors_are_asked_for(name):
    """Cold, a table that another table leads to cost two waits for memory, one after the other."""
    mods = {"score": alibi(32, "cpu")}, {"mask": draft_tree()}
    about = [{}, {"score": softcap(30.0)}, *mods]
    found = []
    for each in about:
        wanted = form(B=1 if name == "round" else 8, q_len=2, **each)
        source = render_serving(wanted, ASKED[name], DEVICE, "test")
        found.append(compile_source(source, DEVICE).asm["ptx"])
    counts = [ptx.count("prefetch.global.L2") for ptx in found]
    assert [each - counts[0] for each in counts] == [0, 0, 1, 3]
    if name != "round":  # its tiles' first loads come before all else
        for ptx in found:
            assert ptx.rindex("prefetch.global.L2") < ptx.index("ld.global")


def silu(score, b, h, q_idx, kv_idx):
    return torch.nn.functional.silu(score)


def striped(score, b, h, q_idx, kv_idx):
    return score + (b * 0.75) % 0.5


@pytest.mark.parametrize("mod", [silu, striped], ids=["sigmoid", "remainder of a number"])
def test_warps_that_walk_alone_speak_gluon(mod):
    """Their text was Triton's: tl.sigmoid, which Gluon lacks, and tl.zeros_like of a scalar."""
    source = render_serving(form(score=mod), AWAITED["heads"], DEVICE, "test")
    assert compile_source(source, DEVICE)


@pytest.mark.parametrize(
    "numbers", [(16, 64, 4, 3, 2, 1), pytest.param((64, 64, 4, 2, 2, 1), marks=LONG)], ids=str
)
def test_such_a_mask_in_tiles_of_other_heights(numbers):
    wanted = form(B=8, q_len=8, mask=draft_tree())
    compiled = compile_source(
        render_serving(wanted, ServingConfig(*numbers), DEVICE, "test"), DEVICE
    )
    assert spills_by_tile(compiled) == 0


EIGHT_BITS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize(("D", "Dv"), share([(128, 128), (64, 64)], lambda D: D[0] == 128))
@pytest.mark.parametrize("kind", share(EIGHT_BITS, lambda kind: kind == "e4m3"))
def test_a_warp_widens_its_eight_bits_in_registers(kind, D, Dv):
    """Two numbers an instruction, each once; what is read is 16 bytes wide, of short V rows 8."""
    config = ServingConfig(8, 128, 4, 1, 2, 1, "await", "heads")
    wanted = form(kv=EIGHT_BITS[kind], scaled=True, D=(D, Dv))
    assert not serving_reasons(config, wanted, DEVICE)
    assert config in serving_space(wanted, DEVICE)
    compiled = compile_source(render_serving(wanted, config, DEVICE, kind), DEVICE)
    ptx = compiled.asm["ptx"]
    assert ptx.count(f"cvt.rn.f16x2.{kind}x2") == config.keys_per_warp * (D + Dv) // 64
    assert resources(compiled, DEVICE).spills == spills_by_tile(compiled) == 0
    wide = 4 if Dv == 128 else 2
    for words, tensor in ((4, D), (wide, Dv)):
        reads = config.keys_per_warp * tensor // (32 * 4 * words)
        assert len(re.findall(rf"ld\.global\.[\w:.]*v{words}\.b32", ptx)) >= reads
    assert not re.search(r"ld\.global\.[\w:.]*b(8|16)\b", ptx)


@pytest.mark.parametrize(
    "numbers", [(16, 64, 4, 1, 2, 1), (8, 64, 2, 1, 2, 1), (8, 256, 8, 1, 1, 1)], ids=str
)
def test_no_config_of_eight_bits_that_may_run_spills(numbers):
    """32 keys of a warp with three programs a multiprocessor, and 64 keys, did."""
    config = ServingConfig(*numbers, "await", "heads")
    wanted = form(kv=EIGHT_BITS["e4m3"], scaled=True)
    compiled = compile_source(render_serving(wanted, config, DEVICE, "test"), DEVICE)
    assert not serving_reasons(config, wanted, DEVICE)
    assert resources(compiled, DEVICE).spills == 0
    for per_sm, own in ((3, 32), (2, 64)):
        other = replace(config, num_warps=4, BLOCK_M=8, BLOCK_N=4 * own, per_sm=per_sm)
        assert any("registers hold" in each for each in serving_reasons(other, wanted, DEVICE))


def test_the_kernels_that_merge():
    wanted = form(total_q=2048, mask=causal, lse=True, sinks=True)
    config = next(serving_candidates(wanted, DEVICE))
    assert config.combine == "launch"
    sources = (
        render_serving_combine(wanted, config, DEVICE),
        render_merge_states("bfloat16", 128, DEVICE),
    )
    for source in sources:
        compiled = compile_source(source, DEVICE)
        assert resources(compiled, DEVICE).spills == 0
        assert binary_of(compiled, "sm_90").parameters == len(source.arguments) + 2


@pytest.mark.parametrize("D", share([40, 64, 128, 192, 256, 512], lambda D: D in (40, 128)))
@pytest.mark.parametrize("kv", [BF16, torch.float8_e4m3fn])
def test_the_kernel_that_ends_a_cascade(kv, D):
    """A warp asks for all parts of a row, and for the own state before, then waits once."""
    wanted = form(B=32, D=(D, D), kv=kv, scaled=kv != BF16, prefix=True, lse=True)
    config = next(serving_candidates(wanted, DEVICE))
    assert (config.combine, config.per_sm) == ("launch", 1)
    source = render_join(wanted, config, DEVICE)
    compiled = compile_source(source, DEVICE)
    assert resources(compiled, DEVICE).spills == 0
    assert binary_of(compiled, "sm_90").parameters == len(source.arguments) + 2
    assert join_programs(wanted, config, 32) == 32 * 32
    if D & (D - 1) == 0:
        ptx = compiled.asm["ptx"]
        assert "bar.sync" not in ptx and "st.shared" not in ptx
        wide = [m.start() for m in re.finditer(r"ld\.global\.v4\.b32", ptx)]
        assert len(wide) >= (16 if D >= 128 else 8)
        assert not re.search(r"ex2|shfl", ptx[: wide[-1]]), "no part is waited for before"


def test_a_masks_table_is_read_on_amd_too():
    """It was read by PTX there: LLVM refused the line, Triton left it out and said nothing."""
    device = named("amd-mi300x")
    past, tree = torch.zeros(64, dtype=torch.int32), torch.zeros(64, 8, 8, dtype=torch.bool)

    def ancestors(b, h, q_idx, kv_idx):
        own = kv_idx - past[b]
        return (own < 0) | tree[b, q_idx - past[b], own]

    wanted = form(q_len=8, mask=ancestors)
    source = render_serving(wanted, next(serving_candidates(wanted, device)), device, "test")
    # Nothing else in it has a byte: without a mask there is no such load.
    assert re.search(r"load_[su]byte", compile_source(source, device).asm["amdgcn"])


def test_a_prefix_alone_has_other_defaults():
    """Those of other forms of more than 16 rows have two programs for each multiprocessor."""
    for about in ({"heads": (96, 4), "page": 8}, {"total_q": 2048}, {"q_len": 16, "page": 8}):
        config = next(serving_candidates(form(**about), DEVICE))
        assert (config.warp_private, config.per_sm) == (False, 2), about
    for about in ({"B": 1}, {"B": 4}, {"B": 256}, {"D": (256, 256)}):
        config = next(serving_candidates(form(prefix=True, **about), DEVICE))
        assert (config.combine, config.per_sm) == ("launch", 1), about


def test_the_space_starts_with_the_default_and_names_its_workspace():
    wanted = form()
    found = serving_space(wanted, DEVICE)
    assert found[0] == next(serving_candidates(wanted, DEVICE)) and len(set(found)) == len(found)
    assert workspace(wanted, found[0], DEVICE) == 2 * 132 * 8 * 129
    assert {each.warp_private for each in found} == {False, True}
    assert all(each.split_policy != "round" for each in found), (
        "tiles of many requests do not go round"
    )
    assert {each.split_policy for each in serving_space(form(B=1), DEVICE)} == {
        "even",
        "round",
        "heads",
    }


INVARIANT = {
    "steps": {"mask": sliding_window(1024), "score": softcap(30.0), "sinks": True},
    "chunks": {"total_q": 2048, "mask": causal, "lse": True},
    "eight bits": {"kv": torch.float8_e4m3fn, "scaled": True},
    "one request": {"B": 1},
    "one request, contiguous, of two head dimensions": {"B": 1, "page": 0, "D": (64, 128)},
    "chunks of 256 columns": {"total_q": 512, "mask": causal, "D": (256, 256), "heads": (8, 4)},
}


@pytest.mark.parametrize("name", INVARIANT)
def test_batch_invariant_kernels_fuse_no_product_with_a_sum(name):
    wanted = form(batch_invariant=True, **INVARIANT[name])
    (config,) = serving_candidates(wanted, DEVICE)
    compiled = compile_source(render_serving(wanted, config, DEVICE, name), DEVICE)
    assert spills_by_tile(compiled) == 0
    assert "fma.rn.f32" not in compiled.asm["ptx"]
    assert "mma.sync.aligned.m16n8k16" in compiled.asm["ptx"]
