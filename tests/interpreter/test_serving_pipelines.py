"""Decode that one warp loads for on Hopper: its pipelines in plain Python, then their merges.

MLA's, of latent keys whose first columns are values, and that of many query heads a KV head.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from flexattn.catalogue import alibi, causal, sliding_window
from flexattn.errors import InputError
from flexattn.kernels.paged_decode import engines
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.kernels.paged_decode.engines import UNWRITTEN
from tests import serving
from tests.emulated_plan import Changing, Emulated, emulate
from tests.odd_mods import checkerboard
from tests.selections import check_plan
from tests.serving import (
    MLA,
    assert_right,
    assert_right_of_shared_keys,
    batch,
    plan_for,
    run,
    run_behind_prefix,
)

# Operands swapped, for rows that fill a side of 16.
FEW = replace(MLA, BLOCK_M=16, BLOCK_N=64, num_stages=3)
TWO = replace(FEW, num_stages=2)
WIDER = replace(TWO, BLOCK_M=32)
# Two warpgroups, and one.
PAIR = ServingConfig(64, 64, 8, 2, 1, combine="launch", split_policy="whole")
ONE = replace(PAIR, num_warps=4, num_stages=3)
SHORT = replace(ONE, num_stages=2)
DEEP = replace(PAIR, num_stages=6)
NAMES = {
    MLA: "mla", FEW: "few", TWO: "two", WIDER: "wider", PAIR: "pair", ONE: "one",
    SHORT: "short", DEEP: "deep",
}  # fmt: skip
LATENT = (MLA, FEW, TWO, WIDER)
EACH = (MLA, FEW, PAIR, ONE, DEEP)
configs = partial(pytest.mark.parametrize, ids=lambda x: NAMES.get(x) or str(x))


@pytest.fixture
def programs(monkeypatch):
    """Launches on a Hopper of so many SMs, emulated; their merges are interpreted."""
    return partial(emulate, monkeypatch)


def requests(config, lengths, heads=None, q_len=1, D=64):
    q_lens, dtype = [q_len] * len(lengths), torch.bfloat16
    if config not in LATENT:
        return batch(q_lens, lengths, *heads or (48, 1), D, dtype=dtype)
    each = batch(q_lens, lengths, *heads or (16, 1), 576, 512, dtype=dtype)
    return latent(each)


def latent(each):
    return replace(each, v=[x[..., :512] for x in each.k])


def plan_of(config, each, **more):
    return plan_for(each, config=config, shared_kv=config in LATENT, **more)


def check(config, each, page=64, **more):
    return serving.check(each, page=page, config=config, shared_kv=config in LATENT, **more)


@configs("config", EACH)
@pytest.mark.parametrize("page", [0, 16, 64, 256])
def test_caches(page, config, programs):
    programs(3)
    check(config, requests(config, [211, 1, 0, 130]), page=page)


ROWS = [
    *((MLA, heads, 64, q_len) for heads, q_len in ((8, 1), (128, 1), (24, 3), (33, 2))),
    (FEW, 8, 64, 1), (FEW, 24, 64, 3), (WIDER, 32, 64, 1), (WIDER, 33, 64, 2),
    (PAIR, 8, 64, 1), (PAIR, 71, 64, 1), (PAIR, 24, 128, 3),
    (SHORT, 33, 256, 2), (PAIR, 16, 256, 1),
]  # fmt: skip


@configs(("config", "heads", "D", "q_len"), ROWS)
def test_rows(config, heads, D, q_len, programs):
    """Fewer than a tile has, and several tiles, of which the last has few."""
    programs(4)
    check(config, requests(config, [300, 129, 64], (heads, 1), q_len, D), layout="HND")


@configs("config", [*EACH, TWO])
@pytest.mark.parametrize("number", [1, 2, 7])
def test_splits(number, config, programs):
    programs(number)
    each = requests(config, [700, 1, 383])
    check(config, each, sinks=torch.randn(each.heads[0]))


@configs(("config", "heads"), [(MLA, (128, 1)), *((config, None) for config in EACH)])
def test_one_request(heads, config, programs):
    """So many parts of few rows are merged by columns."""
    programs(24)
    check(config, requests(config, [2800], heads))


def rising(each):
    keys = [x * torch.linspace(0.1, 9, len(x))[:, None, None] for x in each.k]
    return replace(each, k=[x.to(torch.bfloat16) for x in keys])


@configs("config", EACH)
def test_rising_maxima(config, programs):
    """Each tile's weights scale what came before, by far, and the first keys count for nothing."""
    programs(2)
    each = rising(requests(config, [900]))
    check(config, latent(each) if config in LATENT else each)


