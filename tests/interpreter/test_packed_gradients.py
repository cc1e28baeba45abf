"""Gradients of packed sequences: tiles listed, delta and dq interpreted, and the rest emulated."""

import re
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import flexattn
import flexattn.frontend.packed as engine
import flexattn.kernels.hopper_backward.family as family
import flexattn.runtime.backward as backward
import flexattn.runtime.ragged as packed
import tests.interpreter.test_packed_launch as forward
from flexattn.catalogue import causal, sliding_window, softcap
from flexattn.device import detect
from flexattn.kernels.hopper_backward.config import (
    HopperBackwardConfig,
    at_sizes,
    multiplied_columns,
)
from flexattn.mods import bind
from flexattn.runtime.backward import slots_of
from flexattn.runtime.build import Builder, builder
from flexattn.runtime.candidates import Candidate
from flexattn.runtime.outcomes import memory
from flexattn.runtime.ragged import PackedBackward, packed_backward_problem
from flexattn.settings import override
from tests.emulated_gluon import run
from tests.emulated_memory import Descriptor, Pointer
from tests.launches import Recorded
from tests.packs import alone, offsets
from tests.problems import H200

DESCRIBED = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\]")
# Fewer SMs than there are tiles of keys.
TARGET = replace(H200, num_sms=3)


