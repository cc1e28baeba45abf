"""varlen_attn on Hopper's forward, which reads cu_seqlens: against the oracle of each sequence."""

import random

import pytest
import torch

import flexattn
from flexattn.catalogue import alibi, softcap
from flexattn.runtime.ragged import PackedLaunch
from flexattn.settings import override
from tests.packs import assert_right, offsets
from tests.support import ON_SM_90

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    ON_SM_90,
]


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """The launches of a test; a call that another engine serves has none."""
    found = []
    plain = PackedLaunch.run

    def run(launch, *given, **more):
        found.append(launch)
        return plain(launch, *given, **more)

    monkeypatch.setattr(PackedLaunch, "run", run)
    # Whoever asks for checks of what mods read gets the engine that has them.
    with override(check=False):
        yield found


def made(q_lens, k_lens=None, heads=(16, 4), dims=(128, 128), dtype=torch.bfloat16, more=0):
    """q, k, v on the GPU and cu_seqlens of both; more: rows behind the last sequence, of NaN."""
    k_lens = q_lens if k_lens is None else k_lens
    draw = torch.Generator("cuda").manual_seed(sum(q_lens))
    shapes = (
        (sum(q_lens) + more, heads[0], dims[0]),
        (sum(k_lens) + more, heads[1], dims[0]),
        (sum(k_lens) + more, heads[1], dims[1]),
    )
    tensors = [torch.randn(x, generator=draw, device="cuda", dtype=dtype) for x in shapes]
    for x, lens in zip(tensors, (q_lens, k_lens, k_lens), strict=True):
        x[sum(lens) :] = torch.nan
    cu = offsets(q_lens).cuda()
    return *tensors, cu, cu if k_lens is q_lens else offsets(k_lens).cuda()


def check(given, launches, **asked):
    """Twice, for the second launch is judged by nobody."""
    mods = {name: each for name, each in asked.items() if "mod" in name or name == "sinks"}
    left, right = asked.get("window", (-1, -1))
    right = 0 if asked.get("causal") else right
    for _ in range(2):
        before = len(launches)
        out, lse = flexattn.varlen_attn(*given, return_lse=True, **asked)
        assert len(launches) > before
        assert_right((out, lse), *given, left=left, right=right, **mods)


LENGTHS = {
    "odd": [700, 1, 130, 0, 17, 64, 333],
    "whole row": [1500],
    "short": [30, 41, 7, 1, 128, 129] * 8,
    "equal": [256] * 6,
}


@pytest.mark.parametrize("asked", ["all", "causal", "window", "band"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(lengths, asked, launches):
    given = made(LENGTHS[lengths])
    options = {
        "all": {}, "causal": {"causal": True}, "window": {"window": (90, 0)},
        "band": {"window": (40, 70)},
    }[asked]  # fmt: skip
    check(given, launches, **options)


@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"window": (90, 0)}], ids=str)
@pytest.mark.parametrize("heads", [(16, 16), (16, 2), (2, 1)], ids=str)
def test_three_consumers_of_long_sequences(heads, asked, launches):
    check(made([1500, 2100, 3, 700], heads=heads, dims=(64, 64), more=40), launches, **asked)
    assert launches[-1].choice.config.consumers == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("Hq", "Hkv", "D", "Dv"),
    [(32, 8, 64, 64), (32, 32, 64, 64), (32, 32, 80, 80), (16, 8, 96, 96), (16, 16, 128, 128),
     (16, 4, 192, 128), (8, 8, 192, 192), (8, 4, 256, 256), (28, 4, 72, 72), (71, 1, 64, 64),
     (12, 4, 128, 64)],
)  # fmt: skip
def test_heads(Hq, Hkv, D, Dv, dtype, launches):
    given = made([300, 45, 1, 170], heads=(Hq, Hkv), dims=(D, Dv), dtype=dtype)
    check(given, launches, causal=True)


@pytest.mark.parametrize(
    "lengths", [([40, 300, 1, 0], [900, 20, 130, 7]), ([64], [4000])], ids=str
)
def test_queries_and_keys_of_other_lengths(lengths, launches):
    given = made(*lengths)
    check(given, launches)
    # Positions of a user's mask count from the first query and the first key.
    check(given, launches, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)


LENS = torch.tensor([100, 260, 31, 900], device="cuda" if torch.cuda.is_available() else "cpu")
MODS = {
    "soft cap": lambda: {"score_mod": softcap(20.0)},
    "alibi": lambda: {"score_mod": alibi(16, "cuda")},
    "by sequence": lambda: {"score_mod": lambda s, b, h, q, k: s + (k - q) / (32 * (h + 1)) + b},
    "prefix": lambda: {"mask_mod": lambda b, h, q, k: (k < LENS.to(k.device)[b]) | (q >= k)},
    "holes": lambda: {"mask_mod": lambda b, h, q, k: (q // 32 + k // 32) % 2 == 0},
}


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("mods", MODS)
def test_mods(mods, sinks, launches):
    asked = MODS[mods]()
    if mods not in ("prefix", "holes"):
        asked["causal"] = True
    if sinks:
        asked["sinks"] = torch.randn(16, device="cuda")
    check(made([700, 130, 17, 333]), launches, **asked)


@pytest.mark.parametrize("asked", [{}, {"causal": True}], ids=["all", "causal"])
def test_nan_behind_the_last_sequence(asked, launches):
    """Its rows are NaN, those of the sequences before it are not."""
    check(made([130, 77, 300], more=90), launches, **asked)


@pytest.mark.parametrize("seed", range(6))
def test_drawn_packs(seed, launches):
    draw = random.Random(seed)
    count = draw.choice((1, 5, 40, 150))
    lengths = [draw.choice((0, 1, 64, draw.randrange(1, 900))) for _ in range(count)]
    heads = draw.choice(((32, 8), (16, 16), (28, 4), (64, 8)))
    width = draw.choice((64, 80, 96, 128, 192, 256))
    asked = draw.choice(({}, {"causal": True}, {"window": (100, 0)}))
    check(made([*lengths, 70], heads=heads, dims=(width, width)), launches, **asked)


def test_one_graph_serves_other_lengths(launches):
    given = made([700, 130, 17, 333])
    cu = given[3]
    flexattn.varlen_attn(*given, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexattn.varlen_attn(*given, causal=True)
    assert len(launches) == 2
    for lengths in ([295] * 4, [1180, 0, 0, 0], [1, 1177, 1, 1], [700, 130, 17, 333]):
        cu.copy_(offsets(lengths))
        graph.replay()
        assert_right((out, None), *given, right=0)


def test_what_another_engine_serves(launches):
    given = made([130, 77])
    flexattn.varlen_attn(*given, causal=True, kernel_options={"BACKEND": "TRITON"})
    flexattn.varlen_attn(*(x.float() for x in given[:3]), *given[3:], causal=True)
    assert not launches