@pytest.mark.parametrize("number", [1, 5])
def test_rising_maxima_of_several_work_tiles(number, programs):
    """Of one tile of keys and of several, whole and in parts; one warp's rows do not rise."""
    programs(number)
    each = latent(rising(requests(MLA, [700, 1, 128, 0, 383], (80, 1))))
    q = each.q * (torch.arange(80) // 16 != 1)[:, None]
    check(MLA, replace(each, q=q), sinks=torch.randn(80))


@pytest.mark.parametrize("eight", [False, True], ids=["", "eight bits"])
@pytest.mark.parametrize(
    ("page", "unit", "k"), [(64, 1, 150), (3, 1, 33), (0, 7, 40), (16, 16, 5)]
)
@configs(("config", "heads"), [(MLA, 80), (TWO, 16), (WIDER, 33)])
@pytest.mark.parametrize("number", [1, 5])
def test_keys_that_data_chose(number, config, heads, page, unit, k, eight, programs):
    """Four warps gather them; those that are none, and those of no request, are never read."""
    programs(number)
    each = requests(config, [211, 0, 1, 130], (heads, 1))
    options = {"page": page, "config": config, "shared_kv": True}
    if not eight:
        check_plan(each, k, unit, **options)
        return
    dtype, step = torch.float8_e4m3fn, torch.full((1,), 0.75)
    few = replace(each, k=[(x.float() / step).to(dtype) for x in each.k])
    wide = replace(each, k=[x.float() * step for x in few.k])
    check_plan(
        latent(few), k, unit, exact=latent(wide), kv_dtype=dtype, scaled=True,
        given=lambda plan: {"k_scale": step, "v_scale": step}, **options,
    )  # fmt: skip


@configs("config", [MLA, TWO])
def test_single_keys_in_any_order(config, programs, monkeypatch):
    """One place counts of a key that stands twice, in whatever program it is."""
    programs(3)
    monkeypatch.setattr(engines, "SEEN_KEYS", 128)
    each = requests(config, [700, 1, 300, 0])
    plan = plan_of(config, each, page=16, selection=(600, 1))
    given = torch.randint(-3, 720, (4, 1, 600), dtype=torch.int32)
    given[0, 0, ::7] = 5
    given[1] = 0
    given[2] = torch.tensor([299, -1, 2**31 - 1, -(2**31), 7, 7, *[-1] * 594])
    kept = torch.zeros(4, 720, dtype=torch.bool)
    for b, kv_len in enumerate(each.kv_lens):
        found = given[b, 0].long()
        kept[b, found[(found >= 0) & (found < kv_len)]] = True
    got = run(plan, each, selection=given)
    assert_right(got, each, mask_mod=lambda b, h, q_idx, kv_idx: kept[b, kv_idx])


@configs("config", [MLA, TWO])
def test_a_choice_in_any_order(config, programs):
    """Of units of two keys: nothing of it stands twice; then its first one does."""
    programs(3)
    each = requests(config, [153, 1, 90], (8, 1))
    plan = plan_of(config, each, page=16, selection=(9, 2))
    units = torch.tensor([40, -1, 75, 3, 2**31 - 1, 64, 0, 32, -(2**31)], dtype=torch.int32)
    kept = torch.zeros(80, dtype=torch.bool)
    kept[[40, 75, 3, 64, 0, 32]] = True
    for twice in (False, True, False):
        given = units.clone()
        given[1] = units[0 if twice else 1]
        got = run(plan, each, selection=given.expand(3, 1, 9).contiguous())
        assert_right(got, each, mask_mod=lambda b, h, q_idx, kv_idx: kept[kv_idx // 2])


def test_mods_of_chosen_keys(programs):
    """They are asked at the positions of the keys, also of rows that share a choice."""
    programs(3)
    each = requests(MLA, [450, 31, 290], (20, 1), 4)
    check_plan(
        each, 64, 4, page=64, config=MLA, shared_kv=True, mask_mod=sliding_window(150),
        score_mod=alibi(20, "cpu"), sinks=torch.randn(20),
    )  # fmt: skip


DRAFTS = [(MLA, (20, 1)), (FEW, (4, 1)), (WIDER, (8, 1)), *((c, (40, 2)) for c in EACH[2:])]


@configs(("config", "heads"), DRAFTS)
def test_causal_drafts(config, heads, programs):
    programs(5)
    check(config, requests(config, [513, 200], heads, 4), mask_mod=causal)


@configs("config", EACH)
def test_mods(config, programs):
    """A window, whose first page is masked in part, and a bias."""
    programs(3)
    each = requests(config, [450, 31, 290])
    check(config, each, mask_mod=sliding_window(150), score_mod=alibi(each.heads[0], "cpu"))


@configs(("config", "heads"), [(MLA, 20), (FEW, 4)])
def test_a_mask_that_every_tile_evaluates(heads, config, programs):
    """The kernel of 64 rows compared the number of a tile before it was assigned."""
    programs(3)
    each = requests(config, [450, 31, 290], (heads, 1), 4)
    check(config, each, mask_mod=checkerboard(3))


@configs("config", [MLA, FEW, PAIR, ONE])
def test_keys_behind_a_prefix(config, programs):
    """The second pass of a cascade: positions begin where the prefix ends, pages do not."""
    programs(3)
    each = requests(config, [270, 65])
    plan = plan_of(config, each, page=64, offset=True)
    assert_right(run_behind_prefix(plan, each, [1000, 3]), each)


CHANGED = [(2, 16, MLA), (5, 80, MLA), (2, 40, FEW), (2, 48, PAIR), (5, 80, ONE)]


@pytest.mark.filterwarnings("ignore:All-NaN")
@configs(("number", "heads", "config"), CHANGED)
def test_lengths_that_change_under_a_launch(number, heads, config, programs, monkeypatch):
    """MLA's loading warp and both warpgroups read them each by itself, and waited for ever."""
    programs(number)
    monkeypatch.setattr(Emulated, "pointers", {"SEQ_LENS": Changing})
    each = requests(config, [700, 1, 383, 129], (heads, 1))
    plan = plan_of(config, each, page=64)
    for _ in range(2):
        out = run(plan, each)
    assert out[0].shape == (4, heads, each.v[0].shape[-1])
    monkeypatch.undo()
    programs(number)
    check(config, each)


@configs("config", [MLA, FEW])
def test_requests_that_share_keys_by_a_stride_of_0(config, programs):
    """A descriptor was made with another stride: keys came from behind the cache."""
    programs(3)
    each = requests(config, [64, 64])
    each = latent(replace(each, k=each.k[:1] * 2))
    shared = each.k[0][None].expand(2, -1, -1, -1)
    plan = plan_of(config, each)
    out, lse = plan.run(each.q[:, None], shared, seq_lens=each.numbers([64, 64]))
    assert_right((out[:, 0], lse[:, 0]), each)


@pytest.mark.parametrize("shared", ["K", "V", "KV"])
def test_keys_that_all_requests_share(shared, programs):
    """By a stride of 0, which no descriptor has."""
    programs(3)
    each = requests(ONE, [211, 130])
    assert_right_of_shared_keys(plan_of(ONE, each), each, shared)


def test_heads_that_share_values_by_a_stride_of_0(programs):
    programs(3)
    each = requests(PAIR, [64, 64], (64, 4))
    k, v = (torch.stack(x) for x in (each.k, each.v))
    with pytest.raises(InputError, match="no stride of 0"):
        plan_of(PAIR, each).run(
            each.q[:, None], (k, v[:, :, :1].expand(-1, -1, 4, -1)),
            seq_lens=each.numbers([64, 64]),
        )  # fmt: skip


def test_shares_that_hold_a_request(programs):
    """Of 11 requests of 13 tiles each of 12 programs would have 12, and all but one a part."""
    programs(12)
    plan = check(MLA, requests(MLA, [1600] * 11, (8, 1)))
    assert plan._workspace.view(torch.int32).eq(UNWRITTEN).all()


def test_programs_that_merge_have_rows_one_after_another(programs):
    """Four work tiles of 64 rows leave each of 16 programs four turns, of 33 rows fewer."""
    programs(4)
    for heads in (64, 33):
        check(MLA, requests(MLA, [700, 40, 500], (heads, 1)))
        check(MLA, requests(MLA, [0, 900, 1], (heads, 1)), mask_mod=sliding_window(300))


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
    plan = check(None, requests(None, [300, 1, 77, 450], heads, D=128), page=16, **about)
    assert plan.config.warp_specialized and plan.origin.startswith("static default")
    assert plan.config.per_sm == per_sm


def test_several_kv_heads(programs):
    programs(5)
    check(PAIR, requests(PAIR, [300, 0, 170], (64, 4)), page=16)


def test_many_short_requests(programs):
    """The loading warp is several work tiles ahead of who multiplies."""
    programs(1)
    lengths = [1, 64, 65, 3, 128, 0, 20, 129, 64, 64, 2, 7, 190, 5, 64, 66]
    check(DEEP, requests(DEEP, lengths))


@configs("config", [PAIR, ONE])
def test_chunks_of_prefill(config, programs):
    """Chunks of prefill among decoding requests: cu_seqlens_q says which rows are whose."""
    programs(4)
    each = batch([1, 5, 0, 2], [200, 140, 77, 65], 40, 2, 64, dtype=torch.bfloat16)
    check(config, each, page=16, mask_mod=causal)
