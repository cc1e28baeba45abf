"""The tiles of rows of a batch of requests, as the device lists them before attention."""

import random
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate

import pytest
import torch

from flexattn.catalogue import causal, sliding_window
from flexattn.device import detect
from flexattn.kernels.base.arguments import captured_values
from flexattn.kernels.hopper.ragged import ragged_defaults, render_row_tiles
from flexattn.mods import bind
from flexattn.problem.serving import DECODE_QUERIES
from flexattn.runtime.build import builder
from flexattn.serving.kernels import in_phase
from tests.problems import H200, plan_of

GROUP, HEADS, ROWS, KEYS = 4, 2, 32, 128
# Rows of a slice.
SLICE = 64
# Parts that there is memory for.
MOST = 2 * 132 // HEADS + 1
POISON = 10**6


def listed(
    q_lens, kv_lens, phase="prefill", capacity=None, cu=None, sms=132, ragged=True, splits=False,
    mask_mod=None, streaming=0, workers=0, packed=False, behind=0, heads=GROUP, group=GROUP,
):  # fmt: skip
    """(request, first row, part, parts, slot) of each tile in order; which requests are prefills;
    and of each tile that is cut (row, rows left, parts, first slot). Of a group of odd size, in
    slices, the number of the first one for the row, and its head behind the slot."""
    B, max_keys, total = len(q_lens), 2**20, sum(q_lens)
    # What lies behind the last sequence is one more.
    programs = B + packed
    sizes = (1, total) if ragged else (q_lens[0], 0)
    mask = bind(mask_mod, "mask")
    problem = plan_of(
        B, q_len=sizes[0], total_q=sizes[1], keys=max_keys, heads=(HEADS * group, HEADS), mask=mask
    )
    problem = in_phase(problem, phase)
    problem = replace(problem, structure=replace(problem.structure, ragged_kv=packed))
    form, config = problem.structure, next(ragged_defaults(problem, H200))
    sliced, own = group % 2 == 1, 4 + group % 2
    packed_heads = 1 if sliced else heads
    config = replace(config, packed_heads=packed_heads, pack_gqa=sliced, splits=splits)
    rows = SLICE if sliced else ROWS * GROUP // heads
    assert (config.BLOCK_M, config.BLOCK_N) == (rows, KEYS)
    target = detect(torch.device("cpu"))
    source = render_row_tiles(form, config, replace(target, num_sms=132))
    kernel = builder().kernel(source, target, -1)
    tiles = sum(-(-n // ROWS) * (1 + sliced) for n in (*q_lens, behind))
    capacity = tiles + MOST if capacity is None else capacity
    found = torch.full((2 + 5 * capacity + 64,), POISON, dtype=torch.int32)
    cut = torch.full((2 + own * MOST + 64,), POISON, dtype=torch.int32)
    counter = torch.full((1,), POISON, dtype=torch.int32)
    prefills = torch.full((B + 1,), POISON, dtype=torch.int32)
    keys = [*accumulate(kv_lens, initial=0)] if packed else kv_lens
    given = {
        "CU_SEQLENS_K" if packed else "SEQ_LENS": torch.tensor(keys, dtype=torch.int32),
        "ROW_TILES": found, "COUNTER": counter, "CUT_TILES": cut,
    }  # fmt: skip
    fixed = {"num_requests": programs, "capacity": capacity, "num_sms": sms}
    fixed["total_k" if packed else "max_keys"] = sum(kv_lens) + behind if packed else max_keys
    fixed |= {"streaming_sms": streaming} if phase else {}
    fixed |= captured_values(form.mask, mask)
    if ragged:
        ends = cu or [*accumulate(q_lens, initial=0)]
        given["CU_SEQLENS"] = torch.tensor(ends, dtype=torch.int32)
        fixed["total_q"] = total + behind
    else:
        fixed["q_rows"] = q_lens[0]
    if phase:
        given["PREFILLS"] = prefills
    kernel.prepare(programs, fixed, tuple(given), spare=tuple(fixed)).launch(
        -1, tuple(given.values())
    )
    assert counter.item() == 0 and prefills[B] == POISON
    assert found[1] == (workers or sms)
    count, cut_count = found[0].item(), cut[0].item()
    assert (found[2 + 5 * capacity :] == POISON).all()
    assert (cut[2 + own * cut_count :] == POISON).all()
    words = found[2 : 2 + 5 * count].view(-1, 5).tolist()
    cut = [tuple(each) for each in cut[2 : 2 + own * cut_count].view(-1, own).tolist()]
    which = prefills[:B].bool().tolist() if phase else [True] * B
    return [tuple(each) for each in words], which, cut


def prefills_of(q_lens, widths, sms=132):
    """Which requests Hopper's forward serves: those that take the streaming kernel more time, and
    beside them the others, where these have up to 8 tiles of keys for each SM, or half as many
    again as the streaming kernel."""
    slow = [q > DECODE_QUERIES and -(-q // ROWS) <= 1.35 * -(-q * GROUP // 64) for q in q_lens]
    own = [each[:2] for each in zip(q_lens, widths, slow, strict=True) if not each[2]]
    decodes = sum(-(-q // ROWS) * width for q, width in own) * HEADS
    streamed = sum(-(-q * GROUP // 64) * width for q, width in own) * HEADS
    light = any(slow) and sms > 1 and decodes <= max(8 * sms, 1.5 * streamed)
    return [q > 0 and (holds or light) for q, holds in zip(q_lens, slow, strict=True)]


def widths_of(kv_lens):
    """Tiles of keys of each request without a mask."""
    return [max(1, -(-n // KEYS)) for n in kv_lens]


def expected(q_lens, widths, prefills, parts=()):
    """Tiles of whole requests: that of the longest parts first, and of each its last rows."""
    found = [
        (-Fraction(widths[b], parts[b] if parts else 1), b, -first)
        for b, (q, holds) in enumerate(zip(q_lens, prefills, strict=True))
        for first in range(0, q, ROWS)
        if holds
    ]
    return [(b, -first) for _, b, first in sorted(found)]


BATCHES = {
    "one": ([300], [1000]),
    "decodes alone": ([1, 16, 1], [9, 90, 900]),
    "equal": ([256] * 5, [512] * 5),
    "an end in common": ([128, 256], [384, 384]),
    "mixed": ([1, 700, 17, 0, 129, 1], [5000, 700, 17, 40, 3000, 1]),
    "one has far more keys": ([40] * 8, [60000, *[500] * 7]),
    "more rows than keys": ([200, 90], [0, 40]),
    "more tiles than a program ranks at a time": ([64 * ROWS + 70, 300], [9000, 12000]),
}


@pytest.mark.parametrize("batch", BATCHES)
def test_order(batch):
    found, prefills, cut = listed(*BATCHES[batch])
    q_lens, kv_lens = BATCHES[batch]
    assert prefills == prefills_of(q_lens, widths_of(kv_lens))
    assert [each[:2] for each in found] == expected(q_lens, widths_of(kv_lens), prefills)
    assert all(each[2:4] == (0, 1) for each in found) and not cut


PACKS = {
    "odd": ([1, 700, 17, 0, 129, 1], [1, 700, 17, 0, 129, 1]),
    "more keys": ([40, 0, 100], [5000, 70, 400]),
    "more rows": ([400, 90, 33], [70, 0, 200]),
    "many": ([70] * 70, [70] * 70),
}


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("mask_mod", [None, causal])
def test_order_of_packed_sequences(pack, mask_mod):
    """The sequence of the most tiles of keys first, and of each its last rows."""
    q_lens, kv_lens = PACKS[pack]
    found, _, _ = listed(q_lens, kv_lens, phase="", packed=True, mask_mod=mask_mod)
    seen = kv_lens if mask_mod is None else map(min, q_lens, kv_lens)
    assert [each[:2] for each in found] == expected(q_lens, widths_of(seen), [True] * len(q_lens))


@pytest.mark.parametrize("mask_mod", [None, causal])
def test_rows_behind_the_last_sequence_are_one_more(mask_mod):
    found, _, _ = listed([40, 70], [40, 70], phase="", packed=True, mask_mod=mask_mod, behind=37)
    assert sorted(each[:2] for each in found) == [
        *((b, first) for b, n in enumerate((40, 70, 37)) for first in range(0, n, ROWS))
    ]


def test_keys_of_few_packed_rows_are_cut():
    found, _, cut = listed([40, 70], [60000, 90], phase="", packed=True, splits=True)
    parts = {b: parts for b, _, _, parts, _ in found}
    assert parts[0] > 30 and parts[1] == 1
    assert [each[0] for each in cut] == [0, ROWS]


def parts_of(q_lens, widths, sms):
    """Into how many parts each request's tiles of keys are cut."""
    served = prefills_of(q_lens, widths, sms)
    tiles = [-(-q // ROWS) * holds for q, holds in zip(q_lens, served, strict=True)]
    share = sum(t * w for t, w in zip(tiles, widths, strict=True)) * HEADS / sms or 0.001
    return [max(1, int(min(2 * w / share, w // 6, 64))) if w > share + 8 else 1 for w in widths]


def check_parts(q_lens, kv_lens, widths, sms=132, **more):
    found, prefills, cut = listed(q_lens, kv_lens, sms=sms, splits=True, **more)
    parts = parts_of(q_lens, widths, sms)
    whole = expected(q_lens, widths, prefills, parts)
    assert [each[:4] for each in found] == [
        (b, first, part, parts[b]) for b, first in whole for part in range(parts[b])
    ]
    slots = sorted(each[4] for each in found if each[3] > 1)
    assert slots == [*range(len(slots))] and len(slots) <= MOST
    starts = [*accumulate(q_lens, initial=0)]
    firsts = {each[:2]: each[4] for each in found if each[2] == 0}
    assert sorted(cut) == sorted(
        (starts[b] + first, q_lens[b] - first, parts[b], firsts[b, first])
        for b, first in whole
        if parts[b] > 1
    )
    return parts


def test_keys_of_few_tiles_are_cut():
    assert check_parts([105], [6514], [51])[0] == 8
    assert check_parts([105], [1400], [11]) == [1]
    q_lens, kv_lens = BATCHES["one has far more keys"]
    parts = check_parts(q_lens, kv_lens, [-(-n // 128) for n in kv_lens])
    assert parts[0] > 30 and set(parts[1:]) == {1}
    assert check_parts([70 * ROWS], [4000], [32]) == [1]


def test_keys_that_a_window_leaves_are_cut():
    """Of 60,000 keys the rows see 19 tiles."""
    about = {"mask_mod": sliding_window(2000)}
    low = (60000 - 100 - 1999) // 128
    assert check_parts([100], [60000], [469 - low], **about) == [2]


def test_keys_between_the_first_and_a_window_are_no_work():
    """The rows see as many tiles as in a window, and the first one."""

    def near(b, h, q, k):
        return (q >= k) & ((k < 4) | (q - k < 2000))

    low = (60000 - 100 - 1999) // 128
    assert check_parts([100], [60000], [469 - low + 1], mask_mod=near) == [3]
    assert check_parts([100], [1000], [8], mask_mod=near) == [1]


@pytest.mark.parametrize(
    "q_lens,kv_lens,sms,which",
    [
        ([200, 1, 3], [200, 4000, 70], 132, [1, 1, 1]),
        ([200, 1, 1], [200, 60000, 20000], 132, [1, 1, 1]),
        ([1, 3], [4000, 70], 132, [0, 0]),
        ([200, 1], [200, 100], 1, [1, 0]),
        ([200, *[1] * 100], [200, *[500] * 100], 132, [1, *[1] * 100]),
        ([200, *[1] * 100], [200, *[900] * 100], 132, [1, *[1] * 100]),
    ],
    ids=["few", "many keys", "no prefill", "one SM", "many of few keys", "many"],
)
def test_few_decodes_are_served_with_the_prefills(q_lens, kv_lens, sms, which):
    """A kernel of their own began when the prefills left the SMs: 10 to 20 us for one of a row."""
    _, prefills, _ = listed(q_lens, kv_lens, sms=sms, splits=True)
    assert [int(each) for each in prefills] == which


def test_decodes_have_sms_of_their_own():
    """Where they would have a tile of rows for each head."""
    q_lens, kv_lens = [1984, *[1] * 64], [8192, *[4096] * 64]
    streamed = 0.6 * HEADS * 64 * 32
    share = streamed / (streamed + HEADS * GROUP * -(-1984 // (ROWS * GROUP)) * 64)
    few = 132 - int(132 * share)
    listed(q_lens, kv_lens, streaming=90, workers=few, heads=1)
    listed(q_lens, kv_lens, streaming=40, workers=132 - min(40, 132 - few), heads=1)
    listed(q_lens, kv_lens, streaming=10, workers=122, heads=1)
    # Without prefills nobody attends, and light decodes need none.
    listed([1] * 64, [4096] * 64, streaming=57, workers=132 - 57)
    listed([200, 1], [200, 300], streaming=57, workers=132, heads=1)
    listed(q_lens, kv_lens, streaming=57, workers=132)


def test_keys_below_a_number_are_counted():
    """A second one in a process is an argument: the kernel did not have it."""
    first_keys = lambda n: lambda b, h, q, k: k < n  # noqa: E731
    for n in (12000, 20000):
        found, _, _ = listed([100], [60000], mask_mod=first_keys(n), splits=True)
        assert found[0][3] == min(264 // (HEADS * 4), -(-n // KEYS) // 6)


def test_all_are_prefills_where_a_plan_says_so():
    batch = [130] * 3, [700, 0, 130]
    found, _, _ = listed(*batch, phase="", ragged=False)
    assert [each[:2] for each in found] == expected(batch[0], widths_of(batch[1]), [True] * 3)


@pytest.mark.parametrize("group", [5, 7])
def test_slices_of_heads_in_turn(group):
    """Two a tile: the first one's head may be any, and its rows those of 64 before it."""
    q_lens, kv_lens = [700, 1, 100, 0], [60000, 1, 150, 40]
    found, prefills, cut = listed(q_lens, kv_lens, splits=True, group=group)
    assert prefills == [True, True, True, False]  # one decode is served with the prefills
    numbers = {b: range(0, -(-q // SLICE) * group, 2) for b, q in enumerate(q_lens)}
    parts = {each[0]: each[3] for each in sorted(found)}
    assert parts[0] > 1 and parts[1] == parts[2] == 1
    assert sorted(each[:3] for each in found) == [
        (b, first, part) for b in parts for first in numbers[b] for part in range(parts[b])
    ]
    assert [each[1] for each in found if each[0] == 0][:: parts[0]] == [*reversed(numbers[0])]
    slots = {each[1]: each[4] for each in found if each[0] == 0 and each[2] == 0}
    assert sorted(cut) == sorted(
        (s // group * SLICE, 700 - s // group * SLICE, parts[0], slots[s], s % group)
        for s in numbers[0]
    )


@pytest.mark.parametrize("seed", range(4))
def test_drawn_batches(seed):
    draw = random.Random(seed)
    count = draw.choice((3, 64, 65, 130))
    q_lens = [draw.choice((0, 1, 16, 17, draw.randrange(1, 400))) for _ in range(count)]
    kv_lens = [n + draw.choice((0, 0, draw.randrange(20000))) for n in q_lens]
    check_parts(q_lens, kv_lens, widths_of(kv_lens))


def test_more_tiles_than_were_planned_for():
    """Of requests whose rows overlap, against the rules, nothing is written behind the last."""
    found, _, _ = listed([256, 256], [256, 256], capacity=3, cu=[0, 512, 0], sms=1)
    assert len(found) == 3
    found, _, _ = listed([300, 300, 300], [900] * 3, capacity=4, cu=[0, 900, 0, 900], sms=1)
    assert len(found) == 4


def test_an_end_far_below_zero_is_no_row():
    """Its difference to a row wrapped: of 2**31 rows, tiles were stored before the list."""
    found, _, _ = listed([300, 300], [300, 300], cu=[0, 300, -(2**31)], sms=1)
    assert [each[:2] for each in found] == expected([300], [3], [True])
