"""The Hopper backward compiles with no device, keeps its registers and overlaps its products."""

import re
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
import triton
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue import (
    alibi,
    causal,
    document,
    relative_bias,
    sliding_window,
    softcap,
    t5_bias,
)
from flexattn.cli.selection import compiled as compiled_for
from flexattn.kernels.base.config import describe
from flexattn.kernels.choose.defaults import space
from flexattn.kernels.choose.options import Options
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.decay_skip.source import render_blocks
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from flexattn.kernels.hopper_backward.family import defaults
from flexattn.kernels.hopper_backward.source import render_before
from flexattn.kernels.hopper_backward.two_buffers import ANNOUNCED
from flexattn.kernels.ptx.assembler import bounds_views
from flexattn.runtime.build import compile_source
from flexattn.runtime.resources import _disassembled, resources
from flexattn.settings import override
from tests.compile.product_loops import product_loops
from tests.compile.shares import part, share
from tests.families import render
from tests.problems import H200, problem

pytestmark = pytest.mark.oldest

OLDEST = triton.__version__.startswith("3.6.")
DOCUMENTS = document(torch.zeros(8192).int())
PACKED = and_masks(DOCUMENTS, causal)
MODS = {
    "full": {},
    "causal": {"mask_mod": causal, "runs": True},
    "lists": {"mask_mod": causal},
    "window": {"mask_mod": sliding_window(1000), "runs": True},
    "blocks of 64": {"mask_mod": causal, "block": (64, 64)},
    "documents": {"mask_mod": DOCUMENTS, "runs": True},
    "packed": {"mask_mod": PACKED, "runs": True},
    "near": {"mask_mod": and_masks(DOCUMENTS, sliding_window(1000)), "runs": True},
    "softcap": {"score_mod": softcap(30.0), "mask_mod": causal, "runs": True},
    "capped": {"score_mod": softcap(30.0), "mask_mod": PACKED, "runs": True},
    "alibi": {"score_mod": alibi(32, "cpu"), "mask_mod": causal, "runs": True},
}
CONFIG = HopperBackwardConfig(64, 128, 2)
# Of the quick ones that are narrower than tiles: how many steps have so many columns. S and dP of
# 96 are six each, dV and dK four of 96, and dQ eight of 64, which two warpgroups share. Of 192
# there are two loops, and the last dQ of the warpgroup of the scores stands behind them; of tiles
# of 96 keys four, and all but dQ have 96.
STEPS = {96: {64: 6 + 6 + 8, 96: 4 + 4}, 192: {64: 2 * 3 * 6 + 6, 96: 2 * 4 * 12}}
if bounds_views():
    STEPS[192] = {64: 2 * (12 + 12 + 4) + 4, 192: 16, 128: 8}
EVEN, ODD = (8192, 1), (8191, 4)
EVEN_CAUSAL = {"kv_len": 8192, "group": 1, **MODS["causal"]}
QUICK = [("full", 128, EVEN), ("causal", 256, EVEN), ("full", 96, EVEN), ("causal", 192, EVEN)]
NARROW = (48, 80, 96, 112, 160, 192, 224)
EVERY = [(name, D, sizes) for name in MODS for D in (64, 128, 256) for sizes in (EVEN, ODD)]
EVERY += [(name, D, each) for name in ("full", "causal") for D in NARROW for each in (EVEN, ODD)]
EVERY = [each for each in EVERY if each not in QUICK]


def kept(wanted):
    """The compiled default, and how many words each of its loops of products spills.

    Of calls with dropout the default of those that ask for Gluon.
    """
    asked = Options(language="gluon" if wanted.structure.dropout else None)
    with override(mode="off"):
        choice, compiled = compiled_for(wanted, H200, asked)
    taken = resources(compiled, H200)
    assert isinstance(choice.config, HopperBackwardConfig), choice.attempts
    assert not taken.serialised and taken.shared <= H200.shared_memory, (choice.config, taken)
    config = choice.config
    wide = (config.BLOCK_M, config.BLOCK_N) == (64, 128) and not config.deterministic
    draws = wanted.structure.dropout and wide
    assert {232 if draws else 240, 24} <= set(taken.register_split), taken
    used = family_of(choice.config).limits.resources(choice.config, wanted.structure, H200)
    assert abs(used[0] - taken.shared) <= 512
    return compiled, [words for _, words in product_loops(compiled.asm["cubin"])]


