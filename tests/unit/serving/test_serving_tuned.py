"""A plan is served by the record of its batch, which is looked for when the plan is built."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from flexattn.catalogue import sliding_window
from flexattn.device import INTERPRETER
from flexattn.errors import CacheError, InputError
from flexattn.kernels.choose.defaults import default, space
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.kernels.paged_decode.limits import serving_reasons
from flexattn.mods import bind
from flexattn.problem import Shape
from flexattn.records.codec import decode_record, encode_record
from flexattn.records.environment import environment
from flexattn.records.layers import find
from flexattn.records.record import Decision, Gated, Policy, Record, Trial, key_of, sizes_of
from flexattn.records.store import Store
from flexattn.runtime import candidates
from flexattn.serving.kernels import plan_candidates
from flexattn.serving.verified import batch_lengths
from flexattn.settings import current, override
from flexattn.tuning.builds import orders_for
from flexattn.tuning.evaluator import subject_of
from flexattn.tuning.tasks import serving_task
from tests.problems import H200, plan_of, serving_candidates

POLICY = Policy(True, True, 20, 5.0)
ONE, TWO = ServingConfig(16, 64, 4, 3, 1, 2, "last"), ServingConfig(16, 32, 4, 2, 3, 1, "launch")


def task(B=8, q_len=1, kv_len=8192, heads=(32, 8), dims=(128, 128), mask=None, **options):
    shape = Shape(B, *heads, q_len, kv_len, *dims)
    options.setdefault("page", 16)
    return serving_task(
        "a plan", shape, "bfloat16", H200, POLICY, 0.125, None, bind(mask, "mask"), **options
    )


def record(made, config, raced=None, **changes):
    """raced: the static default of its time; None for today's."""
    raced = raced or default(made.problem, H200)
    gate = Gated("out max", 4e-4, 2e-3, 6e-4, True)
    trials = tuple(Trial(each, 90, 0, 4096, gate, (9.0, 9.1, 9.0)) for each in (config, raced))
    return Record(
        key_of(made.problem), replace(environment("serving", H200), **changes), POLICY, "measured",
        tuple(sizes_of(made.problem)), trials, Decision(0, 1, 1.1, 0.01, 1.02, 0.95, "it won"),
    )  # fmt: skip


@pytest.fixture
def store(tmp_path):
    """The one place where records are; what is shipped is not looked at."""
    with override(cache=(), cache_dir=tmp_path):
        yield Store(tmp_path / "records")


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch):
    from flexattn.records import layers

    monkeypatch.setattr(layers, "configs_folder", lambda: None)
    layers._memory.clear()
    yield
    layers._memory.clear()


def found(made, lengths="", device=H200):
    if device.backend == "interpreter" or current().mode == "off":
        return candidates._tuned(made.problem, device, None)
    return find(replace(made.problem, mask_class=lengths), device)


def test_a_record_is_read_as_it_was_written_and_is_of_its_kind_alone():
    made = record(task(), TWO)
    assert decode_record(encode_record(made).encode()) == made
    other = replace(made, key=replace(made.key, kind="decode"))
    with pytest.raises(CacheError, match="ServingConfig"):
        decode_record(encode_record(other).encode())


@pytest.mark.parametrize("B", [1, 64])
def test_each_config_that_is_tuned_can_be_kept(B):
    """Tiles of 8 rows were once raced, won, and refused by the record that should keep them."""
    made = task(B=B)
    offered = space(made.problem, H200)
    assert {each.warp_private for each in offered} == {False, True}
    assert min(each.BLOCK_M for each in offered) == 8
    for config in offered:
        kept = record(made, config)
        assert decode_record(encode_record(kept).encode()) == kept


