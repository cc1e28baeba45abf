"""Cascades: requests that share a prefix, in two passes and one launch that joins them."""

import math
from dataclasses import replace

import pytest
import torch

import flexattn.serving.cascade as joins
import flexattn.serving.plan as plans
from flexattn.catalogue import alibi, sliding_window
from flexattn.errors import BuildError
from flexattn.serving import CascadePlan, ServingConfig
from flexattn.settings import override
from tests.covering import each_choice, pairwise
from tests.launches import launches_of
from tests.serving import assert_right, batch, poisoned_cache, poisoned_pages, quantized
from tests.trees import Case

OWN = [19, 2, 40]
LAUNCH = ServingConfig(16, 16, 4, 2, combine="launch")
SCALED = [pytest.param(False, id="one scale"), pytest.param(True, id="a scale for each head")]


def case(
    prefix,
    *,
    own=OWN,
    q_len=1,
    heads=(6, 2),
    D=16,
    Dv=None,
    page=4,
    dtype=torch.float32,
    scaled=None,
    sinks=None,
    room=0,
    config=LAUNCH,
    prefix_config=LAUNCH,
    **mods,
):
    """A batch whose requests have `prefix` keys in common; scaled: of a scale for each head."""
    count, (Hq, Hkv) = len(own), heads
    lengths = [prefix + n for n in own]
    each = batch([q_len] * count, lengths, Hq, Hkv, D, Dv, dtype=dtype)
    for b in range(1, count):
        each.k[b][:prefix], each.v[b][:prefix] = each.k[0][:prefix], each.v[0][:prefix]
    more, exact, kv_dtype = {}, each, dtype
    if scaled is not None:
        each, exact, more["k_scale"], more["v_scale"] = quantized(
            each, kv_dtype := torch.float8_e4m3fn, scaled
        )
    split = batch([q_len] * (count + 1), [*own, prefix], Hq, Hkv, D, Dv, dtype=dtype)
    for name in ("k", "v"):
        source = getattr(each, name)
        getattr(split, name)[:] = [*(x[prefix:] for x in source), source[0][:prefix]]
    plan = CascadePlan(
        batch=count, prefix_len=max(1, prefix) + room, own_len=max(1, *own) + room, q_len=q_len,
        heads=heads, head_dim=(D, D if Dv is None else Dv), dtype=dtype, kv_dtype=kv_dtype,
        device="cpu", page_size=page, sinks=sinks is not None, scaled=scaled is not None,
        config=config, prefix_config=prefix_config, **mods,
    )  # fmt: skip
    call = {
        "prefix_len": each.numbers([prefix]),
        "kv_start": each.numbers([prefix] * count),
        "seq_lens": each.numbers(lengths),
        **more,
    }
    if sinks is not None:
        call["sinks"] = sinks
    if page:
        cache, table = poisoned_pages(split, page)
        call |= {"block_table": table[:count], "prefix_table": table[count:]}
    else:
        whole = poisoned_cache(split, max(1, *own, prefix) + room)
        cache = tuple(x[:count] for x in whole)
        call["prefix_cache"] = tuple(x[count:] for x in whole)
    return Case(plan, exact, each.q.unflatten(0, (count, q_len)), cache, call)


@pairwise(
    walk=["program", "dependent", "warp"],
    combine=["launch", "last"],
    prefix=[0, 8, 41],
    page=[0, 4],
)
def test_a_cascade_is_attention_over_prefix_and_own_keys(walk, combine, prefix, page):
    """Mods see positions in the whole request, in both passes."""
    about = {"config": LAUNCH, "D": 16, "dtype": torch.float32}
    if walk == "dependent":
        about["config"] = replace(LAUNCH, combine=walk)
    if walk == "warp":
        config = ServingConfig(8, 32, 2, 1, 2, 1, "await", "heads")
        about = {"config": config, "D": 64, "dtype": torch.float16}
    mods = {"score_mod": alibi(6, "cpu"), "mask_mod": sliding_window(35)}
    sinks = torch.randn(6)
    found = case(
        prefix, q_len=2, page=page, sinks=sinks, room=9,
        prefix_config=ServingConfig(16, 16, 4, 2, combine=combine), **about, **mods,
    )  # fmt: skip
    assert (found.plan._join is None) == (combine == "last")
    assert_right(found.run(), found.each, sinks=sinks, **mods)


# BLOCK_M, per_sm and least decide, with 4 multiprocessors, into how many parts units of a prefix
# of 333 keys are cut.
CUTS = {
    "a few parts": (ServingConfig(16, 16, 4, 2, 2, combine="launch"), {2, 3}),
    "more parts than are asked for at once": (
        ServingConfig(16, 16, 4, 2, 24, combine="launch"),
        {21},
    ),
    "whole units beside cut ones": (ServingConfig(16, 16, 4, 2, 2, 30, "launch"), {1, 2}),
    "whole units alone": (ServingConfig(16, 16, 4, 2, 1, 100, "launch"), {1}),
    "all rows in one tile": (ServingConfig(64, 32, 4, 2, 1, combine="launch"), {2, 3}),
}


def check_cut(prefix, config):
    """Each row's parts are found, and nothing that a run found in its memory counts."""
    found = case(prefix, q_len=3, prefix_config=config)
    first = [x.clone() for x in found.run()]
    assert_right(first, found.each)
    assert all(map(torch.equal, found.run(), first)), "sums are of one order"


@each_choice(name=CUTS, prefix=[0, 1, 16, 17])
def test_a_prefix_of_one_tile_or_two(name, prefix):
    check_cut(prefix, CUTS[name][0])


