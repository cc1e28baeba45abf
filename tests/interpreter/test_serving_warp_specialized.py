"""Decode of many query heads a KV head on Hopper: its pipeline in plain Python, and its merges."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from flexattn.catalogue import alibi, causal, sliding_window
from flexattn.errors import InputError
from flexattn.kernels.paged_decode.config import ServingConfig
from tests.emulated_plan import Changing, Emulated, emulate
from tests.serving import (
    assert_right,
    assert_right_of_shared_keys,
    batch,
    plan_for,
    run,
    run_behind_prefix,
)

# Two warpgroups, and one.
PAIR = ServingConfig(64, 64, 8, 2, 1, combine="launch", split_policy="whole")
ONE = replace(PAIR, num_warps=4, num_stages=3)
DEEP = replace(PAIR, num_stages=6)
CONFIGS = pytest.mark.parametrize("config", [PAIR, ONE, DEEP], ids=["pair", "one", "deep"])


@pytest.fixture
def programs(monkeypatch):
    """Launches on a Hopper of so many SMs, emulated; their merges are interpreted."""
    return partial(emulate, monkeypatch)


def requests(lengths, heads=(48, 1), D=64, q_len=1):
    return batch([q_len] * len(lengths), lengths, *heads, D, dtype=torch.bfloat16)


def check(each, page=64, layout="NHD", config=PAIR, sinks=None, ragged=False, **mods):
    about = {"page": page, "config": config, "layout": layout, "ragged": ragged}
    plan = plan_for(each, sinks=sinks is not None, **about, **mods)
    call = {} if sinks is None else {"sinks": sinks}
    got = run(plan, each, layout=layout, **call)
    assert_right(got, each, **call, **mods)
    return plan


@CONFIGS
@pytest.mark.parametrize("page", [0, 16, 64, 256])
def test_caches(page, config, programs):
    programs(3)
    check(requests([211, 1, 0, 130]), page=page, config=config)


ROWS = [
    (PAIR, 8, 64, 1),
    (PAIR, 71, 64, 1),
    (PAIR, 24, 128, 3),
    (ONE, 33, 256, 2),
    (PAIR, 16, 256, 1),
]


@pytest.mark.parametrize(("config", "heads", "D", "q_len"), ROWS, ids=lambda x: str(x)[:4])
def test_rows(config, heads, D, q_len, programs):
    """Fewer than a tile has, and several tiles, of which the last has few."""
    programs(4)
    if D == 256:
        config = replace(config, num_stages=2)
    check(requests([300, 129, 64], (heads, 1), D, q_len), layout="HND", config=config)


@pytest.mark.parametrize(
    ("heads", "per_sm", "about"),
    [
        ((48, 1), 1, {"sinks": torch.ones(48)}),
        ((71, 1), 2, {}),
        ((40, 2), 2, {"mask_mod": causal, "score_mod": alibi(40, "cpu")}),
    ],
    ids=["one program an SM", "two", "mods"],
)
def test_the_default(heads, per_sm, about, programs):
    """Chosen, built and launched without a config."""
    programs(8)
    plan = check(requests([300, 1, 77, 450], heads, 128), page=16, config=None, **about)
    assert plan.config.warp_specialized and plan.origin.startswith("static default")
    assert plan.config.per_sm == per_sm


def test_several_kv_heads(programs):
    programs(5)
    check(requests([300, 0, 170], (64, 4)), page=16)


@CONFIGS
@pytest.mark.parametrize("number", [1, 2, 7])
def test_splits(number, config, programs):
    programs(number)
    check(requests([700, 1, 383]), config=config, sinks=torch.randn(48))


@CONFIGS
def test_one_request(config, programs):
    """So many parts of few rows are merged by columns."""
    programs(24)
    check(requests([2800]), config=config)


@CONFIGS
def test_rising_maxima(config, programs):
    """Each tile's weights scale what came before, by far, and the first keys count for nothing."""
    programs(2)
    each = requests([900])
    rising = [x * torch.linspace(0.1, 9, len(x))[:, None, None] for x in each.k]
    check(replace(each, k=[x.to(torch.bfloat16) for x in rising]), config=config)


@CONFIGS
def test_causal_drafts(config, programs):
    programs(5)
    check(requests([513, 200], (40, 2), q_len=4), config=config, mask_mod=causal)


@CONFIGS
def test_mods(config, programs):
    """A window, whose first page is masked in part, and a bias."""
    programs(3)
    mods = {"mask_mod": sliding_window(150), "score_mod": alibi(48, "cpu")}
    check(requests([450, 31, 290]), config=config, **mods)


def test_many_short_requests(programs):
    """The loading warp is several work tiles ahead of who multiplies."""
    programs(1)
    check(requests([1, 64, 65, 3, 128, 0, 20, 129, 64, 64, 2, 7, 190, 5, 64, 66]), config=DEEP)


@pytest.mark.parametrize("config", [PAIR, ONE], ids=["pair", "one"])
def test_chunks_of_prefill(config, programs):
    """Chunks of prefill among decoding requests: cu_seqlens_q says which rows are whose."""
    programs(4)
    each = batch([1, 5, 0, 2], [200, 140, 77, 65], 40, 2, 64, dtype=torch.bfloat16)
    check(each, page=16, config=config, ragged=True, mask_mod=causal)


@pytest.mark.parametrize("config", [PAIR, ONE], ids=["pair", "one"])
def test_keys_behind_a_prefix(config, programs):
    """The second pass of a cascade: positions begin where the prefix ends, pages do not."""
    programs(3)
    each = requests([270, 65])
    plan = plan_for(each, page=64, config=config, offset=True)
    assert_right(run_behind_prefix(plan, each, [1000, 3]), each)


@pytest.mark.parametrize("shared", ["K", "V", "KV"])
def test_keys_that_all_requests_share(shared, programs):
    """By a stride of 0, which no descriptor has."""
    programs(3)
    each = requests([211, 130])
    plan = plan_for(each, config=ONE)
    assert_right_of_shared_keys(plan, each, shared)


def test_heads_that_share_values_by_a_stride_of_0(programs):
    programs(3)
    each = requests([64, 64], (64, 4))
    plan = plan_for(each, config=PAIR)
    k, v = (torch.stack(x) for x in (each.k, each.v))
    with pytest.raises(InputError, match="no stride of 0"):
        plan.run(
            each.q[:, None], (k, v[:, :, :1].expand(-1, -1, 4, -1)),
            seq_lens=each.numbers([64, 64]),
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize(("number", "heads", "config"), [(2, 48, PAIR), (5, 80, ONE)])
def test_lengths_that_change_under_a_launch(number, heads, config, programs, monkeypatch):
    """The loading warp alone reads them."""
    programs(number)
    monkeypatch.setattr(Emulated, "pointers", {"SEQ_LENS": Changing})
    each = requests([700, 1, 383, 129], (heads, 1))
    plan = plan_for(each, page=64, config=config)
    for _ in range(2):
        out = run(plan, each)
    assert out[0].shape == (4, heads, 64)
    monkeypatch.undo()
    programs(number)
    check(each, config=config)
