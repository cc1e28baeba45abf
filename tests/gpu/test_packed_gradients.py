"""varlen_attn's gradients on Hopper's backward, which reads cu_seqlens: against the oracle's."""

import random
from dataclasses import replace

import pytest
import torch

import flexattn
from flexattn import settings
from flexattn.catalogue import alibi, softcap
from flexattn.runtime.backward import BackwardLaunch
from tests.gpu.test_packed import LENGTHS, made
from tests.packs import assert_gradients, offsets
from tests.support import ON_SM_90

pytestmark = [pytest.mark.usefixtures("poisoned"), ON_SM_90]


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """The backwards of packed sequences of a test; what another engine serves has none."""
    found = []
    plain = BackwardLaunch.run

    def run(launch, *given, **more):
        if launch.problem.structure.ragged_kv:
            found.append(launch)
        return plain(launch, *given, **more)

    monkeypatch.setattr(BackwardLaunch, "run", run)
    # Whoever asks for checks of what mods read gets the engine that has them. Autograd runs a
    # graph's backward in a thread of its own, which sees the process's settings.
    unchecked = replace(settings.current(), check=False)
    monkeypatch.setattr(settings, "_from_process", lambda: unchecked)
    return found


def check(given, launches, lse=False, tables=(), **asked):
    """Twice, for the second launch is judged by nobody."""
    q, k, v, cu_q, cu_k = given
    rows = int(cu_q[-1])
    draw = torch.Generator("cuda").manual_seed(1)
    dout = torch.randn(*q.shape[:2], v.shape[2], generator=draw, device="cuda").to(q.dtype)
    dlse = torch.randn(q.shape[1], len(q), generator=draw, device="cuda") if lse else None
    for x in (dout, None if dlse is None else dlse.T):
        if x is not None:
            x[rows:] = torch.nan
    sinks, make = asked.get("sinks"), asked.pop("make", None)
    for _ in range(2):
        before = len(launches or ())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        leaves += [] if sinks is None else [sinks.detach().requires_grad_()]
        more = asked if sinks is None else {**asked, "sinks": leaves[3]}
        if make is not None:
            leaves += [x.detach().requires_grad_() for x in tables]
            more = {**more, "score_mod": make(*leaves[3:])}
        out, sums = flexattn.varlen_attn(*leaves[:3], cu_q, cu_k, return_lse=True, **more)
        # Rows behind the last sequence may be NaN.
        parts = [(out, dout)] if dlse is None else [(out, dout), (sums, dlse)]
        found = torch.autograd.grad([x for x, _ in parts], leaves, [g for _, g in parts])
        assert launches is None or len(launches) > before
        judged = {name: each for name, each in asked.items() if name != "deterministic"}
        assert_gradients(found, *given, grads=(dout, dlse), make=make, tables=tables, **judged)


