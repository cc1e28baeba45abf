"""Both languages at dispatch: the switch, what is forced, what explain says, records of both."""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flexattn import create_block_mask
from flexattn.catalogue import alibi, causal
from flexattn.errors import CacheError, ConfigError
from flexattn.kernels.base.config import describe
from flexattn.kernels.choose.defaults import default, space
from flexattn.kernels.choose.options import NONE, Options, for_torch, parse
from flexattn.kernels.choose.registry import family_of, short
from flexattn.kernels.hopper import family as hopper
from flexattn.kernels.hopper.config import CONSUMER_REGISTERS, HopperPrefillConfig
from flexattn.kernels.triton.config import PrefillConfig
from flexattn.problem import Layout
from flexattn.records.codec import decode_record, encode_record
from flexattn.records.record import key_of, sizes_of
from flexattn.report.numbers import config_axes, effects
from flexattn.runtime.launch import Lists, prepare_launch
from flexattn.tuning.search import Axes
from tests.launches import Recorded
from tests.problems import A100, H200, choices, problem
from tests.records import prefill_record

explain = importlib.import_module("flexattn.frontend.explain")
PLAIN = HopperPrefillConfig(2, 128, 2, 240)
STRIDED = Layout(False, True, True, True)
FORCED = parse({"BACKEND": "GLUON"})


def test_one_switch_decides_what_serves_untuned(monkeypatch):
    wanted, other = problem(), problem(D=94)
    for language in ("triton", "gluon"):
        monkeypatch.setattr(hopper, "LEADS", language == "gluon")
        assert default(wanted, H200).language == language
        assert default(other, H200).language == "triton"
        assert default(wanted, A100).language == "triton"
        assert default(problem("decode"), H200).language == "triton"
        offered = [choice.config for choice in choices(wanted, H200, NONE)]
        assert offered[-1].language == "triton", "the last to fall back to serves all"


def test_backends_are_forced():
    wanted = problem()
    for options, language in ((FORCED, "gluon"), (parse({"BACKEND": "TRITON"}), "triton")):
        assert {each.config.language for each in choices(wanted, H200, options)} == {language}
    (found,) = choices(wanted, H200, parse({"BACKEND": "GLUON", "BLOCK_M": 192, "BLOCK_N": 64}))
    assert (found.config.consumers, found.config.consumer_regs) == (3, CONSUMER_REGISTERS[3])
    assert found.how == "forced" and found.source.language == "gluon"
    (found,) = choices(wanted, H200, parse({"BLOCK_M": 64, "num_warps": 4}))
    assert found.config.language == "triton", "numbers alone are those that torch documents"
    with pytest.raises(ConfigError, match="64 rows"):
        list(choices(wanted, H200, parse({"BACKEND": "GLUON", "BLOCK_M": 96})))
    with pytest.raises(ConfigError, match="inner stride 1"):
        list(choices(problem(layout=STRIDED), H200, FORCED))
    assert for_torch({"BACKEND": "GLUON", "num_warps": 4}) == {"num_warps": 4}


def test_a_record_of_the_other_language_is_not_taken(monkeypatch):
    record = SimpleNamespace(config=PLAIN, how="hit", origin="tuned", differing=())
    monkeypatch.setattr("flexattn.runtime.candidates.find", lambda problem, device, first: record)
    assert next(choices(problem(), H200, NONE)).config == PLAIN
    assert next(choices(problem(), H200, FORCED)).config == PLAIN
    triton = next(choices(problem(), H200, parse({"BACKEND": "TRITON"})))
    assert triton.config.language == "triton"