def test_the_best_record_is_taken(store):
    assert found(task()) is None
    store.write(record(task(kv_len=32768), ONE))
    near = found(task())
    assert near.config == ONE and near.origin.startswith("nearest")
    store.write(record(task(), TWO, template="another"))
    assert found(task()).config == TWO and "hint" in found(task()).origin
    store.write(record(task(), ONE))
    assert found(task()).config == ONE and found(task()).origin.startswith("tuned: 1.10x")
    assert found(task(kv_len=8000)).config == ONE, "sizes are rounded"
    for other in (task(page=64), task(kv_dtype="float8_e4m3fn"), task(sinks=True)):
        assert found(other) is None, "another kernel"
    with override(mode="off"):
        assert found(task()) is None
    assert found(task(), device=INTERPRETER) is None


def test_a_hint_that_raced_a_former_default_is_not_taken(store):
    """MLA of 128 heads ran Triton's config of 470 us where Hopper's kernel took a third."""
    latent = task(B=64, heads=(128, 1), dims=(576, 512), shared_kv=True, page=64)
    triton = ServingConfig(64, 32, 8, 3, 1, 1, "launch")
    made = record(latent, replace(triton, num_stages=2), raced=triton, template="another")
    store.write(made)
    first = next(plan_candidates(latent.problem, H200, None))
    assert first.origin.startswith("static default") and first.config.for_mla
    store.write(record(latent, replace(triton, num_stages=2), template="another"), replace=True)
    assert "hint" in found(latent).origin


def test_a_neighbours_tile_holds_as_many_rows(store):
    """Of 32 rows four tiles of eight each read all keys: 158 us instead of 75 on an H200."""
    tiles = {8: ServingConfig(8, 128, 4, 1, 2, 1, "await", "heads"), 64: replace(ONE, BLOCK_M=64)}
    store.write(record(task(), tiles[8]))
    assert found(task(q_len=2)).config == tiles[8]
    assert found(task(q_len=4)) is None and found(task(q_len=8)) is None
    store.write(record(task(q_len=16), tiles[64]))
    assert found(task(q_len=12)).config == tiles[64]
    assert found(task(q_len=2)).config == tiles[8]


@pytest.mark.parametrize(
    ("q_len", "heads", "height"),
    [(4, (16, 8), 16), (3, (16, 8), 16), (5, (32, 8), 64), (7, (32, 8), 16)],
)
def test_its_own_record_serves_a_problem_whatever_its_tile(store, q_len, heads, height):
    """Sizes as measured were held against rounded ones: of 3, 5 and 7 queries none was found."""
    own, config = task(q_len=q_len, heads=heads), ServingConfig(height, 64, 4, 3, 1, 2, "launch")
    store.write(record(own, config))
    assert found(own).config == config


def test_a_neighbours_tile_may_hold_more_rows_than_there_are(store):
    config = ServingConfig(16, 64, 4, 3, 1, 2)
    store.write(record(task(q_len=2, heads=(16, 8)), config))
    assert found(task(q_len=4, heads=(16, 8))).config == config


def test_the_class_that_is_asked_for_or_the_one_there_is(store):
    store.write(record(task(lengths="ragged"), TWO))
    assert found(task()).config == TWO, "better than nothing"
    assert found(task(), "uniform") is None
    store.write(record(task(), ONE))
    assert found(task()).config == ONE and found(task(), "ragged").config == TWO
    mixed = task(lengths="mixed", q_len=64)
    assert found(mixed) is None
    store.write(record(mixed, TWO))
    assert found(mixed, "mixed").config == TWO
    with pytest.raises(InputError, match="uniform, ragged"):
        plan_of(8, lengths="mixed")


def test_a_config_that_cannot_run_is_passed_over(store):
    store.write(record(task(), ServingConfig(16, 128, 4, 8)))
    assert found(task()) is None
    store.write(record(task(kv_len=16384), TWO))
    assert found(task()).config == TWO