@pytest.mark.parametrize("asked", ["all", "causal", "window", "band"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(lengths, asked, launches):
    options = {
        "all": {}, "causal": {"causal": True}, "window": {"window": (90, 0)},
        "band": {"window": (40, 70)},
    }[asked]  # fmt: skip
    check(made(LENGTHS[lengths]), launches, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", [{}, {"causal": True}], ids=["all", "causal"])
@pytest.mark.parametrize(
    ("Hq", "Hkv", "D", "Dv"),
    [(8, 2, 64, 64), (4, 4, 64, 64), (4, 4, 80, 80), (8, 4, 96, 96), (4, 4, 128, 128),
     (8, 2, 128, 128), (4, 2, 192, 128), (4, 4, 192, 192), (4, 2, 256, 256), (12, 4, 128, 64)],
)  # fmt: skip
def test_heads(Hq, Hkv, D, Dv, asked, dtype, launches):
    given = made([300, 45, 1, 170], heads=(Hq, Hkv), dims=(D, Dv), dtype=dtype)
    check(given, launches, lse=True, **asked)


@pytest.mark.parametrize(
    "lengths", [([40, 300, 1, 0], [900, 20, 130, 7]), ([64], [4000]), ([700, 3], [64, 0])], ids=str
)
def test_queries_and_keys_of_other_lengths(lengths, launches):
    given = made(*lengths)
    check(given, launches)
    # Positions of a user's mask count from the first query and the first key.
    check(given, launches, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)


MODS = {
    "soft cap": lambda: softcap(20.0),
    "alibi": lambda: alibi(16, "cuda"),
    "by sequence": lambda: lambda s, b, h, q, k: s * (1 + b / 8) + (k - q) / (32 * (h + 1)),
}


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mods", MODS)
def test_mods(mods, D, launches):
    given = made([700, 130, 17, 333], dims=(D, D))
    check(given, launches, causal=True, score_mod=MODS[mods]())


def by_distance(table):
    return lambda s, b, h, q, k: s + table[h, q - k + 700]


def clamped(table):
    return lambda s, b, h, q, k: s + table[h, (q - k).clamp(-50, 60) + 50]


def of_sequences(table):
    return lambda s, b, h, q, k: s * (1 + 0.1 * table[b, k - q + 700])


def slopes(table):
    """Of ALiBi, by heads."""
    return lambda s, b, h, q, k: s + table[h] * (k - q) / 64


def temperatures(table):
    """Of heads and sequences."""
    return lambda s, b, h, q, k: s * (1 + 0.1 * table[b, h])


LEARNED = {
    "slopes": (slopes, (16,)),
    "temperatures": (temperatures, (16, 16)),
    "by distance": (by_distance, (16, 1400)),
    "clamped": (clamped, (16, 111)),
    "of sequences": (of_sequences, (16, 1700)),
}
LEARNED_LENGTHS = [700, 130, 0, 1, 17, 333]


def table_of(name, dtype=torch.float32):
    draw = torch.Generator("cuda").manual_seed(3)
    return torch.randn(LEARNED[name][1], generator=draw, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("asked", [{"causal": True}, {"window": (90, 0)}, {}], ids=str)
@pytest.mark.parametrize("heads", [(16, 4), (4, 4)], ids=str)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("name", ["by distance", "clamped"])
def test_captured_tensors_that_get_a_gradient(name, D, heads, asked, dtype, launches):
    given = made(LEARNED_LENGTHS, heads=heads, dims=(D, D))
    make, tables = LEARNED[name][0], (table_of(name, dtype),)
    check(given, launches, lse=True, make=make, tables=tables, **asked)


@pytest.mark.parametrize("asked", [{"causal": True}, {"window": (90, 0)}], ids=str)
@pytest.mark.parametrize("heads", [(16, 4), (4, 4)], ids=str)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name", ["slopes", "temperatures"])
def test_captured_tensors_of_heads_that_get_a_gradient(name, D, heads, asked, launches):
    given = made(LEARNED_LENGTHS, heads=heads, dims=(D, D))
    make, tables = LEARNED[name][0], (table_of(name),)
    check(given, launches, make=make, tables=tables, **asked)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("lengths", [(LEARNED_LENGTHS, None), ([40, 300, 1], [900, 20, 7])])
def test_a_factor_of_a_sequence_that_gets_a_gradient(lengths, D):
    """Of 128 columns its registers may be too many: then another engine serves."""
    given = made(*lengths, dims=(D, D))
    make, tables = LEARNED["of sequences"][0], (table_of("of sequences"),)
    check(given, None, make=make, tables=tables)


def test_a_table_without_a_gradient(launches):
    table = table_of("by distance", torch.bfloat16)
    check(made(LEARNED_LENGTHS), launches, causal=True, score_mod=by_distance(table))


def test_sinks(launches):
    sinks = torch.randn(16, device="cuda")
    check(made([700, 130, 17, 333]), launches, causal=True, sinks=sinks)


@pytest.mark.parametrize("D", [64, 128, 192])
@pytest.mark.parametrize("asked", [{}, {"causal": True}], ids=["all", "causal"])
def test_nan_behind_the_last_sequence(asked, D, launches):
    check(made([130, 77, 300], dims=(D, D), more=90), launches, **asked)


@pytest.mark.parametrize("D", [64, 192])
@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"window": (90, 0)}], ids=str)
def test_sections_of_heads(asked, D, launches, monkeypatch):
    """A few of sixteen heads start side by side, and short tiles behind those of all heads."""
    monkeypatch.setattr("flexattn.kernels.hopper_backward.config.BLOCKS_AT_ONCE", 20)
    check(made([1100, 130, 17, 0, 333, 5], heads=(16, 16), dims=(D, D)), launches, **asked)


@pytest.mark.parametrize("seed", range(6))
def test_drawn_packs(seed, launches):
    draw = random.Random(seed)
    count = draw.choice((1, 5, 40, 150))
    lengths = [draw.choice((0, 1, 64, draw.randrange(1, 500))) for _ in range(count)]
    heads = draw.choice(((8, 2), (4, 4), (6, 2)))
    width = draw.choice((64, 80, 96, 128, 192, 256))
    asked = draw.choice(({}, {"causal": True}, {"window": (100, 0)}))
    check(made([*lengths, 70], heads=heads, dims=(width, width)), launches, **asked)


def test_one_graph_serves_other_lengths(launches):
    given = made([700, 130, 17, 333])
    q, k, v, cu, _ = given
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(q)

    def step():
        out = flexattn.varlen_attn(*leaves, cu, cu, causal=True)
        return torch.autograd.grad(out, leaves, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    assert len(launches) == 2
    for lengths in ([295] * 4, [1180, 0, 0, 0], [1, 1177, 1, 1], [700, 130, 17, 333]):
        cu.copy_(offsets(lengths))
        graph.replay()
        assert_gradients(found, *given, grads=(dout, None), causal=True)


@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"window": (90, 0)}], ids=str)
@pytest.mark.parametrize("heads", [(16, 4), (4, 4)], ids=str)
@pytest.mark.parametrize("D", [64, 128])
def test_the_same_bits_in_every_run(D, heads, asked, launches):
    given = made([*LENGTHS["odd"], 2100], heads=heads, dims=(D, D))
    check(given, launches, deterministic=True, **asked)
    assert launches[-1].choice.config.deterministic
    q, k, v, cu, _ = given
    dout, found = torch.randn_like(q), []
    for _ in range(20):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flexattn.varlen_attn(*leaves, cu, cu, deterministic=True, **asked)
        found.append(torch.autograd.grad(out, leaves, dout))
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))