@pytest.mark.parametrize(
    ("about", "options", "how", "words"),
    [
        ({}, FORCED, "default", "forced"),
        ({}, NONE, "default", "static default"),
        ({"layout": STRIDED}, NONE, "default", "inner stride 1"),
        ({"D": 94, "Dv": 94}, NONE, "default", "not one of 64, 96"),
        ({"D": 640, "Dv": 512}, NONE, "default", "cannot run"),
        ({}, Options(BLOCK_M=64), "forced", "without BACKEND"),
        ({}, NONE, "hit", "record"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_explain_says_why_this_language(about, options, how, words):
    wanted = problem(**about)
    for device in (H200, A100):
        choice = SimpleNamespace(
            attempts=(), problem=wanted, device=device, how=how, config=PrefillConfig(64, 64, 4, 2)
        )
        said = explain._why_this_language(choice, options)
        assert (said is None) if device is A100 else (words in said)


def test_records_with_both_languages_are_kept_and_read():
    record = prefill_record(provenance="measured")
    config = replace(
        PLAIN, ping_pong=True, tile_scheduler="static", order="sections", l2_swizzle=16
    )
    trials = [*record.trials]
    trials[3] = replace(trials[3], config=config)
    record = replace(record, trials=tuple(trials), key=key_of(problem()))
    record = replace(record, sizes=tuple(sizes_of(problem())))
    text = encode_record(record)
    assert decode_record(text.encode()) == record
    with pytest.raises(CacheError):
        decode_record(text.replace('"sections"', '"sideways"').encode())
    names = config_axes(record)
    # Of the winner's template: an axis of the others would only say which template it is.
    assert {"BLOCK_N", "num_warps"} <= set(names) and not {"template", "consumers"} & set(names)
    assert {effect.axis for effect in effects(record)} == set(names)


def test_a_search_has_axes_for_both_languages():
    found = space(problem(mask_mod=causal, score_mod=alibi(32, "cpu")), H200)
    points = Axes(found)
    assert len(set(points.points)) == len(found) and "template" in points.choices


def test_its_names():
    config = replace(
        PLAIN, ping_pong=True, tile_scheduler="static", order="sections", l2_swizzle=16
    )
    assert short(config) == "128x128 c2 s2 pingpong static sections16"
    other = replace(
        PLAIN, consumer_regs=232, q_in_regs=64, lazy_rescale=True, pack_gqa=True,
        cross_tile_pipeline=False, ping_pong=True, ping_pong_softmax=True,
    )  # fmt: skip
    words = "64x128 c2 s2 r232 q64 lazy gqa drains pingpong-softmax"
    assert short(other) == words
    assert short(replace(PLAIN, v_parts=2, k_parts=4)) == "128x128 c2 s2 parts2-4"
    assert describe(PLAIN) == "consumers=2 BLOCK_N=128 num_stages=2 consumer_regs=240"
    forced = parse(family_of(PLAIN).options_of(PLAIN))
    assert forced.apply(PLAIN) == PLAIN and forced.language == "gluon"


@pytest.mark.parametrize("tile_scheduler", ["grid", "static", "dynamic"])
@pytest.mark.parametrize(
    ("mask", "runs"),
    [(None, False), (causal, False), (causal, True)],
    ids=["full", "lists", "runs"],
)
def test_a_launch_fills_what_the_kernel_takes(mask, runs, tile_scheduler):
    """Every argument by name: sizes are fixed, tensors and scale are each call's."""
    wanted = problem(mask_mod=mask, group=2, lse=False, runs=runs)
    config = replace(PLAIN, tile_scheduler=tile_scheduler)
    choice = next(choices(wanted, H200, Options(exact=config)))
    kernel = Recorded(choice.source)
    kernels = SimpleNamespace(choose=lambda *args: replace(choice, kernels=(kernel,)))
    q = torch.empty(2, 4096, 16, 128, dtype=torch.bfloat16).transpose(1, 2)
    k = torch.empty(2, 8, 8192, 128, dtype=torch.bfloat16)
    lists = None
    if mask is not None:
        lists = Lists.of(create_block_mask(mask, None, None, 4096, 8192, "cpu"))
        lists = lists._replace(runs=torch.zeros(1, 1, 32, 4, dtype=torch.int32) if runs else None)
    launch = prepare_launch(wanted, H200, torch.device("cpu"), kernels, NONE, q, k, k, lists)
    given, boxes = kernel.fixed, kernel.boxes
    assert (
        kernel.programs == launch.geometry.programs == (1024 if tile_scheduler == "grid" else 132)
    )
    assert (given["num_tiles"], given["num_work_tiles"], given["Hq"], given["group"]) == (
        32,
        1024,
        16,
        2,
    )
    assert all(given[name] is None for name in ("Q", "K", "V", "OUT", "sm_scale"))
    assert ("COUNTER" in given) is launch.counts is (tile_scheduler == "dynamic")
    assert given.get("COUNTER") is None
    assert ("RUNS" in given, "KV_NUM" in given) == (runs, mask is not None and not runs)
    if mask is not None:
        assert given["stride_mask_b"] == given["stride_mask_h"] == 0, "the lists are all heads'"
    shapes = {name: box.shape for name, box in boxes.items()}
    assert shapes == {"Q": q.shape, "K": k.shape, "V": k.shape, "OUT": q.shape}
    assert boxes["Q"].strides == boxes["OUT"].strides == q.stride(), "it lies as the queries do"
    described = [each for each in choice.source.arguments if each.type.startswith("tensordesc<")]
    assert len(described) == len(boxes)