class Emulated(Recorded):
    """Hopper's backward on tensors of the CPU, whose strides are those of its descriptors."""

    compiled = binary = None
    shared_memory = 0

    def __init__(self, source):
        super().__init__(source)
        self.config = self.structure = None

    def prepare(self, *given, **more):
        # A made-up call's launch is another one.
        made = copy(self) if hasattr(self, "bound") else self
        return super(Emulated, made).prepare(*given, **more)

    def launch(self, stream, given):
        super().launch(stream, given)
        told, arrays = self.launched[-1], {}

        def array(x, kind):
            """The memory of a tensor in float32, or of numbers, from its first one on."""
            if kind.endswith("i32"):
                return x.view(torch.int32).view(-1).numpy()
            # Gradients may be parts of one memory.
            memory = x.untyped_storage()
            if memory.data_ptr() not in arrays:
                whole = x.detach().as_strided((memory.nbytes() // x.itemsize,), (1,), 0)
                arrays[memory.data_ptr()] = whole.float().numpy(), whole
            return arrays[memory.data_ptr()][0][x.storage_offset() :]

        values = {}
        for each in self.source.arguments:
            value, described = told[each.name], DESCRIBED.match(each.type)
            if described:
                box, flat = self.boxes[each.name], array(value, each.type)
                strides = [4 * step for step in box.strides]
                view = np.lib.stride_tricks.as_strided(flat, box.shape, strides)
                block = tuple(map(int, described[2].split(",")))
                value = Descriptor(view, block, 4 if described[1] == "fp32" else 2)
            elif isinstance(value, torch.Tensor):
                value = Pointer(array(value, each.type))
            values[each.name] = value
        sums = values["DQ_ACC"]
        if isinstance(sums, Pointer):
            rows, width = self.config.BLOCK_M, multiplied_columns(self.structure.head_dim_qk)
            values["DQ_ACC"] = Pointer(sums.array.reshape(-1, rows, width))
        run(self.source, self.programs, values)
        if isinstance(sums, Pointer):
            sums.array[...] = self.as_threads_hold(values["DQ_ACC"].array).reshape(-1)
        for found, whole in arrays.values():
            whole.copy_(torch.from_numpy(found))

    def as_threads_hold(self, sums):
        """Tiles by rows in the order of DQ_ACC: see after.py.jinja."""
        count, _, width = sums.shape
        if "\nSUMS = " in self.source.text:
            # One warpgroup's columns behind the other's.
            found = sums.reshape(count, 4, 2, 8, width // 8, 4, 2)
            return found.transpose(0, 4, 1, 3, 5, 2, 6)
        groups = (2, 4)  # warps by columns and by rows
        found = sums.reshape(count, groups[1], 2, 8, groups[0], width // groups[0] // 8, 4, 2)
        return found.transpose(0, 5, 4, 1, 3, 6, 2, 7)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    """Kernels are made for a small Hopper, one emulated and the others interpreted."""

    class Builder:
        def kernel(self, source, target, index):
            return builder().kernel(source, target, -1)

    here = detect(torch.device("cpu"))
    for name in ("render_before", "render_after", "render_key_tiles", "render_sum_parts"):
        plain = getattr(family, name)
        monkeypatch.setattr(
            family, name,
            lambda structure, config, _, *more, plain=plain: plain(structure, config, here, *more),
        )  # fmt: skip
    monkeypatch.setattr(backward, "builder", Builder)


def made(q_lens, k_lens, heads=(4, 2), dims=(64, 64), more=0):
    """q, k, v, the gradient of the output, and cu_seqlens; more: rows behind the last, of NaN."""
    torch.manual_seed(0)
    sizes = [(sum(x) + more, h, d) for x, h, d in (
        (q_lens, heads[0], dims[0]), (k_lens, heads[1], dims[0]), (k_lens, heads[1], dims[1]),
        (q_lens, heads[0], dims[1]),
    )]  # fmt: skip
    q, k, v, dout = (torch.randn(x).bfloat16() for x in sizes)
    for x, lens in ((q, q_lens), (k, k_lens), (v, k_lens), (dout, q_lens)):
        x[sum(lens) :] = torch.nan
    return q, k, v, dout, offsets(q_lens), offsets(k_lens)


def gradients(
    config, q, k, v, dout, cu_q, cu_k, score_mod=None, mask_mod=None, dlse=None, make=None,
    tables=(),
):  # fmt: skip
    """dq, dk and dv of a launch, and float64's of each sequence by itself.

    make: a score_mod of the tables, whose gradients are behind them.
    """
    if make is not None:
        score_mod = make(*(x.requires_grad_() for x in tables))
    score, mask = bind(score_mod, "score"), bind(mask_mod, "mask")
    slots = slots_of(score)
    problem = packed_backward_problem(q, k, v, len(cu_q) - 1, score, mask, slots)
    structure = problem.structure
    config = at_sizes(config, problem)
    assert not family.BACKWARD.limits.reasons(config, structure, H200)
    choice = Candidate(problem, TARGET, config, "forced", "test").choice()
    attend = Emulated(choice.source)
    attend.config, attend.structure = config, structure
    chosen = PackedBackward(replace(choice, kernels=(attend,)))
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, *tables)]
    if make is not None:
        score_mod = make(*leaves[3:])
    out, lse = alone(*leaves[:3], cu_q, cu_k, score_mod=score_mod, mask_mod=mask_mod, scale=0.1)
    rows = len(out)
    sums = torch.zeros(1, q.shape[1], len(q))
    sums[0, :, :rows] = lse.detach().float()
    whole = torch.full((len(q), *out.shape[1:]), torch.nan).bfloat16()
    whole[:rows] = out.detach()
    views = [x[None].transpose(1, 2) for x in (q, k, v, whole, dout)]
    launch = chosen.prepare(*views)
    rest = (cu_q, cu_k, *launch.rest_of(None, score, mask))
    inputs, views = tuple(views[:3]), views[3:]
    given = None if dlse is None else torch.cat((dlse, dlse[:, :, rows:]), 2)
    learned = [score.tensors[slot] for slot in slots]
    with pytest.MonkeyPatch.context() as patch:
        # Nothing that is not written passes for a gradient.
        patch.setattr(backward, "like", lambda x: torch.full_like(x, torch.nan))
        found = launch.run(inputs, views[0], sums, (views[1], given), 0.1, rest, learned)
    targets = [(out, dout[:rows].double())]
    if dlse is not None:
        targets.append((lse, dlse[0].double()))
    wanted = torch.autograd.grad([x for x, _ in targets], leaves, [g for _, g in targets])
    ends = (rows, int(cu_k[-1]), int(cu_k[-1]))
    mine = [x[0].transpose(0, 1)[:end] for x, end in zip(found[:3], ends, strict=True)]
    wanted = [*(x[:end] for x, end in zip(wanted, ends, strict=False)), *wanted[3:]]
    captured = {id(x): grad for x, grad in zip(learned, found.captured, strict=True)}
    return [*mine, *(captured[id(x)] for x in tables)], wanted


def check(*given, **asked):
    for mine, wanted in zip(*gradients(*given, **asked), strict=True):
        assert mine.isfinite().all()
        worst = (mine.double() - wanted).abs().max()
        assert worst <= 0.02 * wanted.abs().max() + 1e-3, float(worst)


ENGINE = {"dq_tma": True, "ds_stages": 2, "ds_first": True, "remat": True}
CONFIGS = {
    "persistent": HopperBackwardConfig(64, 128, 2, persistent=True, early_lse="half", **ENGINE),
    "tall": HopperBackwardConfig(128, 128, 2, persistent=True, dp_rs=True, **ENGINE),
    "halves": HopperBackwardConfig(64, 128, 2, dq_halves=True, **ENGINE),
    "by product": HopperBackwardConfig(64, 64, 2, by_product=True, early_lse="all"),
    "split": HopperBackwardConfig(64, 64, 2, remat=True),
    "in order": HopperBackwardConfig(64, 64, 2, dq_tma=True, deterministic=True, remat=True),
}
CONFIGS |= {
    f"{name}, in parts": replace(CONFIGS[name], head_parts=2)
    for name in ("persistent", "by product", "in order")
}
MASKS = {
    "full": {},
    "causal": {"mask_mod": causal},
    "window": {"mask_mod": sliding_window(40)},
    "soft cap": {"score_mod": softcap(2.0), "mask_mod": causal},
    "by position": {"score_mod": lambda s, b, h, q, k: s * (1 + b) - (q - k) / (8 * (h + 1))},
}
LENGTHS = {
    "odd": ([70, 1, 0, 130], [70, 1, 0, 130]),
    "one": ([150], [150]),
    "others": ([40, 100, 1, 0], [150, 20, 65, 7]),
}
CASES = [
    ("persistent", "causal", "odd", (4, 2)),
    ("persistent", "full", "others", (2, 2)),
    ("persistent", "window", "odd", (2, 2)),
    ("tall", "by position", "odd", (2, 2)),
    ("halves", "causal", "one", (2, 2)),
    ("halves", "soft cap", "odd", (4, 2)),
    ("by product", "causal", "odd", (4, 2)),
    ("by product", "by position", "others", (2, 2)),
    ("split", "window", "odd", (2, 1)),
    # The emulator holds each block to its turn.
    ("in order", "window", "odd", (4, 2)),
    ("in order", "full", "others", (2, 2)),
    # Blocks have one query head each, and two.
    ("persistent, in parts", "causal", "odd", (4, 2)),
    ("persistent, in parts", "by position", "others", (4, 1)),
    ("by product, in parts", "causal", "others", (4, 1)),
    ("in order, in parts", "window", "odd", (4, 1)),
]


@pytest.mark.parametrize(("name", "asked", "lengths", "heads"), CASES, ids=str)
def test_gradients(name, asked, lengths, heads):
    """Behind the last sequence all is NaN."""
    given = made(*LENGTHS[lengths], heads=heads, dims=(64, 40), more=30)
    check(CONFIGS[name], *given, **MASKS[asked])


@pytest.mark.parametrize("name", ["persistent", "by product"])
def test_sections_of_heads(name, monkeypatch):
    """Three heads of four start side by side; of the long sequence one tile is short."""
    config = CONFIGS[name]
    tiles = 327 // config.BLOCK_N + 3
    monkeypatch.setattr("flexattn.kernels.hopper_backward.config.BLOCKS_AT_ONCE", 3 * tiles)
    check(config, *made([257, 70], [257, 70], heads=(4, 4)), mask_mod=causal)


def by_distance(table):
    """Of heads; positions count within a sequence."""
    return lambda s, b, h, q, k: s + table[h, q - k + 90]


def clamped(table):
    """A table with an end on both sides, by which scores are multiplied."""
    return lambda s, b, h, q, k: s * (1 + 0.3 * table[h, (q - k).clamp(-9, 7) + 9])


def of_sequences(table, other):
    return lambda s, b, h, q, k: s + table[b, k - q + 160] - 0.3 * other[h, (q - k).abs()]


def slopes(table):
    """Of ALiBi, by heads, and a temperature."""
    return lambda s, b, h, q, k: s * (1 + 0.1 * table[h]) + table[h] * (k - q) / 64


def beside_diagonals(table, other):
    bias = by_distance(table)
    return lambda s, b, h, q, k: bias(s * other[b, h], b, h, q, k)


LEARNED = {
    "slopes": (slopes, [(4,)]),
    "beside diagonals": (beside_diagonals, [(4, 240), (4, 4)]),
    "by distance": (by_distance, [(4, 240)]),
    "clamped": (clamped, [(4, 17)]),
    "of sequences": (of_sequences, [(4, 320), (4, 160)]),
}


@pytest.mark.parametrize(
    ("name", "learned", "asked", "lengths", "heads"),
    [
        ("persistent", "by distance", "causal", "odd", (4, 2)),
        ("persistent", "clamped", "window", "odd", (2, 2)),
        ("persistent", "of sequences", "full", "others", (2, 2)),
        ("halves", "clamped", "full", "odd", (4, 2)),
        ("persistent", "slopes", "causal", "odd", (4, 2)),
        ("tall", "slopes", "window", "one", (2, 2)),
        ("halves", "beside diagonals", "causal", "odd", (2, 2)),
        ("split", "of sequences", "causal", "odd", (2, 1)),
    ],
    ids=str,
)
def test_gradients_of_captured_tensors(name, learned, asked, lengths, heads):
    make, shapes = LEARNED[learned]
    given = made(*LENGTHS[lengths], heads=heads, dims=(64, 40))
    tables = [torch.randn(shape) for shape in shapes]
    check(CONFIGS[name], *given, make=make, tables=tables, **MASKS[asked])


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("persistent", (80, 80)),
        ("tall", (48, 40)),
        ("by product", (160, 160)),
        ("split", (144, 72)),
    ],
    ids=str,
)
def test_sums_as_wide_as_heads(name, dims):
    """dQ's memory has a head's columns, of which products give sixteens."""
    check(CONFIGS[name], *made(*LENGTHS["odd"], dims=dims, more=30), **MASKS["causal"])


