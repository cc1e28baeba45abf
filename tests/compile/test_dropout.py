"""Kernels with dropout compile, keep to their registers, and drop what the reference drops."""

import ast
import importlib.util
from dataclasses import replace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from flexattn.catalogue import causal
from flexattn.cli.selection import compiled as compiled_for
from flexattn.device import named
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.choose.options import parse
from flexattn.problem.inputs import Dropout
from flexattn.reference.dropout import kept_weights
from flexattn.runtime.resources import resources
from flexattn.settings import override
from tests.families import render
from tests.problems import problem
from tests.ptx_machine import run

H200, GLUON, TRITON = named("nvidia-h200"), {"BACKEND": "GLUON"}, {"BACKEND": "TRITON"}
CAUSAL = {"mask_mod": causal, "runs": True}
# A call of seven rounds has ten wide products, where a round's of the row or the key alone, and
# those of the head, are shared with others. How many calls a thread makes for its tiles.
CASES = {
    "hopper": ("prefill", 128, CAUSAL, GLUON, 2 * 2),
    "triton": ("prefill", 64, {}, TRITON, 2),
    "backward": ("backward", 128, CAUSAL, TRITON, 4 + 2),
}


def dropping(kind, D, **more):
    wanted = problem(kind, D, **more)
    return replace(wanted, structure=replace(wanted.structure, dropout=True))


def compiled(kind, D, more, options, device=H200):
    wanted = dropping(kind, D, **more)
    with override(mode="off"):
        return compiled_for(wanted, device, parse(options))


@pytest.mark.parametrize("name", CASES)
def test_loops_keep_to_their_registers_and_32_weights_share_a_call(name):
    """LLVM made a call for each weight where it could not tell that two indices are one."""
    *case, calls = CASES[name]
    choice, kernel = compiled(*case)
    taken = resources(kernel, H200)
    assert len(choice.attempts) == 1, choice.attempts
    assert not taken.starved and not taken.serialised, taken
    products = kernel.asm["ptx"].count("mul.wide.u32 x, ")
    assert 8 * calls <= products <= 14 * calls, products


def test_on_other_gpus():
    """Two products of 32 bits stand for a wide one."""
    _, kernel = compiled("prefill", 64, {}, {}, named("amd-mi300x"))
    assert "v_mul_hi_u32" in kernel.asm["amdgcn"]


CALL = {"wide_product", "philox", "kept_bits", "is_above", "still_above"}
# What a tile of pairs of ones becomes, as a kernel without branches.
DROPS = """

@gluon.jit
def kernel(OUT, SEED, row_start, start_n, head, last_dropped):
    ones = gl.zeros([ROWS, BLOCK_N], gl.int32, MMA_S) + 0x10001
    ones = gl.reduce(by_thread(ones), 3, first_of)
    found = drop(ones, row_start, start_n, head, gl.load(SEED), last_dropped)
    pairs: gl.constexpr = gl.SliceLayout(1, found.type.layout)
    eights: gl.constexpr = gl.SliceLayout(2, found.type.layout)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, eights))
    eight = gl.arange(0, BLOCK_N // 8, gl.SliceLayout(0, eights))
    pair = gl.arange(0, 4, gl.SliceLayout(0, pairs))
    place = gl.expand_dims(row, 1) * (BLOCK_N // 2) + gl.expand_dims(eight, 0) * 4
    pair = gl.expand_dims(gl.expand_dims(pair, 0), 1)
    gl.store(OUT + (gl.expand_dims(place, 2) + pair), found)
"""
NEEDED = {*CALL, "kept_of_calls", "signs", "drop",
          "by_thread", "first_of", "ROWS", "WARPS", "BLOCK_N", "MMA_S"}  # fmt: skip
