"""MLA decode on Hopper: its pipeline in plain Python, then the interpreted kernel that merges."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from flexattn.catalogue import alibi, causal, sliding_window
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.kernels.paged_decode.engines import UNWRITTEN
from tests.emulated_plan import Changing, Emulated, emulate
from tests.odd_mods import checkerboard
from tests.serving import assert_right, batch, plan_for, run, run_behind_prefix

MLA = ServingConfig(64, 128, 4, 1, 1, combine="launch", split_policy="whole")
# Operands swapped, for rows that fill a side of 16.
FEW = replace(MLA, BLOCK_M=16, BLOCK_N=64, num_stages=3)
TWO = replace(FEW, num_stages=2)
WIDER = replace(TWO, BLOCK_M=32)


def named_config(value):
    """A config in a test's name."""
    return f"{value.BLOCK_M}x{value.num_stages}" if isinstance(value, ServingConfig) else None


@pytest.fixture
def programs(monkeypatch):
    """Launches on a Hopper of so many SMs, emulated; their merges are interpreted."""
    return partial(emulate, monkeypatch)


def requests(lengths, heads=16, q_len=1):
    return batch([q_len] * len(lengths), lengths, heads, 1, 576, 512, dtype=torch.bfloat16)


def check(each, page=64, layout="NHD", config=MLA, sinks=None, **mods):
    latent = replace(each, v=[x[..., :512] for x in each.k])
    plan = plan_for(
        latent, page=page, config=config, shared_kv=True, layout=layout,
        sinks=sinks is not None, **mods,
    )  # fmt: skip
    call = {} if sinks is None else {"sinks": sinks}
    got = run(plan, latent, layout=layout, **call)
    assert_right(got, latent, **call, **mods)
    return plan


@pytest.mark.parametrize("config", [MLA, FEW], ids=named_config)
@pytest.mark.parametrize("page", [0, 16, 64, 256])
def test_caches(page, config, programs):
    programs(3)
    check(requests([211, 1, 0, 130]), page=page, config=config)


SEVERAL = [
    (MLA, 8, 1), (MLA, 128, 1), (MLA, 24, 3), (MLA, 33, 2), (FEW, 8, 1), (FEW, 24, 3),
    (WIDER, 32, 1), (WIDER, 33, 2),
]  # fmt: skip


@pytest.mark.parametrize(("config", "heads", "q_len"), SEVERAL, ids=named_config)
def test_rows(config, heads, q_len, programs):
    """Fewer than a tile has, and several tiles, of which the last has few."""
    programs(4)
    check(requests([300, 129, 64], heads, q_len), layout="HND", config=config)


@pytest.mark.parametrize("config", [MLA, FEW], ids=named_config)
def test_requests_that_share_keys_by_a_stride_of_0(config, programs):
    """A descriptor was made with another stride: keys came from behind the cache."""
    programs(3)
    each = requests([64, 64])
    each = replace(each, k=each.k[:1] * 2)
    each = replace(each, v=[x[..., :512] for x in each.k])
    plan = plan_for(each, config=config, shared_kv=True)
    shared = each.k[0][None].expand(2, -1, -1, -1)
    out, lse = plan.run(each.q[:, None], shared, seq_lens=each.numbers([64, 64]))
    assert_right((out[:, 0], lse[:, 0]), each)


@pytest.mark.parametrize("config", [MLA, FEW, TWO], ids=named_config)
@pytest.mark.parametrize("number", [1, 2, 7])
def test_splits(number, config, programs):
    programs(number)
    check(requests([700, 1, 383]), config=config, sinks=torch.randn(16))


@pytest.mark.parametrize(("heads", "config"), [(16, MLA), (128, MLA), (16, FEW)], ids=named_config)
def test_one_request(heads, config, programs):
    """So many parts of few rows are merged by columns."""
    programs(24)
    check(requests([2800], heads), config=config)


