"""The Gluon template compiles for Hopper with no device, on the oldest Triton and the newest."""

import re
import tempfile
from dataclasses import replace

import pytest
import torch
import triton
from torch.nn.attention.flex_attention import and_masks
from triton._C.libtriton import ir, nvidia, passes

from flexattn.catalogue import alibi, causal, document, relative_bias, sliding_window, softcap
from flexattn.errors import ConfigError
from flexattn.kernels.base.config import describe
from flexattn.kernels.choose.defaults import candidates, default, reasons, space
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.hopper.merge_consumers import ALONE, EVERY_WARP
from flexattn.runtime.build import compile_source
from flexattn.runtime.cuda_launch import RANK
from flexattn.runtime.kernel_store import binary_of
from flexattn.runtime.resources import _disassembled, resources
from tests.cases import CASES as WHOLE
from tests.compile.shares import LONG, part, share
from tests.families import estimates, gluon_refused, preferences, render
from tests.problems import H200, problem

pytestmark = pytest.mark.oldest

SMALL = HopperPrefillConfig(3, 64, 2, 160)
# Its ptxas keeps in registers what the loops of every preference hold.
KEPT = triton.__version__.startswith("3.6.")
SIZES = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
RELATIVE = relative_bias(torch.zeros(32, 8192, dtype=torch.bfloat16), 4096)
MODS = {
    "noop": {},
    "causal": {"mask_mod": causal, "runs": True},
    "lists": {"mask_mod": causal},
    "window_softcap": {"score_mod": softcap(50.0), "mask_mod": sliding_window(1000), "runs": True},
    "alibi": {"score_mod": alibi(32, "cpu")},
    "alibi_causal": {"score_mod": alibi(32, "cpu"), "mask_mod": causal, "runs": True},
    "documents": {"mask_mod": and_masks(document(torch.zeros(8).int()), causal), "runs": True},
    "relative_causal": {"score_mod": RELATIVE, "mask_mod": causal, "runs": True},
    "relative_lists": {"score_mod": RELATIVE, "mask_mod": causal},
}


def wrong(problem, config):
    """What is wrong with a config's kernel; "" where it is as it should be.

    A few words kept on the stack from tile to tile are ptxas' choice: what starves a loop is not.
    Where a ptxas does starve them, dispatch sees it when it compiles, and takes another config.
    """
    source = render(problem.structure, config, H200, "test")
    compiled = compile_source(source, H200)
    taken = resources(compiled, H200)
    binary = binary_of(compiled, H200.arch)
    split = {config.consumer_regs, config.producer_regs}
    estimate, _ = estimates(config, problem.structure, H200)
    faults = {
        "spills": taken.starved and KEPT,
        "wgmma waits": taken.serialised,
        "no wgmma": not taken.matrix_instructions,
        "register split": not split <= set(taken.register_split),
        "shared memory": not taken.shared <= min(estimate, H200.shared_memory),
        "warps": binary.num_warps != config.num_warps,
        "parameters": binary.parameters != len(source.arguments) + 2 * RANK * 4 + 2,
        "descriptors": len(binary.maps) != 4,
    }
    found = [name for name, is_so in faults.items() if is_so]
    return f"{describe(config)}: {', '.join(found)}: {taken}, {estimate} bytes" if found else ""


# Registers for a table's diagonals and for lists beside 256 columns: Triton's template has them.
REFUSED = (256, 256, "relative_lists")
CASES = [case for size in SIZES for mods in MODS if (case := (*size, mods)) != REFUSED]


@pytest.mark.releases
@pytest.mark.parametrize(
    ("D", "Dv", "mods"), share(CASES, lambda case: case[0] == 128 or case[::2] == (192, "causal"))
)
def test_default_config(D, Dv, mods):
    wanted = problem("prefill", D, Dv, **MODS[mods])
    assert not (fault := wrong(wanted, default(wanted, H200, "gluon"))), fault


# Values of 192 columns lie in tiles of 256.
FP8 = [
    (D, mods) for D in (64, 96, 128, 192, 256) for mods in MODS if D < 192 or mods != REFUSED[2]
]


@pytest.mark.parametrize(("D", "mods"), share(FP8, lambda case: case == (128, "window_softcap")))
def test_fp8(D, mods):
    wanted = problem("prefill", D, dtype="float8_e4m3fn", **MODS[mods])
    assert not (fault := wrong(wanted, default(wanted, H200, "gluon"))), fault


def test_fp8_multiplies_scores_in_eight_bits_and_values_in_sixteen():
    wanted = problem("prefill", 128, dtype="float8_e4m3fn")
    config = replace(default(wanted, H200, "gluon"), tile_scheduler="grid")
    text = compile_source(render(wanted.structure, config, H200, "test"), H200).asm["ptx"]
    scores, values = (
        text.count(f"wgmma.mma_async.sync.aligned.m64n128{what}")
        for what in ("k32.f32.e4m3.e4m3", "k16.f32.bf16.bf16")
    )
    assert scores and scores * 2 == values


