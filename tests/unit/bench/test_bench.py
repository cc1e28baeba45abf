"""What needs no GPU in bench: rows and their work, the gate on slices, merging, the table."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from bench import command, results, runner, table
from bench.inputs import attention as attend, check, make
from bench.peers import OURS, PEERS, TEMPLATES, Ready, Refusal, call_of, ours_with, sdpa
from bench.rows import Row, Shape, decode_rows, mods_rows, prefill_rows, shape_rows
from bench.runner import Method, run
from flexattn.errors import InputError
from flexattn.measure.timing import Samples
from flexattn.reference import attention

METHOD = Method(rounds=6, min_ms=0, clock="cpu", device="cpu", dtype=torch.float32)
SMALL = Shape(2, 4, 2, 133, 133, 16)
ROWS = [
    Row("plain", "grid", SMALL),
    Row("causal", "grid", SMALL, "causal"),
    Row("alibi", "mods", SMALL, "causal", "alibi"),
    Row("softcap", "mods", SMALL, "window", "softcap", window=20, cap=5.0),
    Row("relative", "mods", SMALL, "causal", "relative"),
]


def rightly(x):
    """A stand-in for our kernel: the CPU path, whole, without slices."""
    from torch.nn.attention.flex_attention import create_block_mask

    s, mask = x.row.shape, None
    if x.mask_mod is not None:
        mask = create_block_mask(x.mask_mod, None, None, s.q_len, s.kv_len, "cpu")
    out = attention(x.q, x.k, x.v, score_mod=x.score_mod, block_mask=mask).out
    return Ready(out.clone, ())


def wrongly(x):
    out = rightly(x).forward()
    out[-1, -1, -1] *= 1.01
    return Ready(out.clone, ())


def raises(x):
    raise RuntimeError("needs a chip\nof another kind")


@pytest.mark.parametrize(
    "rows",
    [[*prefill_rows(), *shape_rows()], decode_rows(), mods_rows()],
    ids=["prefill", "decode", "mods"],
)
def test_rows_are_unique_and_make_sense(rows):
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        s = row.shape
        assert s.hq % s.hkv == 0 and 0 < row.pairs <= s.q_len * s.kv_len
        assert row.mask != "documents" or sum(row.documents) == s.q_len == s.kv_len
        assert (row.score == "softcap") == (row.cap > 0)
        assert (row.mask == "window") == (row.window > 0)


@pytest.mark.parametrize(
    ("name", "tflop"),
    [
        ("d128-16k-full", 4.398),
        ("d128-16k-causal", 2.199),
        ("d64-4k-full", 1.0995),
        ("d256-4k-causal", 0.5498),
    ],
)
def test_useful_work_of_prefill(name, tflop):
    row = next(row for row in prefill_rows() if row.name == name)
    assert row.flops / 1e12 == pytest.approx(tflop, rel=1e-3)


def test_useful_pairs_are_those_the_mask_keeps():
    for row in (ROWS[3], Row("few keys", "grid", SMALL, "window", window=500)):
        i = torch.arange(SMALL.q_len)
        distance = i[:, None] - i
        assert row.pairs == int(((distance >= 0) & (distance <= row.window)).sum())


def test_decode_reads_keys_and_values_once():
    row = next(row for row in decode_rows() if row.name == "b64-16k")
    assert row.kv_bytes == 64 * 16384 * 8 * 128 * 2 * 2


def test_the_required_rows_are_there():
    names = {row.name for row in prefill_rows()} | {row.name for row in decode_rows()}
    grid = {f"d{d}-{n}k-{m}" for d in (64, 128, 256) for n in (4, 16) for m in ("full", "causal")}
    mods = {f"d128-8k-{m}" for m in ("alibi", "softcap", "relative", "window", "documents")}
    blocks = {f"d128-16k-blocks-{part}" for part in (2, 8)}
    shared = {f"d128-4k-{name}-{m}" for name in ("gqa8", "mqa") for m in ("full", "causal")}
    assert (
        grid | mods | blocks | shared | {"b1-1k", "b1-8k", "b1-128k", "b8-8k", "b64-4k", "b64-16k"}
        <= names
    )


def test_every_row_of_random_blocks_keeps_as_many():
    row = Row("blocks", "mods", Shape(1, 1, 1, 2048, 2048, 16), "blocks", density=1 / 8)
    mask_mod = make(row, "cpu", torch.float32).mask_mod
    i, none = torch.arange(2048), torch.zeros((), dtype=torch.int32)
    kept = mask_mod(none, none, i[:, None], i)
    assert kept.sum() == row.pairs and (kept.sum(1) == 256).all()
    assert len(kept[::128].unique(dim=0)) > 8


def test_peers_that_are_not_here_and_forms_they_lack_are_refused():
    x = make(ROWS[0], "cpu", torch.float32)
    assert isinstance(PEERS["fa4"](x), Refusal)
    one = make(Row("one", "grid", Shape(1, 2, 1, 1, 77, 16)), "cpu", torch.float32)
    assert isinstance(TEMPLATES["flexattn-gluon"](one), Refusal)


def test_a_config_of_the_gluon_template_is_a_variant():
    peers = command._peers(
        "flexattn,flexattn-gluon", ["consumers=2,BLOCK_N=128,num_stages=2"], PEERS, TEMPLATES,
        command.config_variant,
    )  # fmt: skip
    assert list(peers)[:2] == ["flexattn", "flexattn-gluon"] and len(peers) == 3
    with pytest.raises(InputError, match="HopperPrefillConfig"):
        command.config_variant("consumers=2,BLOCK_K=3")


def test_a_profile_has_each_peers_second_call_alone(monkeypatch):
    calls = []

    class Marks:
        cudaProfilerStart = staticmethod(lambda: calls.append("start"))
        cudaProfilerStop = staticmethod(lambda: calls.append("stop"))

    def peer(x):
        return Ready(lambda: calls.append("call"), ())

    monkeypatch.setattr(torch.cuda, "cudart", Marks)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runner.profile(ROWS[:1], {"a": peer, "b": lambda x: Refusal("no")}, METHOD, runner.FORWARD)
    assert calls == ["call", "start", "call", "stop"]


def test_inputs_are_repeatable():
    a, b = (make(ROWS[0], "cpu", torch.float32) for _ in range(2))
    assert torch.equal(a.k, b.k) and a.gqa
    assert not torch.equal(a.k, make(ROWS[1], "cpu", torch.float32).k)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_slices_stand_for_the_whole(row):
    inputs = make(row, "cpu", torch.float32)
    with torch.no_grad():
        assert check(call_of(rightly, inputs)(), inputs) == ""
        assert "max error" in check(call_of(wrongly, inputs)(), inputs)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_weights_of_e4m3_have_a_budget_of_their_own(mask):
    """One rounding of weights is some ten times what bfloat16's is; twice the error is red."""
    row = Row("eight", "fp8", Shape(1, 2, 2, 301, 301, 64), mask, fp8=True)
    x = make(row, "cpu")

    def of(e4m3_weights, times=1.0):
        given = torch.arange(301), None, x.mask_mod
        out = torch.empty(1, 2, 301, 64, dtype=torch.bfloat16)
        for h in range(2):
            at = (*x.wide(0, h), (0, h), *given)
            exact = attend(*at)
            rounded = attend(*at, coarse=x.dtype, e4m3_weights=e4m3_weights)
            out[0, h] = exact + times * (rounded - exact)
        return out

    def gate(out, **options):
        return runner.FORWARD.judge(replace(ours_with(options)(x), forward=lambda *_: out), x)

    eight = {"FP8_WEIGHTS": "e4m3"}
    assert gate(of(True), **eight).passed and gate(of(False)).passed
    assert "rms error" in gate(of(True)).message
    assert "rms error" in gate(of(True, 2.0), **eight).message