def test_a_gradient_of_lse_and_other_lengths_in_one_launch():
    """Of few sequences there are more blocks than tiles of keys."""
    given = made([20], [20], heads=(2, 2))
    dlse = torch.randn(1, 2, 20)
    check(CONFIGS["persistent"], *given, mask_mod=causal, dlse=dlse)


def spread(x):
    """A saved tensor as hooks may give it back: with other strides."""
    if x.dim() != 3:
        return x
    return x.new_zeros(*x.shape[:2], 2 * x.shape[2])[..., : x.shape[2]].copy_(x)


@pytest.mark.parametrize("kind", ["plain", "in order", "learned", "hooks"])
def test_varlen_attn(kind, monkeypatch, tmp_path):
    """The first gradients are judged by the document mask; new lengths take the same launch."""
    launches = []

    class Both(Builder):
        def kernel(self, source, target, index):
            if source.language != "gluon":
                return builder().kernel(source, target, -1)
            backwards = source.entry.startswith("flexattn_hopper_backward")
            launches.append(Emulated(source) if backwards else forward.Emulated(source))
            return launches[-1]

    forward.on_hopper.__wrapped__(monkeypatch)
    monkeypatch.setattr(packed, "builder", Both)
    monkeypatch.setattr(engine, "is_readable", lambda *given: True)
    monkeypatch.setattr(engine, "detect", lambda _: TARGET)
    q, k, v, dout, *_ = made([200], [200])
    in_order, tables = kind == "in order", [torch.randn(4, 240)] * (kind == "learned")
    with override(verify="first", check=False, cache_dir=tmp_path):
        for lengths in ([70, 1, 129], [20, 100, 80]):
            cu = offsets(lengths)
            leaves = [x.clone().requires_grad_() for x in (q, k, v, *tables)]
            asked = {"causal": True, "scale": 0.1, "deterministic": in_order}
            score_mod = by_distance(leaves[3]) if tables else None
            back = spread if kind == "hooks" else lambda x: x
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, back):
                out = flexattn.varlen_attn(*leaves[:3], cu, cu, score_mod=score_mod, **asked)
            found = torch.autograd.grad(out, leaves, dout)
            exact = [x.double().requires_grad_() for x in (q, k, v, *tables)]
            score_mod = by_distance(exact[3]) if tables else None
            wanted, _ = alone(*exact[:3], cu, cu, right=0, scale=0.1, score_mod=score_mod)
            wanted = torch.autograd.grad(wanted, exact, dout.double())
            for mine, right in zip(found, wanted, strict=True):
                worst = (mine.double() - right).abs().max()
                assert worst <= 0.02 * right.abs().max(), float(worst)
    assert ("DQ_SEMAPHORES" in launches[0].names) == in_order
    # What the forward asked for reads tensors that the hooks have changed since.
    used = [each for each in launches if each.launched]
    assert len(used) == 2 and all(len(each.launched) >= 2 for each in used)
    assert all(memory().verified(each.source, TARGET) for each in used)