E4M3 = {"dtype": "float8_e4m3fn", "fp8_weights": "e4m3"}


@pytest.mark.parametrize(("D", "mods"), share(FP8, lambda case: case == (256, "causal")))
def test_weights_of_eight_bits(D, mods):
    wanted = problem("prefill", D, **E4M3, **MODS[mods])
    assert not (fault := wrong(wanted, default(wanted, H200, "gluon"))), fault


@pytest.mark.parametrize(("D", "tile"), [(64, (3, 128)), (256, (2, 128))])
def test_a_soft_cap_has_the_tiles_of_a_plain_call(D, tile):
    """By halves its exponents spilled: two consumers of three were left, or 64 keys of 128."""
    weights = E4M3 if D == 256 else {"dtype": "float8_e4m3fn"}
    wanted = problem("prefill", D, score_mod=softcap(30.0), **weights, **MODS["causal"])
    config = default(wanted, H200, "gluon")
    assert (config.consumers, config.BLOCK_N) == tile
    assert not (fault := wrong(wanted, config)), fault


@pytest.mark.parametrize("lazy_rescale", [True, False])
def test_weights_of_eight_bits_are_an_operand_as_they_are(lazy_rescale):
    """Nothing is shuffled between threads, and the words of four weights are made as such."""
    wanted = problem("prefill", 128, **E4M3)
    config = replace(
        default(wanted, H200, "gluon"), tile_scheduler="grid", lazy_rescale=lazy_rescale
    )
    found = compile_source(render(wanted.structure, config, H200, "test"), H200)
    text, code = found.asm["ptx"], _disassembled(found.asm["cubin"])
    tile = "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"
    # Scores twice, of the first tile and in the loop, and values twice, in it and behind it.
    assert text.count(tile) == 4 * 4 and "bf16.bf16" not in text
    # Elements of one word are side by side in the operand; in the layout of scores two are of
    # another row.
    words = re.findall(
        r"packed_element = 4 .* -> tensor<64x128xf8E4M3FN, (.*?)>", found.asm["ttgir"]
    )
    assert words and all("dot_op" in layout for layout in words)
    # Words of weights are packed where they are converted; where they are converted at once, by
    # prmt, for ptxas merges halves of weights that are one number wrongly.
    assert code.count("PRMT") <= (16 if lazy_rescale else 32)


def test_the_other_dtype():
    wanted = problem("prefill", 128, dtype="float16")
    assert not (fault := wrong(wanted, default(wanted, H200, "gluon"))), fault


@pytest.mark.parametrize("mods", [pytest.param("noop", marks=LONG), "causal"])
def test_merged_consumers_are_compiled_once_and_wait_without_a_barrier(mods):
    """A program each compiled in twice or three times the time."""
    wanted = problem("prefill", 64, **MODS[mods])
    start = replace(default(wanted, H200, "gluon"), ping_pong=False, BLOCK_N=64)
    found = {
        count: compile_source(
            render(wanted.structure, replace(start, consumers=count), H200, "test"), H200
        )
        for count in (1, 2, 3)
    }
    products = {found[count].asm["ptx"].count("wgmma.mma_async") for count in found}
    assert len(products) == 1
    assert [found[count].metadata.num_warps for count in found] == [8, 12, 16]
    for count in (2, 3):
        waits = found[count].asm["ptx"].split(ALONE)[1:]
        assert len(waits) >= 3
        for wait in waits:
            assert "%meeting" not in wait[: wait.index("mbarrier.try_wait")]


@pytest.mark.parametrize("lazy_rescale", [True, pytest.param(False, marks=LONG)])
@pytest.mark.parametrize(
    ("D", "mods"),
    [
        (128, {"mask_mod": causal, "runs": True, "sinks": "float32"}),
        (128, {"score_mod": alibi(32, "cpu"), "mask_mod": causal, "runs": True}),
        (128, {"score_mod": softcap(30.0), "mask_mod": sliding_window(100)}),
        (256, {"mask_mod": causal, "runs": True}),
    ],
    ids=["sinks", "ALiBi", "lists", "wide"],
)
def test_what_a_program_shares_is_not_told_apart_by_a_meeting_that_was_taken_out(
    D, mods, lazy_rescale
):
    """The compiler takes such a meeting for one of all that is in shared memory."""
    wanted = problem("prefill", D, **mods)
    config = replace(default(wanted, H200, "gluon"), lazy_rescale=lazy_rescale)
    met = True
    for line in (
        compile_source(render(wanted.structure, config, H200, "test"), H200)
        .asm["ptx"]
        .splitlines()
    ):
        if ALONE in line:
            met = False
        elif re.match(r"\s*(bar|barrier)\.sync \t[%\d]", line):
            met = True
        assert met or not re.search(r"\bst\.shared|\bstmatrix", line), line