COMPILED = {
    "causal": {"causal": True},
    "window": {"window": (90, 0)},
    "other keys": {},
}


@pytest.mark.compiled
@pytest.mark.parametrize("joint", [False, True], ids=["", "one product"])
@pytest.mark.parametrize("asked", COMPILED)
def test_a_compiled_graph_serves_other_lengths(asked, joint, launches):
    """It is compiled once, also where q, k and v are parts of one tensor."""
    from torch._dynamo.testing import CompileCounterWithBackend

    every = LENGTHS["odd"]
    lengths = (every, every[::-1]) if asked == "other keys" else (every,)
    q, k, v, cu_q, cu_k = made(*lengths, heads=(4, 4))
    given = (torch.stack((q, k, v), 1),) if joint else (q, k, v)

    def attend(cu_q, cu_k, *given):
        parts = (given[0] * 1).unbind(1) if joint else given
        return flexattn.varlen_attn(*parts, cu_q, cu_k, **COMPILED[asked])

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    model = torch.compile(attend, fullgraph=True, backend=counter)
    dout = torch.randn_like(q)
    for _ in range(2):
        before = len(launches)
        leaves = [x.detach().requires_grad_() for x in given]
        found = torch.autograd.grad(model(cu_q, cu_k, *leaves), leaves, dout)
        parts = found[0].unbind(1) if joint else found
        assert len(launches) > before
        assert_gradients(parts, q, k, v, cu_q, cu_k, grads=(dout, None), **COMPILED[asked])
        for cu in {cu_q, cu_k}:
            cu.copy_(offsets([1, 300, 700, 0, 100, 44, 100]))
    assert counter.frame_count == 1


def test_what_another_engine_serves(launches):
    """A mask without a band, and what score_mod learns of keys."""
    q, k, v, cu, _ = made([130, 77])
    bias = torch.zeros(16, 200, device="cuda", requires_grad=True)
    for asked in (
        {"mask_mod": lambda b, h, q, k: (q // 32 + k // 32) % 2 == 0},
        {"score_mod": lambda s, b, h, q, k: s + bias[h, k]},
    ):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        flexattn.varlen_attn(*leaves, cu, cu, causal=True, **asked).float().sum().backward()
        assert leaves[0].grad.isfinite().all()
    assert not launches