def test_documents_and_short_queries_have_slices():
    packed = Row("docs", "mods", Shape(1, 1, 1, 8192, 8192, 16), "documents")
    inputs = make(packed, "cpu", torch.float32)
    assert inputs.mask_mod is not None
    q = torch.tensor([310, 311])
    kept = inputs.mask_mod(q * 0, q * 0, q, q * 0 + 310)
    assert kept.tolist() == [True, False]
    # bfloat16: two float32 matmuls of the CPU differ by more than an ulp on some machines.
    one = make(Row("one", "grid", Shape(3, 6, 2, 1, 77, 16)), "cpu", torch.bfloat16)
    with torch.no_grad():
        assert check(call_of(rightly, one)(), one) == ""


def test_dry_run_gates_races_and_prints(tmp_path):
    peers = {
        OURS: rightly,
        f"{OURS} BLOCK_M=64": wrongly,
        "rival": rightly,
        "absent": raises,
        "picky": lambda x: Refusal("only plain rows") if not x.row.plain else rightly(x),
    }
    seen = []
    report = run("prefill", ROWS[:3], peers, METHOD, lambda r, seconds: seen.append(r))
    assert [len(r.rows) for r in seen] == [1, 2, 3]
    row = report.rows[2]
    assert set(row.samples) == {OURS, "rival"}
    assert row.gates[OURS].passed and not row.gates[f"{OURS} BLOCK_M=64"].passed
    assert row.refused["absent"] == "RuntimeError: needs a chip"
    assert row.refused["picky"] == "only plain rows"
    results.save(report, tmp_path / "deep" / "r.json")
    assert results.load(tmp_path / "deep" / "r.json") == report
    text = table.markdown(report)
    assert "gate red" in text and "geometric mean" in text and "only plain rows (alibi)" in text
    assert 0.2 < table.ratios(report, "rival")["plain"] < 5