EXCHANGED = {
    "diagonals": {"score_mod": relative_bias(torch.zeros(32, 16384), 8191)},
    "words": {"mask_mod": document(torch.zeros(8192, dtype=torch.int32)), "runs": True},
    "two words": {"mask_mod": document(torch.zeros(8192, dtype=torch.int64)), "runs": True},
    "halves": {"mask_mod": lambda b, h, q, k: HALVES[q] <= HALVES[k], "runs": True},
    "bools": {"mask_mod": lambda b, h, q, k: (q > k) & (HALVES.bool()[k] | (h > 3))},
    "both": {
        "score_mod": relative_bias(torch.zeros(32, 16384), 8191),
        "mask_mod": document(torch.zeros(8192, dtype=torch.int64)),
    },
}
HALVES = torch.zeros(8192, dtype=torch.bfloat16)


def exchanged(ttgir):
    """Operations of the consumers to whose results the compiler gives a place in shared memory."""
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 80)
    manager.run(module, "exchanged")
    before, _, work = str(module).partition("ttg.warp_specialize(")
    assert before.count("allocation.offset") >= 6
    consumers, behind, _ = work.partition("partition0(")
    assert "warp_group_dot" in consumers and behind
    # The first line is that of warp_specialize itself, which tells warps what they begin with.
    return [line for line in consumers.splitlines()[1:] if "allocation.offset" in line]


@pytest.mark.parametrize("D", [pytest.param(64, marks=LONG), 128])
@pytest.mark.parametrize("case", share(EXCHANGED, lambda case: case in ("words", "both")))
def test_what_threads_exchange_has_a_buffer_for_each_consumer(case, D):
    """And no wait lacks the barrier that keeps one exchange from the next."""
    wanted = problem("prefill", D, **EXCHANGED[case])
    source = render(wanted.structure, default(wanted, H200, "gluon"), H200, "test")
    assert "exchange.index(consumer)" in source.text and ALONE not in source.text
    assert not exchanged(compile_source(source, H200).asm["ttgir"])


PACKED = [(mods, order) for mods in ("noop", "causal", "lists", "relative_causal")
          for order in ("dynamic", "grid")]  # fmt: skip


@pytest.mark.parametrize(
    ("mods", "tile_scheduler"),
    share(PACKED, lambda case: "causal" in case[0] and case[1] == "dynamic"),
)
def test_pack_gqa(mods, tile_scheduler):
    """Each consumer has a head of its own, and spills no more than any may."""
    wanted = problem("prefill", **MODS[mods])
    config = replace(default(wanted, H200, "gluon"), pack_gqa=True, tile_scheduler=tile_scheduler)
    assert not reasons(config, wanted.structure, H200)
    assert not (fault := wrong(wanted, config)), fault
    text = render(wanted.structure, config, H200, "test").text
    assert "load(Q, [b, h + 1, row_start, 0]" in text and "row_start + 1 * ROWS" not in text


@pytest.mark.parametrize(
    ("D", "numbers", "about"),
    [
        (128, {"lazy_rescale": False}, MODS["window_softcap"]),
        (256, {"q_in_regs": 256, "BLOCK_N": 32}, {}),
    ],
    ids=["maxima looked for", "Q in registers"],
)
def test_other_forms_have_no_place_of_the_compilers_either(D, numbers, about):
    wanted = problem("prefill", D, **about)
    config = replace(default(wanted, H200, "gluon"), **numbers)
    source = render(wanted.structure, config, H200, "test")
    assert not exchanged(compile_source(source, H200).asm["ttgir"])


@pytest.mark.full_matrix
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_the_compiler_gives_consumers_no_place_of_its_own(case):
    """It would be one place for all of them."""
    built = case.make(2, 8, 2, 611, 747, device="cpu", dtype=torch.bfloat16)
    wanted = problem("prefill", score_mod=built.score_mod, mask_mod=built.mask_mod, runs=True)
    for config in candidates(wanted, H200, "gluon"):
        source = render(wanted.structure, config, H200, "test")
        assert not exchanged(compile_source(source, H200).asm["ttgir"])
        return


def test_a_tile_branches_past_the_row_max_where_no_row_rose():
    """Per tile and program: one vote before looking for maxima, one before each 64 rescaled."""
    wanted = problem("prefill", 128)
    config = default(wanted, H200, "gluon")
    assert config.lazy_rescale
    source = render(wanted.structure, config, H200, "test")
    code = _disassembled(compile_source(source, H200).asm["cubin"])
    jumped = []
    for vote in re.finditer(r"VOTE\.ANY (P\d), P\d ;", code):
        branch = re.compile(rf"@!{vote.group(1)} BRA `\((\.L_x_\d+)\)").search(code, vote.end())
        over = code[branch.end() : code.index(f"\n{branch.group(1)}:")]
        jumped.append({name: len(re.findall(rf"\b{name}\b", over)) for name in ("FMNMX", "FMUL")})
    # Scores of a thread are 64: they and two times two that other threads know make the maxima.
    assert any(each["FMNMX"] >= 64 for each in jumped), jumped
    assert any(each["FMUL"] == 64 for each in jumped), jumped
    assert code.count("FMNMX") == sum(each["FMNMX"] for each in jumped)