@pytest.mark.parametrize("name", CUTS)
def test_wherever_the_prefix_is_cut(name):
    config, parts = CUTS[name]
    check_cut(333, config)
    # As paged_decode/pages.jinja has it: 3 requests, positions, heads of a KV head, of 2.
    units, count = 2 * -(-3 * 3 * 3 // config.BLOCK_M), -(-333 // config.BLOCK_N)
    piece = max(-(-units * count // (4 * config.per_sm)), config.least)
    ends = [(u * count // piece, (u * count + count - 1) // piece) for u in range(units)]
    assert {last - first + 1 for first, last in ends} == parts


@pytest.mark.parametrize("own", [[0, 0, 0], [0, 5, 0]])
@pytest.mark.parametrize("combine", ["launch", "last"])
def test_rows_that_see_nothing(combine, own):
    """Of no key on either side 0 and -inf; of none on one side the other's state."""
    for prefix in (0, 37):
        found = case(prefix, own=own, prefix_config=ServingConfig(16, 16, 4, 2, combine=combine))
        out, lse = found.run()
        assert_right((out, lse), found.each)
        if prefix == 0:
            assert (out[0] == 0).all() and (lse[0] == -math.inf).all()


@pairwise(
    least=[pytest.param(1, id="parts"), pytest.param(50, id="whole")], per_head=SCALED,
    combine=["launch", "last"],
)  # fmt: skip
def test_scales_count_once(least, per_head, combine):
    found = case(
        70, dtype=torch.bfloat16, D=32, scaled=per_head,
        prefix_config=ServingConfig(16, 16, 4, 2, 2, least, combine),
    )  # fmt: skip
    assert_right(found.run(), found.each)


@pytest.mark.parametrize("combine", ["launch", "last"])
@pytest.mark.parametrize("per_head", SCALED)
def test_a_prefix_with_scales_of_its_own(per_head, combine):
    """The last launch merged the prefix's parts by the scale of the requests' own values."""
    config = ServingConfig(16, 16, 4, 2, 2, combine=combine)
    about = {"dtype": torch.bfloat16, "D": 32, "scaled": per_head}
    found = case(70, page=0, prefix_config=config, **about)
    scales = found.call["k_scale"] * 0.5, found.call["v_scale"] * 3.0
    for kept, factor in ((found.each.k, 0.5), (found.each.v, 3.0)):
        for x in kept:
            x[:70] *= factor
    found.call["prefix_scales"] = scales
    assert_right(found.run(), found.each)


@each_choice(
    dims=[(24, 40), (64, 192), (16, 260)], dtype=[torch.float32, torch.float16, torch.bfloat16]
)
def test_head_dimensions_that_are_no_powers_of_two(dims, dtype):
    D, Dv = dims
    sinks = torch.randn(6)
    config = ServingConfig(16, 16, 4, 1, combine="launch")
    found = case(50, D=D, Dv=Dv, dtype=dtype, sinks=sinks, config=config, prefix_config=config)
    assert_right(found.run(), found.each, sinks=sinks)


def test_fewer_requests_and_longer_tables_than_before():
    """What shapes decide is found again for each of them."""
    found = case(61, q_len=2, room=30)
    each, call = found.each, found.call
    table = call["prefix_table"]
    wide = torch.nn.functional.pad(table, (0, 5), value=-7)
    for count, now in ((3, table), (2, table), (1, wide), (3, wide), (3, table)):
        few = replace(
            each, q=each.q[: 2 * count], q_lens=each.q_lens[:count], kv_lens=each.kv_lens[:count]
        )
        less = {name: call[name][:count] for name in ("seq_lens", "kv_start", "block_table")}
        given = call | less | {"prefix_table": now}
        assert_right(Case(found.plan, few, found.q[:count], found.cache, given).run(), few)


def test_both_launches_stop_where_the_pages_of_the_prefix_end():
    """A length that its table has no room for is clamped, as without FLEXATTN_CHECK."""
    found, short = case(48), case(48)
    for each in (found, short):
        each.call["prefix_table"] = each.call["prefix_table"][:, :8]
    short.call["prefix_len"] = short.each.numbers([32])
    with override(check=False):
        assert all(map(torch.equal, found.run(), [x.clone() for x in short.run()]))


def test_a_join_that_does_not_build_leaves_the_merge_to_others(monkeypatch, caplog):
    """A plan ended in BuildError where only its last launch could not be compiled."""
    usual = [x.clone() for x in case(48).run()]

    def refused(*args):
        raise BuildError("Triton could not compile the join")

    monkeypatch.setattr(joins, "render_join", refused)
    with override(strict=False):
        found = case(48, prefix_config=None)
    assert found.plan.prefix.config.combine == "last" and "does not build" in caplog.text
    for got, wanted in zip(found.run(), usual, strict=True):
        torch.testing.assert_close(got, wanted)
    with pytest.raises(BuildError):  # the caller's own config
        case(48)


def test_a_run_is_three_launches_and_allocates_nothing(monkeypatch):
    found = case(61, q_len=2, config=ServingConfig(16, 16, 4, 2))
    first = [x.clone() for x in found.run()]
    got, launched = launches_of(
        monkeypatch, lambda: found.plan.run(found.q, found.cache, **found.call),
        (plans, "build"), (joins, "render_join"),
    )  # fmt: skip
    assert len(launched) == 3
    assert all(torch.equal(x.flatten(0, 1), y) for x, y in zip(got, first, strict=True))