@pytest.mark.parametrize(("name", "D", "sizes"), QUICK, ids=str)
def test_defaults_keep_their_registers_and_overlap(name, D, sizes):
    kv_len, group = sizes
    compiled, spilled = kept(problem("backward", D, kv_len=kv_len, group=group, **MODS[name]))
    assert spilled and not any(spilled), spilled
    # The compiler's barriers count up from 0, the template's down from 15.
    ptx, barrier = compiled.asm["ptx"], r"\bbar(?:rier)?(?:\.cta)?\.sync(?:\.\w+)*\s+(\d+)"
    taken = re.findall(barrier, ptx)
    assert taken and max(map(int, taken)) < 7
    products = Counter(map(int, re.findall(r"\bm64n(\d+)k16", ptx)))
    assert products == STEPS.get(D, products)
    # With two tiles of dS the warps meet behind a store, and not in front of it as well.
    stores = [each[: each.index("stmatrix")] for each in ptx.split(ANNOUNCED)[1:]]
    assert len(stores) == (0 if D > 128 else 1), len(stores)
    assert not any(re.search(barrier, each) for each in stores)


@pytest.mark.parametrize("mask", ["causal", pytest.param("full", marks=pytest.mark.long)])
def test_tiles_of_128_keys_above_128_columns(mask):
    """A search tries them; loops of some 600 instructions read 16 spilled words or fewer."""
    wanted = problem("backward", 192, 128, kv_len=8192, group=1, **MODS[mask])
    ours = (c for c in space(wanted, H200) if isinstance(c, HopperBackwardConfig))
    config = next(c for c in ours if c.BLOCK_N == 128)
    compiled = compile_source(render(wanted.structure, config, H200, "lean"), H200)
    taken = resources(compiled, H200)
    assert not taken.serialised and taken.shared <= H200.shared_memory, taken
    spilled = [words for _, words in product_loops(compiled.asm["cubin"])]
    assert len(spilled) == 1 + (mask == "causal") and max(spilled) <= 16, spilled
    products = Counter(map(int, re.findall(r"\bm64n(\d+)k16", compiled.asm["ptx"])))
    # S and dP, and of dQ the first columns; dQ's rest; dV; dK.
    each = {64: 12 + 8 + 8, 32: 8, 128: 4, 192: 4}
    assert products == {n: count * len(spilled) for n, count in each.items()}


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("values", [192, 128])
def test_tiles_of_96_keys(values, mask):
    """Two chunks of dQ, one behind the other, took registers of both: products serialised."""
    wanted = problem("backward", 192, values, kv_len=8192, group=1, **MODS[mask])
    config = replace(CONFIG, BLOCK_N=96, by_product=True, mha=True)
    limits = family_of(config).limits
    if bounds_views():
        assert limits.violated(config, wanted.structure, H200)[0].name == "views"
        return
    compiled = compile_source(render(wanted.structure, config, H200, "keys of two blocks"), H200)
    taken = resources(compiled, H200)
    used, _ = limits.resources(config, wanted.structure, H200)
    assert not taken.serialised and abs(used - taken.shared) <= 512, taken
    spilled = [words for _, words in product_loops(compiled.asm["cubin"])]
    assert len(spilled) == 4 and not any(spilled), spilled
    # In each loop s, dp, dk and dv by 96 keys; dQ by 64 columns, once more behind the loops.
    products = Counter(map(int, re.findall(r"\bm64n(\d+)k16", compiled.asm["ptx"])))
    assert products == {96: 2 * 4 * 2 * (3 + values // 64), 64: 2 * 3 * 6 + 6}


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_what_finds_tiles_with_weights_and_the_kernel_that_adds_in_their_order(mask):
    structure = problem("backward", **{**MODS["alibi"], **MODS[mask]}).structure
    if mask == "full":
        structure = replace(structure, mask=None, sparsity=None)
    blocks = compile_source(render_blocks(structure, 64, 128, H200), H200)
    assert not resources(blocks, H200).starved
    config = family_of(CONFIG).made_deterministic(CONFIG, structure)
    source = render(structure, config, H200, "test")
    assert {"M_BLOCK_MAX", "N_BLOCK_MIN"} <= {each.name for each in source.arguments}
    compiled = compile_source(source, H200)
    spilled = [words for _, words in product_loops(compiled.asm["cubin"])]
    # Beside a mask's lists a number of the loop that evaluates it has no register.
    assert spilled and sum(spilled) <= (2 if mask == "causal" else 0), spilled
    assert not resources(compiled, H200).serialised


# Loads and stores of spilled words in a default's loops of products, all loops together: under
# Triton 3.6 and under 3.9. No other default has any. A soft cap's derivative is one more tile of
# 32 registers beside the weights, their gradients and the 128 of dK and dV. Tall tiles of 64
# columns have two of 64. The rest lacks a register or two for a mask's or a bias' numbers.
SPILLS = {
    ("packed", 256, ODD): (6, 0),
    ("near", 256, ODD): (4, 0),
    ("capped", 128, EVEN): (0, 24),
    ("capped", 128, ODD): (0, 44),
    ("window", 64, EVEN): (0, 2),
    # Half of V is in registers.
    ("full", 128, ODD): (1, 0),
    ("softcap", 128, EVEN): (0, 10),
    ("alibi", 256, ODD): (0, 4),
    ("causal", 256, ODD): (2, 0),
    ("lists", 256, ODD): (4, 0),
    ("blocks of 64", 256, ODD): (4, 0),
    ("documents", 256, ODD): (4, 0),
    # With dropout, where a single word is a thread's number, which is stored for after the loop.
    ("dropout causal", 64, EVEN): (0, 3),
    ("dropout causal", 64, ODD): (0, 5),
    ("dropout lists", 64, ODD): (0, 7),
    ("dropout packed", 96, ODD): (4, 1),
    ("dropout packed", 128, ODD): (4, 1),
    ("dropout packed", 256, ODD): (0, 4),
    ("dropout near", 96, ODD): (13, 7),
    ("dropout near", 128, ODD): (13, 7),
}


def dropping(name, D, sizes):
    kv_len, group = sizes
    wanted = problem("backward", D, kv_len=kv_len, group=group, **MODS[name])
    return replace(wanted, structure=replace(wanted.structure, dropout=True))


def test_dropout_keeps_its_registers():
    wanted = dropping("causal", 128, EVEN)
    compiled, spilled = kept(wanted)
    assert spilled and not any(spilled), spilled
    # The four warps that draw also meet by themselves, at a barrier of Triton's choice.
    code = _disassembled(compiled.asm["cubin"])
    barriers = set(re.findall(r"\bBAR\.(?:SYNC|ARV)\S* 0x(\w+), 0x(\w+)", code))
    threads = {int(count, 16) for _, count in barriers}
    assert {32 * 4, 32 * 8, 32 * (4 + 8)} <= threads
    assert len({number for number, _ in barriers}) == len(barriers), barriers
    before = compile_source(render_before(wanted.structure, CONFIG, H200, False), H200)
    assert not resources(before, H200).starved


@pytest.mark.full_matrix
@pytest.mark.parametrize("sizes", [EVEN, ODD], ids=str)
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("name", ["full", "causal", "lists", "packed", "near"])
def test_dropout_keeps_the_registers_of_every_default(name, D, sizes):
    _, spilled = kept(dropping(name, D, sizes))
    assert sum(spilled) <= SPILLS.get((f"dropout {name}", D, sizes), (0, 0))[not OLDEST], spilled


@pytest.mark.full_matrix
@pytest.mark.parametrize(("name", "D", "sizes"), EVERY, ids=str)
def test_every_default_keeps_its_registers(name, D, sizes):
    kv_len, group = sizes
    _, spilled = kept(problem("backward", D, kv_len=kv_len, group=group, **MODS[name]))
    assert sum(spilled) <= SPILLS.get((name, D, sizes), (0, 0))[not OLDEST], spilled


# Beside a default, what a race compares with it: changes of its fields, above 128 columns others.
EARLY = {"early_lse": "all"}
STAYS = {**EARLY, "dq_halves": False, "persistent": True}
SHARED = {"by_product": False, "BLOCK_N": 64, "remat": True, **EARLY}


@pytest.mark.full_matrix
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(
    ("D", "changes"),
    [*product((80, 96, 112), (EARLY, STAYS)), (48, EARLY), *product((160, 192, 224), (SHARED,))],
    ids=str,
)
def test_what_a_race_of_narrow_heads_compares(D, changes, mask):
    """Triton 3.6 has registers for each; 3.9, whose defaults differ, overlaps its products."""
    wanted = problem("backward", D, kv_len=8192, group=1, **MODS[mask])
    config = replace(next(defaults(wanted)), **changes)
    compiled = compile_source(render(wanted.structure, config, H200, "race"), H200)
    assert not resources(compiled, H200).serialised
    spilled = [words for _, words in product_loops(compiled.asm["cubin"])]
    assert spilled and (not any(spilled) or not OLDEST), spilled


@pytest.mark.full_matrix
@pytest.mark.parametrize("D", [64, 128, 256])
def test_forms_that_a_search_tries_fit(D, pytestconfig):
    """What spills loses a race, and what does not build ends one."""
    wanted = problem("backward", D, group=1, **MODS["causal"])
    found = [c for c in space(wanted, H200) if isinstance(c, HopperBackwardConfig)]
    forms = dict.fromkeys(found)
    assert len(forms) >= (16 if D <= 128 else 9)  # wide tiles have fewer knobs
    for config in part(pytestconfig, forms, 4):
        compiled = compile_source(render(wanted.structure, config, H200, "matrix"), H200)
        taken = resources(compiled, H200)
        assert taken.shared <= H200.shared_memory and taken.matrix_instructions, describe(config)


@pytest.mark.parametrize(
    ("D", "dropout"),
    share(
        [(128, True), (64, False), (128, False), (64, True)],
        lambda case: case == (128, True),
    ),
)
def test_sums_in_order_overlap_their_products(D, dropout):
    """The default made deterministic, as a call is that asks for it."""
    wanted = dropping("causal", D, EVEN) if dropout else problem("backward", D, **EVEN_CAUSAL)
    config = next(defaults(wanted))
    config = family_of(config).made_deterministic(config, wanted.structure)
    compiled = compile_source(render(wanted.structure, config, H200, "in order"), H200)
    taken = resources(compiled, H200)
    assert not taken.serialised and taken.register_split == (240, 24)
    spilled = [words for _, words in product_loops(compiled.asm["cubin"])]
    assert spilled and not any(spilled), spilled
    before = compile_source(render_before(wanted.structure, config, H200, False), H200)
    assert not resources(before, H200).starved


@pytest.mark.parametrize("stays", [False, True], ids=["one", "persistent"])
def test_trimmed_runs_keep_registers(stays):
    wanted = problem("backward", 128, kv_len=8192, group=1, **MODS["packed"])
    config = replace(next(defaults(wanted)), trimmed=True, waves=4, persistent=stays)
    config = replace(config, ds_first=stays, dp_rs=config.dp_rs and stays)
    compiled = compile_source(render(wanted.structure, config, H200, "trimmed"), H200)
    assert not resources(compiled, H200).serialised
    spilled = [words for _, words in product_loops(compiled.asm["cubin"])]
    assert spilled and not any(spilled), spilled
    if stays:
        # Nobody writes again what dk and dv are stored from before the copy engine has read it,
        # which one thread alone knows.
        barrier = r"\n\s*bar(?:rier)?(?:\.cta)?\.sync\s+0"
        assert re.search(rf"bulk\.wait_group\.read\s+0;{barrier}", compiled.asm["ptx"])
    trim = family_of(config).around(wanted, config, H200).trim
    assert not resources(compile_source(trim, H200), H200).starved


@pytest.mark.parametrize("D", [128, 160])
def test_what_is_launched_around_it(D):
    """No division of 64 bits, which is a subroutine: one a row took longer than the loads."""
    wanted = problem("backward", D)
    around = family_of(CONFIG).around(wanted, HopperBackwardConfig(64, 64, 2), H200)
    for source in (*around.before, around.after):
        compiled = compile_source(source, H200)
        assert not resources(compiled, H200).starved
        assert not re.search(r"\bCALL\b", _disassembled(compiled.asm["cubin"]))


# Additions of a warp, of tiles that lie inside of the table and of others: of diagonals of 16 keys
# and 64 rows; of 32 rows where warpgroups share them, beside those of dq, which each thread adds.
ADDED = {64: 2 * 3, 128: 2 * 3, 256: 2 * 2 + 16}
# The most words that a loop spills, by head dimension.
MOST = {64: 0, 128: 5, 256: 10}
CASES = [(D, sizes, name) for D in MOST for sizes in (EVEN, ODD) for name in ("causal", "full")]


@pytest.mark.parametrize(("D", "sizes", "name"), share(CASES, lambda c: c == (64, EVEN, "full")))
def test_loops_add_once_for_each_diagonal(D, sizes, name):
    kv_len, group = sizes
    mask = {"mask_mod": causal, "runs": True} if name == "causal" else {}
    score_mod = relative_bias(torch.zeros(32, 16384, dtype=torch.bfloat16), 8192)
    wanted = problem("backward", D, kv_len=kv_len, group=group, score_mod=score_mod, **mask)
    wanted = replace(wanted, structure=replace(wanted.structure, grads=(0,)))
    compiled, spilled = kept(wanted)
    assert max(spilled) <= MOST[D], spilled
    # Three products of a tile begin with zeros: scores, dP and dQ.
    code = _disassembled(compiled.asm["cubin"])
    loops, rest = divmod(len(re.findall(r"HGMMA[^;]*RZ, !UPT", code)), 3)
    assert loops and not rest
    assert code.count("REDG.E.ADD.F32") == ADDED[D] * loops, loops
    assert "ATOMG.E.ADD.F32" not in code


@pytest.mark.full_matrix
@pytest.mark.parametrize("D", MOST)
def test_buckets_of_distances_are_served(D):
    score_mod = t5_bias(torch.zeros(32, 32), 128)
    wanted = problem("backward", D, group=1, score_mod=score_mod, mask_mod=causal, runs=True)
    wanted = replace(wanted, structure=replace(wanted.structure, grads=(0,)))
    kept(wanted)