@pytest.mark.full_matrix
@pytest.mark.parametrize("mods", ["noop", "window_softcap"])
@pytest.mark.parametrize(("D", "Dv"), SIZES)
def test_every_config_offered(D, Dv, mods, pytestconfig):
    wanted = problem("prefill", D, Dv, **MODS[mods])
    # The order of tiles decides a few instructions before the loop.
    found = [
        replace(each, order="last", l2_swizzle=8)
        for each in space(wanted, H200)
        if isinstance(each, HopperPrefillConfig)
    ]
    chosen = part(pytestconfig, found, 4, turn=2 * (mods == "noop"))
    assert chosen
    faults = list(filter(None, (wrong(wanted, config) for config in chosen)))
    assert not faults, "\n".join(faults)


@pytest.mark.full_matrix
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_every_mod_of_the_catalogue(case):
    """A mod that scales scores by what a row has once met a softmax of another shape."""
    built = case.make(2, 8, 2, 611, 747, device="cpu", dtype=torch.bfloat16)
    wanted = problem("prefill", score_mod=built.score_mod, mask_mod=built.mask_mod)
    # As dispatch does: the next where the compiler proves an estimate wrong.
    faults = []
    for config in candidates(wanted, H200, "gluon"):
        if not (fault := wrong(wanted, config)):
            return
        faults.append(fault)
    pytest.fail("\n".join(faults))


def test_two_blocks_of_one_consumer_have_registers():
    wanted = problem(mask_mod=causal, block=(64, 64), q_len=32768)
    config = next(c for c in space(wanted, H200) if getattr(c, "per_sm", 1) == 2)
    taken = resources(compile_source(render(wanted.structure, config, H200, ""), H200), H200)
    assert taken.registers == 120 and taken.spills == 0 and not taken.serialised
    assert {200, 40} <= set(taken.register_split)


def test_what_has_no_registers_left_is_served_by_triton():
    D, _, mods = REFUSED
    wanted = problem("prefill", D, **MODS[mods])
    assert "registers" in gluon_refused(wanted, H200)
    assert default(wanted, H200).language == "triton"


def test_a_preference_that_cannot_run_is_refused_before_it_is_compiled():
    wanted = problem("prefill", 640)
    assert all(
        reasons(each, wanted.structure, H200) for each in preferences(wanted, H200, "gluon")
    )
    with pytest.raises(ConfigError, match="Gluon prefill"):
        default(wanted, H200, "gluon")


MOST = HopperPrefillConfig(3, 64, 3, 160, ping_pong=True, tile_scheduler="static", order="heads")
LISTED = HopperPrefillConfig(2, 128, 2, 240, tile_scheduler="dynamic", order="sections")


def lowest(text):
    """The lowest barrier that the template uses: for empty stages, or for warp_scheduler_sync."""
    given = re.findall(r"(?m)^[KVQ]_EMPTY = gl\.constexpr\((\d+)\)$", text)
    return min(map(int, given + re.findall(r"add\.u32 turn, \$1, (\d+);", text)))


@pytest.mark.parametrize(
    ("config", "mods"),
    [(MOST, {}), (LISTED, {"score_mod": alibi(32, "cpu"), "mask_mod": causal})],
)
def test_compiler_and_template_take_different_barriers(config, mods):
    source = render(problem("prefill", 64, **mods).structure, config, H200, "test")
    ptx = compile_source(source, H200).asm["ptx"]
    taken = set(map(int, re.findall(r"\bbar(?:rier)?(?:\.cta)?\.sync(?:\.\w+)*\s+(\d+)", ptx)))
    # The one where work starts; the consumers' are those below it.
    assert EVERY_WARP in taken and "bar.sync \t%meeting, 128;" in ptx
    assert EVERY_WARP >= config.consumers
    assert max(taken) < lowest(source.text), (taken, lowest(source.text))


def test_release_waits_for_nobody():
    """Consumers release stages without a barrier of their warpgroup: bar.arrive, not mbarrier."""
    source = render(
        problem("prefill", 128).structure, HopperPrefillConfig(2, 128, 2, 240), H200, ""
    )
    ptx = compile_source(source, H200).asm["ptx"]
    assert ptx.count("bar.arrive") >= 3
    assert "mbarrier.arrive.shared" not in ptx