def test_a_sample_of_milliseconds_keeps_its_nanoseconds(tmp_path):
    """A call took over a millisecond on a loaded machine, and its seventh digit was not saved."""
    report = results.Report("prefill", {}, ({},), (fake("plain", 1234.567, 999_999.999).rows[0],))
    results.save(report, tmp_path / "r.json")
    assert results.load(tmp_path / "r.json") == report


def test_a_red_row_shows_no_time():
    report = run("prefill", ROWS[:1], {OURS: wrongly, "rival": rightly}, METHOD)
    assert report.rows[0].samples == {}
    line = next(x for x in table.markdown(report).splitlines() if x.startswith("| plain"))
    assert line == "| plain | gate red | - | - |"


def fake(name, ours_us, rival_us, device="A", bench="prefill", **method):
    samples = {OURS: Samples((ours_us,) * 6, calls=1), "rival": Samples((rival_us,) * 6, calls=1)}
    row = results.RowResult(name, "grid", 4e12, 4_000_000, {}, samples, {})
    return results.Report(bench, {"graph": False} | method, ({"device": device},), (row,))


def test_merge_keeps_where_each_row_was_measured():
    parts = [fake("a", 10, 20), fake("b", 10, 5, device="B"), fake("a", 10, 80, rounds=9)]
    merged = results.merge(parts)
    assert [(r.name, r.environment) for r in merged.rows] == [("a", 0), ("b", 1)]
    assert merged.environments == ({"device": "A"}, {"device": "B"})
    assert table.ratios(merged, "rival") == {"a": 8.0, "b": 0.5}
    assert "| 2.000 (0.500) |" in table.markdown(merged)


def test_what_does_not_belong_together_is_not_merged():
    for other in (fake("a", 1, 1, graph=True), fake("a", 1, 1, bench="decode")):
        with pytest.raises(InputError, match="one bench, measured in one way"):
            results.merge([fake("a", 1, 1), other])


def test_rates_of_the_table():
    assert "| 10.0 ±0.0% (400000) |" in table.markdown(fake("a", 10, 20))
    assert "| 10.0 ±0.0% (0.40) |" in table.markdown(fake("a", 10, 20, bench="decode"))


def test_ours_beside_the_best_rival_of_each_row():
    report = fake("a", 10, 12)
    samples = report.rows[0].samples | {"streaming read": Samples((1.0,) * 6)}
    samples |= {"fast": Samples((9.5,) * 6)}
    rows = (replace(report.rows[0], samples=samples), fake("b", 10, 11).rows[0])
    text = table.markdown(replace(report, rows=rows))
    assert "each row: 1.022 (0.950) of 2, 1 below 0.97, 0 below 0.92" in text


def test_another_schema_is_refused(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"schema": 0}))
    with pytest.raises(InputError, match="schema 0"):
        results.load(path)


def test_command_lists_merges_and_refuses(tmp_path, capsys):
    def main(*argv):
        status = command.main("prefill", prefill_rows(), METHOD, argv)
        return status, capsys.readouterr()

    status, text = main("--rows", "mods/", "--list")
    assert status == 0 and text.out.split()[0] == "d128-8k-alibi" and len(text.out.split()) == 7
    for bad in (["--rows", "nothing"], ["--rows", "("], ["--peers", "x"], ["--config", "A"]):
        status, text = main(*bad, "--list")
        assert status == 2 and "rule:" in text.err
    paths = [str(tmp_path / name) for name in ("a.json", "b.json", "all.json")]
    results.save(fake("a", 10, 20), tmp_path / "a.json")
    results.save(fake("b", 10, 20), tmp_path / "b.json")
    status, text = main("--merge", *paths[:2], "--out", paths[2])
    assert status == 0 and "| b |" in text.out
    assert len(results.load(tmp_path / "all.json").rows) == 2


def test_kernel_options_of_a_variant():
    assert command.parse_config("BLOCK_M=128, num_warps=8") == {"BLOCK_M": 128, "num_warps": 8}
    assert command.parse_config("RULES_OFF=row_slope,TANH=exact")["RULES_OFF"] == "row_slope"


def test_sdpa_refuses_mods_and_equals_the_oracle():
    inputs = make(ROWS[1], "cpu", torch.float32)
    assert isinstance(PEERS["sdpa-cudnn"](make(ROWS[2], "cpu", torch.float32)), Refusal)
    call = call_of(sdpa(None), inputs)
    assert check(call(), inputs) == ""
    assert math.isfinite(float(call().sum()))


def test_rows_with_values_of_another_width_and_dtypes_of_their_own():
    rows = {row.name: row for row in shape_rows()}
    deepseek = replace(rows["deepseek-4k"], shape=Shape(1, 2, 2, 8, 8, 192))
    x = make(deepseek, "cpu", torch.bfloat16)
    assert x.v.shape[-1] == 128 and x.q.dtype == torch.bfloat16
    assert deepseek.flops == 2 * 2 * 32 * (192 + 128)
    single = replace(rows["fp32-2k"], shape=Shape(1, 1, 1, 8, 8, 64))
    assert make(single, "cpu", torch.bfloat16).q.dtype == torch.float32