def test_a_plan_takes_the_record_first_and_falls_back_to_the_defaults(store):
    made = task()
    defaults = list(serving_candidates(made.problem, H200))
    chosen = list(plan_candidates(made.problem, H200, None))
    assert [each.config for each in chosen] == defaults
    assert chosen[0].origin.startswith("static default") and not chosen[0].measured
    store.write(record(made, TWO))
    chosen = list(plan_candidates(made.problem, H200, None))
    assert [each.config for each in chosen] == [TWO, *defaults]
    assert chosen[0].origin.startswith("tuned") and chosen[0].measured
    (forced,) = plan_candidates(made.problem, H200, ONE)
    assert (forced.config, forced.origin, forced.measured) == (ONE, "config=", True)


def test_what_changes_the_kernel_changes_the_key():
    keys = [
        key_of(task(**changes).problem).digest()
        for changes in (
            {}, {"page": 0}, {"page": 32}, {"layout": "HND"}, {"kv_dtype": "float8_e5m2"},
            {"sinks": True}, {"lengths": "ragged"}, {"mask": sliding_window(127)}, {"q_len": 4},
            {"B": 9}, {"kv_len": 8193}, {"heads": (64, 8)}, {"lengths": "mixed", "q_len": 16},
        )
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)


@given(st.integers(1, 300), st.integers(1, 200_000))
def test_tuning_and_plans_round_alike(B, kv_len):
    made = task(B=B, kv_len=kv_len)
    assert key_of(made.problem).sizes == sizes_of(made.problem).rounded()
    assert key_of(made.problem) == key_of(
        replace(made.problem, structure=replace(made.problem.structure, lse=True))
    )


@given(st.sampled_from(["uniform", "ragged", "mixed"]), st.integers(1, 70), st.integers(1, 16))
def test_batches_are_of_their_class(lengths, B, q_len):
    q_lens, kv_lens = batch_lengths(lengths, B, q_len, 4096)
    assert len(q_lens) == len(kv_lens) == B and max(kv_lens) == 4096
    assert all(q <= kv for q, kv in zip(q_lens, kv_lens, strict=True))
    assert (len(set(kv_lens)) > 1) == (lengths == "ragged" and B > 1)
    assert (len(set(q_lens)) > 1) == (lengths == "mixed" and B > 1 and q_len > 1)


def test_quick_varies_each_axis_of_the_default():
    made = task()
    every = space(made.problem, H200)
    wide = replace(TWO, BLOCK_M=24)
    found = subject_of(made, environment("serving", H200), "quick", [TWO, wide])
    near, first = found.configs, every[0]
    assert near[0] == first and near[-1] == TWO and len(near) <= 33 and wide not in near
    assert dict(found.rejected)["left out by quick"] == len(every) - 32
    axes = "BLOCK_N", "num_warps", "num_stages", "per_sm", "least", "combine", "warp_private"
    for name in axes:
        assert {getattr(each, name) for each in near} > {getattr(first, name)}, name


def test_a_second_kernel_is_built_where_one_is_launched():
    made = task()
    built = list(orders_for(made.problem, [ONE, TWO], H200))
    assert [each.companion is None for each in built] == [True, False]


def test_records_of_invariant_plans_are_their_own_and_change_no_bit(store):
    """They say how many programs run, and never another tile of keys."""
    plain, invariant = task(), task(batch_invariant=True)
    assert key_of(plain.problem).digest != key_of(invariant.problem).digest
    (fixed,) = serving_candidates(invariant.problem, H200)
    offered = space(invariant.problem, H200)
    assert len(offered) > 1 and {replace(each, per_sm=2) for each in offered} == {fixed}
    store.write(record(plain, default(plain.problem, H200)))
    assert found(invariant) is None
    assert serving_reasons(replace(fixed, BLOCK_N=128), invariant.problem.structure, H200)
    store.write(record(invariant, replace(fixed, per_sm=1)))
    assert found(invariant).config == replace(fixed, per_sm=1)
    assert found(plain).config.split_policy == "heads"