# What the warps that draw leave of a tile: of four a thread asks its neighbour for half of it.
DRAWS = """

@gluon.jit
def kernel(OUT, SEED, row_start, start_n, head, last_dropped):
    found = draw_words(row_start, start_n, head, gl.load(SEED), last_dropped, 0)
    keys: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, found.type.layout))
    place = gl.expand_dims(gl.expand_dims(gl.arange(0, DRAWN_AT_ONCE, keys), 1), 2)
    halves: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, found.type.layout))
    far = gl.expand_dims(gl.expand_dims(gl.arange(0, 2, halves), 0), 2)
    words: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, found.type.layout))
    place = place * 4 + far * 2 + gl.expand_dims(gl.expand_dims(gl.arange(0, 2, words), 0), 1)
    gl.store(OUT + place, found.to(gl.int32, bitcast=True))
"""
DRAWING = {*CALL, "permuted", "draw_words", "BLOCK_N", "DRAWN", "DRAWN_AT_ONCE", "BY_CALL"}
# Of 16 rows and 64 keys of a kernel in Triton whether each weight is kept.
KEEPS = """

@triton.jit
def kernel(OUT, SEED, row_start, start_n, head, last_dropped):
    rows, keys = tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :]
    found = is_kept(row_start, rows, start_n, keys, head, tl.load(SEED), last_dropped)
    tl.store(OUT + rows * 64 + keys, found.to(tl.int32))
"""
KEEPING = {*CALL, "kept_of_calls", "is_kept"}
SEED, HEAD = 2**62 + 12345, 37
SHARES = pytest.mark.parametrize("p", [0.3, 0.8])


def stored(wanted, needed, kernel, starts, num_warps, p, tmp_path, language="gluon"):
    """What a kernel of some of a template's functions stores: words, in order."""
    text = render(wanted.structure, default(wanted, H200, language), H200, "test").text
    parts = []
    for node in ast.parse(text).body:
        assigned = node.targets[0] if isinstance(node, ast.Assign) else node
        name = getattr(assigned, "id", getattr(assigned, "name", ""))
        if name in needed or isinstance(node, (ast.Import, ast.ImportFrom)):
            parts.append(ast.unparse(node))
    file = tmp_path / "drops.py"
    file.write_text("\n\n".join(parts) + kernel)
    spec = importlib.util.spec_from_file_location("drops", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    types = {"OUT": "*i32", "SEED": "*i64", "row_start": "i32", "start_n": "i32", "head": "i32",
             "last_dropped": "i32"}  # fmt: skip
    source = {"gluon": GluonASTSource, "triton": ASTSource}[language](module.kernel, types, {})
    ptx = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}
    )
    given = (0, 0, *starts, HEAD, Dropout.of(p).arguments()["last_dropped"])
    found = run(ptx.asm["ptx"], given, SEED, 32 * num_warps)
    return [found[4 * place] for place in range(len(found))]


def mask(rows, keys, p):
    """The reference's, int64 of the rows and keys."""
    lanes = (torch.tensor([0]), torch.tensor([HEAD]), rows, keys)
    dropout = Dropout.of(p)._replace(seed=torch.tensor([SEED]))
    return kept_weights(dropout, lanes, 64)[0, 0].long()


@pytest.mark.oldest
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@SHARES
def test_hoppers_pairs_are_those_of_the_reference(p, tmp_path):
    """No interpreter runs Gluon: the PTX of its function is run, for a consumer's tile."""
    found = stored(dropping("prefill", 128), NEEDED, DROPS, (192, 384), 4, p, tmp_path)
    wanted = mask(torch.arange(64) + 192, torch.arange(128) + 384, p)
    assert found == (wanted[:, ::2] + (wanted[:, 1::2] << 16)).flatten().tolist()


@pytest.mark.oldest
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@SHARES
@pytest.mark.parametrize(("D", "warps"), [(128, 4), (64, 2)])
def test_what_hoppers_backward_draws_is_the_reference_s(D, warps, p, tmp_path):
    """A word has bits of two keys and of those eight further on, of eight of 32 rows."""
    found = stored(dropping("backward", D), DRAWING, DRAWS, (192, 384), warps, p, tmp_path)
    wanted = mask(torch.arange(64) + 192, torch.arange(128) + 384, p)
    # Rows: 5, 4, 3, 2-1, 0; keys: 6, 5, 4, 3, 2-1, 0.
    bits = wanted.reshape(2, 2, 2, 4, 2, 2, 2, 2, 2, 4, 2)
    bits = bits.permute(0, 5, 9, 3, 6, 7, 10, 1, 4, 2, 8).reshape(-1, 32)
    assert found == (bits << torch.arange(32)).sum(1).tolist()


@pytest.mark.oldest
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@SHARES
@pytest.mark.parametrize("kind", ["prefill", "backward"])
def test_what_triton_s_kernels_keep_is_the_reference_s(kind, p, tmp_path):
    """On NVIDIA's devices they multiply by another instruction than in the interpreter."""
    wanted = dropping(kind, 64)
    found = stored(wanted, KEEPING, KEEPS, (192, 384), 4, p, tmp_path, "triton")
    assert found == mask(torch.arange(16) + 192, torch.arange(64) + 384, p).flatten().tolist()