@pytest.mark.parametrize("config", [MLA, FEW], ids=named_config)
def test_rising_maxima(config, programs):
    """Each tile's weights scale what came before, by far, and the first keys count for nothing."""
    programs(2)
    each = requests([900])
    rising = [x * torch.linspace(0.1, 9, len(x))[:, None, None] for x in each.k]
    check(replace(each, k=[x.to(torch.bfloat16) for x in rising]), config=config)


@pytest.mark.parametrize("number", [1, 5])
def test_rising_maxima_of_several_work_tiles(number, programs):
    """Of one tile of keys and of several, whole and in parts; one warp's rows do not rise."""
    programs(number)
    each = requests([700, 1, 128, 0, 383], 80)
    rising = [x * torch.linspace(0.1, 9, len(x))[:, None, None] for x in each.k]
    q = each.q * (torch.arange(80) // 16 != 1)[:, None]
    check(replace(each, q=q, k=[x.to(torch.bfloat16) for x in rising]), sinks=torch.randn(80))


@pytest.mark.parametrize(("heads", "config"), [(20, MLA), (4, FEW), (8, WIDER)], ids=named_config)
def test_causal_drafts(heads, config, programs):
    programs(5)
    check(requests([513, 200], heads, 4), config=config, mask_mod=causal)


@pytest.mark.parametrize("config", [MLA, FEW], ids=named_config)
def test_mods(config, programs):
    """A window, whose first page is masked in part, and a bias."""
    programs(3)
    mods = {"mask_mod": sliding_window(150), "score_mod": alibi(16, "cpu")}
    check(requests([450, 31, 290]), config=config, **mods)


@pytest.mark.parametrize(("heads", "config"), [(20, MLA), (4, FEW)], ids=named_config)
def test_a_mask_that_every_tile_evaluates(heads, config, programs):
    """The kernel of 64 rows compared the number of a tile before it was assigned."""
    programs(3)
    check(requests([450, 31, 290], heads, 4), config=config, mask_mod=checkerboard(3))


def test_shares_that_hold_a_request(programs):
    """Of 11 requests of 13 tiles each of 12 programs would have 12, and all but one a part."""
    programs(12)
    plan = check(requests([1600] * 11, 8))
    assert plan._workspace.view(torch.int32).eq(UNWRITTEN).all()


@pytest.mark.parametrize("config", [MLA, FEW], ids=named_config)
def test_keys_behind_a_prefix(config, programs):
    """The second pass of a cascade: positions begin where the prefix ends, pages do not."""
    programs(3)
    each = requests([270, 65])
    each = replace(each, v=[x[..., :512] for x in each.k])
    plan = plan_for(each, page=64, config=config, shared_kv=True, offset=True)
    assert_right(run_behind_prefix(plan, each, [1000, 3]), each)


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize(
    ("number", "heads", "config"), [(2, 16, MLA), (5, 80, MLA), (2, 40, FEW)], ids=named_config
)
def test_lengths_that_change_under_a_launch(number, heads, config, programs, monkeypatch):
    """The loading warp and both warpgroups read them each by itself, and waited for ever."""
    programs(number)
    monkeypatch.setattr(Emulated, "pointers", {"SEQ_LENS": Changing})
    each = requests([700, 1, 383, 129], heads)
    each = replace(each, v=[x[..., :512] for x in each.k])
    plan = plan_for(each, page=64, config=config, shared_kv=True)
    for _ in range(2):
        out = run(plan, each)
    assert out[0].shape == (4, heads, 512)
    monkeypatch.undo()
    programs(number)
    check(each, config=config)


def test_programs_that_merge_have_rows_one_after_another(programs):
    """Four work tiles of 64 rows leave each of 16 programs four turns, of 33 rows fewer."""
    programs(4)
    for heads in (64, 33):
        check(requests([700, 40, 500], heads))
        check(requests([0, 900, 1], heads), mask_mod=sliding_window(300))
