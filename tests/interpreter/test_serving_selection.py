"""Plans that read the keys that data chose: pages and tokens, from any cache, under any mod."""

import pytest
import torch

from flexattn.catalogue import alibi, causal, sliding_window
from flexattn.errors import ConfigError, InputError, UnsupportedError
from flexattn.kernels.paged_decode.config import ServingConfig
from tests.covering import pairwise
from tests.selections import check_plan, drawn_units, latent_of_eight_bits
from tests.serving import (
    SMALL,
    assert_right,
    batch,
    plan_for,
    poisoned_pages,
    run,
    scale_tensors,
)

LENGTHS = [53, 0, 1, 17, 128, 32]


@pytest.mark.oldest
@pairwise(page=[0, 3, 16, 64], unit=[1, 16, 64, 7], k=[1, 5, 33], layout=["NHD", "HND"])
def test_caches(page, unit, k, layout):
    """Of a unit of one page, of several, of a part of one, and of single tokens."""
    check_plan(batch([1] * 6, LENGTHS, 6, 2), k, unit, page=page, layout=layout, config=SMALL)


@pairwise(per_sm=[1, 7], combine=["last", "launch", "dependent"], masked=[False, True])
def test_pieces_of_any_size_merge(per_sm, combine, masked):
    config = ServingConfig(16, 16, 4, 2, per_sm, 1, combine)
    each = batch([2] * 6, [53, 0, 2, 17, 128, 32], 10, 2)
    check_plan(
        each,
        5,
        16,
        page=16,
        config=config,
        mask_mod=causal if masked else None,
        sinks=torch.randn(10),
    )


def test_mods_are_asked_at_the_positions_of_chosen_keys():
    each = batch([1] * 6, LENGTHS, 6, 2)
    for mask_mod in (None, sliding_window(20), lambda b, h, q, kv: kv % 3 != h % 3):
        check_plan(each, 9, 4, page=4, config=SMALL, score_mod=alibi(6, "cpu"), mask_mod=mask_mod)


def test_rows_of_a_chunk_share_a_choice():
    each = batch([40, 1, 0, 1, 17, 3], [100, 53, 9, 1, 17, 0], 6, 2)
    plan = check_plan(each, 4, 16, page=16, config=SMALL, mask_mod=causal)
    assert plan.prefill_config is None


@pytest.mark.parametrize("eight", [False, True], ids=["", "eight bits"])
def test_chosen_tokens_of_a_latent_cache(eight):
    """DeepSeek's DSA: K's first columns are V, and a token may have a scale."""
    each = batch([1] * 3, [37, 0, 64], 16, 1, 96, 64, dtype=torch.bfloat16)
    for k, v in zip(each.k, each.v, strict=True):
        v.copy_(k[..., :64])
    options = {"page": 16, "config": SMALL, "shared_kv": True}
    if not eight:
        check_plan(each, 21, 1, **options)
        return
    dtype = torch.float8_e4m3fn
    few, wide, steps = latent_of_eight_bits(each, dtype, 16)
    check_plan(
        few, 21, 1, exact=wide, kv_dtype=dtype, scaled="token",
        given=lambda plan: scale_tensors(steps, plan, "token"), **options,
    )  # fmt: skip


def test_a_run_reads_the_choice_of_its_own():
    """What an earlier run listed is gone, also where that chose more."""
    each = batch([1] * 3, [53, 17, 128], 6, 2)
    plan = plan_for(each, page=16, config=SMALL, selection=(8, 16))
    every = torch.arange(8, dtype=torch.int32).expand(3, 2, 8).contiguous()
    assert_right(run(plan, each, selection=every), each)
    one = torch.full_like(every, -1)
    one[..., 5] = 0
    first = lambda b, h, q_idx, kv_idx: kv_idx < 16  # noqa: E731
    assert_right(run(plan, each, selection=one), each, mask_mod=first)


def test_a_choice_in_any_order():
    """Listed as given, the only unit of a short request came behind those of longer ones.

    As many were walked as it may have, and these were past its keys.
    """
    each = batch([1] * 3, [153, 1, 20], 6, 2)
    plan = plan_for(each, page=16, config=SMALL, selection=(9, 8))
    units = torch.tensor([19, 3, -1, 2**31 - 1, 7, 1, 12, 0, -(2**31)], dtype=torch.int32)
    kept = torch.zeros(20, dtype=torch.bool)
    kept[[19, 3, 7, 1, 12, 0]] = True
    got = run(plan, each, selection=units.expand(3, 2, 9).contiguous())
    assert_right(got, each, mask_mod=lambda b, h, q_idx, kv_idx: kept[kv_idx // 8])


def test_who_chooses_nothing_gets_zeros():
    each = batch([1] * 2, [53, 17], 6, 2)
    plan = plan_for(each, page=16, config=SMALL, selection=(3, 16))
    out, lse = run(plan, each, selection=torch.full((2, 2, 3), -1, dtype=torch.int32))
    assert not out.any() and bool((lse == -torch.inf).all())


def test_what_is_refused():
    each = batch([1] * 2, [53, 17], 6, 2)
    units = drawn_units(each, 3, 16)
    with pytest.raises(InputError, match="between 1 and 4096"):
        plan_for(each, page=16, selection=(4097, 1))
    with pytest.raises(ConfigError, match="chosen keys are read by split_policy='even'"):
        heads = ServingConfig(8, 64, 4, 1, 2, 1, "await", "heads")
        plan_for(batch([1], [9], 2, 1, 64, dtype=torch.bfloat16), config=heads, selection=(3, 1))
    with pytest.raises(UnsupportedError, match="a cascade with a selection"):
        plan_for(each, page=16, offset=True, selection=(3, 16))
    cache, table = poisoned_pages(each, 16)
    lengths = each.numbers(each.kv_lens)
    call = {"seq_lens": lengths, "block_table": table}
    plan = plan_for(each, page=16, config=SMALL, selection=(3, 16))
    for given, said in (
        (None, "selection is missing"),
        (units.long(), "keep it as selection.int"),
        (units[..., :2], "contiguous \\[2, 2, 3\\]"),
    ):
        with pytest.raises(InputError, match=said):
            plan.run(each.q[:, None], cache, selection=given, **call)
    with pytest.raises(InputError, match="selection is given"):
        plan_for(each, page=16, config=SMALL).run(each.q[:, None], cache, selection=units, **call)
