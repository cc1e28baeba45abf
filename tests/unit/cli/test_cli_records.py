"""The verbs that read records: show, why, merge, export, replay-study, doctor, bench's refusal."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flexattn.cli import doctor
from flexattn.kernels.choose.options import NONE
from flexattn.problem import Shape, make_problem
from flexattn.records import untuned
from flexattn.records.codec import decode_record, encode_record
from flexattn.records.environment import environment
from flexattn.records.record import Failed
from flexattn.records.store import Store
from flexattn.runtime.candidates import candidates_of
from flexattn.runtime.outcomes import Outcome, memory
from flexattn.settings import override
from flexattn.tuning.race import replay_study
from tests import records
from tests.problems import H200, problem

DECODE = ("why", "noop", "--B", "8", "--q-len", "1", "--kv-len", "8192")


def real(record, **changes):
    """As if it had been measured, with the decision that its samples give."""
    record = replace(record, provenance="measured", made="2026-11-21", **changes)
    return replace(record, decision=replay_study(record))


@pytest.fixture
def user(tmp_path):
    store = Store(tmp_path / "cache" / "records")
    here = environment("decode", H200)
    store.write(real(records.decode_record("llama3-8b decode"), environment=here))
    store.write(real(records.prefill_record("llama3-8b prefill")))
    return store


def broken(store):
    path = next(store.paths()).with_name("b2-q2-k2.json")
    path.write_text("{")
    return path


def test_show_lists_filters_and_says_what_is_broken(flexattn, user, monkeypatch):
    monkeypatch.setenv(
        "COLUMNS", "160"
    )  # pytest's workers have 80, of which a title takes two lines
    shown = flexattn("show").stdout
    assert "llama3-8b decode" in shown and "B8 1x8192" in shown and "2 records" in shown
    found = json.loads(flexattn("show", "--json").stdout)
    assert len(found["records"]) == 2 and found["invalid"] == []
    (each,) = json.loads(flexattn("show", "--kind", "decode", "--json").stdout)["records"]
    assert each["title"] == "llama3-8b decode" and each["default"] and each["speedup"] == 1
    assert each["environment"]["triton"] and each["winner"]["BLOCK_N"]
    assert each["layer"] == "user" and each["provenance"] == "measured"
    for option in (("--device", "b200"), ("--model", "qwen")):
        assert json.loads(flexattn("show", *option, "--json").stdout)["records"] == []
    none = flexattn("show", "--device", "b200").stdout
    assert "0 records" in none and "there are records of nvidia-h200" in none
    path = broken(user)
    result = flexattn("show")
    assert f"not a record: {path}" in result.stderr and "2 records" in result.stdout


@pytest.mark.parametrize("option", [("--kind", "both"), ("--model", "["), ("missing",)], ids=str)
def test_show_refuses(flexattn, option):
    assert flexattn("show", *option, status=2).stderr.startswith("error: ")


def test_why_says_hit_nearest_and_default_with_the_fields_that_differ(flexattn, user):
    hit = json.loads(flexattn(*DECODE, "--json").stdout)["problems"][0]
    assert hit["how"] == "hit" and hit["origin"].startswith("tuned: ")
    assert hit["closest"][0]["key"] == hit["closest"][0]["environment"] == []
    near = json.loads(flexattn(*DECODE, "--kv-len", "16000", "--json").stdout)["problems"][0]
    assert near["how"] == "nearest"
    assert near["closest"][0]["key"] == [{"field": "kv_len", "asked": 16384, "stored": 8192}]
    shown = flexattn(*DECODE, "--head-dim", "64").stdout
    assert ": default" in shown and "head_dim_qk is 64, the record's 128" in shown
    assert "looked in user (" in shown


def test_why_shows_mods_as_expressions_and_why_a_record_was_not_taken(flexattn, user):
    """It showed fingerprints, set a prefill's record beside a decode, and never said why not."""
    shown = flexattn(*DECODE).stdout
    assert "\n            taken\n" in shown and "record 'llama3-8b decode'" in shown
    assert "llama3-8b prefill" not in shown
    shown = flexattn("why", "softcap_50", "--kind", "prefill", "--device", "h200").stdout
    assert "score_mod (tanh((score / 50.0)) * 50.0)" in shown
    assert "score_mod is (tanh((score / 50.0)) * 50.0), the record's is none" in shown
    assert "not taken: another problem: " in shown and "score" in shown
    assert not re.search(r"\b[0-9a-f]{24,}\b", shown)
    far = flexattn(*DECODE, "--kv-len", "1048576").stdout
    assert "not taken: its sizes are 7 doublings away, and 4 is the most" in far
    none = flexattn("why", "noop", "--kind", "backward", "--device", "h200").stdout
    assert "closest   none: no record of this kind was made on nvidia-h200" in none
    with override(mode="off"):
        assert "not taken: FLEXATTN_MODE=off takes none" in flexattn(*DECODE).stdout


def test_why_names_the_nearest_in_size_first(flexattn, user):
    """Neighbours stood in the order of their files' names."""
    here = environment("decode", H200)
    for kv_len in (1024, 4096, 65536):
        other = records.key("decode", (8, 1, kv_len))
        record = records.decode_record(f"of {kv_len}", environment=here)
        user.write(real(record, key=other, sizes=(8, 1, kv_len)))
    found = json.loads(flexattn(*DECODE, "--kv-len", "32768", "--json").stdout)["problems"][0]
    assert [each["title"] for each in found["closest"][:2]] == ["of 65536", "llama3-8b decode"]
    assert found["closest"][0]["untaken"] == ""
    assert found["closest"][1]["untaken"] == "the one that serves is nearer in its sizes"


def test_show_keeps_the_speedup_on_80_columns(flexattn, user, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    title = "a-model-with-a-long-name-27b global prefill B128 131072x131072"
    user.write(real(records.prefill_record(title), sizes=(2, 4000, 4000)), replace=True)
    lines = flexattn("show").stdout.splitlines()
    assert max(map(len, lines)) <= 80 or lines.pop(0)  # the first line names the environment
    head = next(line for line in lines if "speedup" in line)
    assert head.split()[:2] == ["speedup", "p"]
    text = "".join(line.strip() for line in lines)
    assert re.search(r"\b1\.\d{3}\b", text) and "…" not in text


def test_why_of_a_preset_and_of_a_hint(flexattn, user):
    (found,) = json.loads(
        flexattn("why", "--preset", "llama3-8b", "--only", " decode B8 8192$", "--json").stdout
    )["problems"][:1]
    assert (found["title"], found["how"]) == ("llama3-8b decode B8 8192", "hit")
    user.write(
        real(
            records.decode_record(),
            environment=replace(environment("decode", H200), triton="3.1.4"),
        ),
        replace=True,
    )
    next(p for p in user.paths() if environment("decode", H200).folder in str(p)).unlink()
    hint = flexattn(*DECODE).stdout
    assert "noop: hint" in hint and "triton is 3." in hint and "the record's 3.1.4" in hint
    explained = flexattn("explain", "causal", "--preset", "sd21", "--device", "h200").stdout
    assert explained.startswith("causal: ") and "\nsd21 " in explained


def test_merge_keeps_the_better_record_and_lists_conflicts(flexattn, user, tmp_path):
    other = Store(tmp_path / "other")
    here = environment("decode", H200)
    record = records.decode_record("llama3-8b decode", seed=5, rounds=30, environment=here)
    flipped = [replace(t, finals=()) for t in record.trials]
    first, rival = record.decision.default, 0 if record.decision.winner else 1
    for index, us in ((first, 100.0), (rival, 50.0)):
        flipped[index] = replace(flipped[index], finals=tuple(us + i / 99 for i in range(30)))
    other.write(real(replace(record, trials=tuple(flipped))))
    out = tmp_path / "all"
    conflict, counts = flexattn("merge", user.root, other.root, "--out", out).stdout.splitlines()
    kept, dropped = conflict.split(" over ")
    assert str(other.root) in kept and str(user.root) in dropped
    assert counts.startswith("3 written") and counts.endswith("1 conflicts")
    assert len(list(Store(out).paths())) == 2
    again = flexattn("merge", other.root, user.root, "--out", out)
    assert "0 written" in again.stdout and "conflict: " in again.stdout
    broken(user)
    assert "refused: " in flexattn("merge", user.root, "--out", out).stderr
    flexattn("merge", tmp_path / "nowhere", status=2)


def test_export_ships_checked_records_and_names_those_that_lack(flexattn, user, tmp_path):
    out, arguments = tmp_path / "out", ("--device", "nvidia-h200")
    told = flexattn("export", out, *arguments)
    assert told.stdout.startswith("2 records written") and told.stderr == ""
    only = ("--preset", "llama3-8b", "--only", "llama3-8b decode B8")
    told = flexattn("export", tmp_path / "one", *only, *arguments).stdout
    assert told.startswith("1 records") and len(list(Store(tmp_path / "one").paths())) == 1
    told = flexattn("export", tmp_path / "two", "--preset", "sd21", *arguments, status=1)
    assert told.stdout.startswith("0 records") and told.stderr.count("no record: ") == 7
    flexattn("export", tmp_path / "three", "--with-binaries", *arguments, status=2)


@pytest.mark.compile
@pytest.mark.slow
def test_export_with_binaries(flexattn, tmp_path):
    arguments = ("--preset", "gpt-oss", "--only", "local decode B8", "--device", "nvidia-h200")
    told = flexattn("export", tmp_path / "out", *arguments, "--with-binaries", status=1)
    assert "no record: gpt-oss local decode B8 8192\n" in told.stderr  # the static default serves
    kernels = re.search(r"(\d+) kernels, 1 for block masks, ", told.stdout)
    assert int(kernels[1]) >= 2 and list((tmp_path / "out").rglob("*.cubin"))
    assert "traced at its first call" not in told.stderr


def test_export_refuses_what_cannot_run(flexattn, user, tmp_path):
    record = next(entry for _, entry in user.entries() if entry.key.kind == "decode")
    trials = list(record.trials)
    winner = record.decision.winner
    trials[winner] = replace(trials[winner], config=replace(record.config, BLOCK_M=1024))
    user.write(replace(record, trials=tuple(trials)), replace=True)
    told = flexattn(
        "export", tmp_path / "out", "--preset", "llama3-8b", "--only", "llama3-8b decode B8",
        "--device", "nvidia-h200", status=1,
    ).stderr  # fmt: skip
    assert "refused: " in told and "no record: llama3-8b decode B8" in told


def test_replay_study_finds_the_same_decision_or_fails(flexattn, user, tmp_path):
    assert flexattn("replay-study", user.root).stdout.count("same: ") == 2
    path = next(user.paths())
    assert "1 of 1 decisions are the same" in flexattn("replay-study", path).stdout
    wrong, record = tmp_path / "wrong.json", decode_record(path.read_bytes())
    other = replace(record.decision, speedup=record.decision.speedup + 0.01)
    wrong.write_text(encode_record(replace(record, decision=other)))
    result = flexattn("replay-study", wrong, status=1)
    assert "DIFFERENT" in result.stdout and "stored: " in result.stdout
    wrong.write_text("{}")
    assert "is no record" in flexattn("replay-study", wrong, status=2).stderr


def test_a_record_with_a_sample_of_0_is_refused_in_words(flexattn, user, tmp_path):
    """replay-study, report and merge ended in ZeroDivisionError, and never said which file."""
    path = sorted(user.paths())[0]
    record = decode_record(path.read_bytes())
    winner = record.decision.winner
    trials = list(record.trials)
    trials[winner] = replace(trials[winner], finals=(0.0, *trials[winner].finals[1:]))
    path.write_text(encode_record(replace(record, trials=tuple(trials))))
    rule = "a time is a finite number above 0"
    for given in (path, user.root):
        said = flexattn("replay-study", given, status=2).stderr
        assert str(path) in said and rule in said
    assert rule in flexattn("report", path, "--out", tmp_path / "page", status=2).stderr
    told = flexattn("report", user.root, "--out", tmp_path / "page")
    assert told.stderr.count("left out: ") == 1 and rule in told.stderr
    assert "index.html: 1 problems" in told.stdout
    merged = flexattn("merge", user.root, "--out", tmp_path / "all")
    assert rule in merged.stderr and len(list(Store(tmp_path / "all").paths())) == 1


def test_doctor_counts_records_and_fails_on_broken_ones(flexattn, user):
    shown = flexattn("doctor").stdout
    assert "user: " in shown and "2 records, 1 of this environment" in shown
    assert "FAULT" not in shown and re.search(r"^triton +\d", shown, re.MULTILINE)
    assert re.search(r"^tool +nvdisasm ", shown, re.MULTILINE)
    assert re.search(r"^would run +decode .*: hit: ", shown, re.MULTILINE)
    assert re.search(r"^would run +prefill .*: (hint|nearest|default): ", shown, re.MULTILINE)
    path = broken(user)
    result = flexattn("doctor", status=1)
    assert f"FAULT       {path}" in result.stdout
    assert result.stdout.splitlines()[0].startswith("verdict     broken: 1 fault, below")


def test_doctor_begins_with_a_verdict(flexattn, user, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    first = flexattn("doctor").stdout.splitlines()[0]
    assert first.startswith("verdict     the installation is sound, and torch sees no GPU: ")
    monkeypatch.setattr(doctor, "_gpus", lambda: ["x, 132 SMs, 141.0 GiB"])
    first = flexattn("doctor", "--device", "h200").stdout.splitlines()[0]
    assert first == (
        "verdict     sound: kernels run on nvidia-h200; 1 tuned records hold exactly here"
    )


def test_why_and_doctor_say_what_was_refused_and_doctor_forgets_it(flexattn, user, tmp_path):
    wanted = make_problem(
        "decode", "bfloat16", Shape(8, 32, 8, 1, 8192, 128, 128), None, None, None
    )
    *_, candidate = candidates_of(wanted, H200, NONE)
    refused = Outcome("check", "seven bits")
    with override(cache_dir=tmp_path / "cache"):
        memory().note(candidate.sources()[0], H200, refused, wanted.describe())
    shown = flexattn(*DECODE).stdout
    assert "refused by a check: seven bits (remembered)" in shown and "not tried" in shown
    (found,) = json.loads(flexattn(*DECODE, "--json").stdout)["problems"]
    assert "seven bits" in found["candidates"][-1]
    shown = flexattn("doctor").stdout
    assert f"{wanted.describe()}: refused by a check: seven bits" in shown
    assert "compiler    Triton " in shown and ", ptxas " in shown
    assert "1 cleared" in flexattn("doctor", "--clear-outcomes").stdout
    assert "seven bits" not in flexattn("doctor").stdout
    assert "seven bits" not in flexattn(*DECODE).stdout


def test_doctor_lists_what_calls_met_without_a_record(flexattn, tmp_path, monkeypatch):
    """Whoever serves is told by this alone, now that a call prints nothing."""
    assert "untuned " not in flexattn("doctor").stdout
    untuned._noted.clear()
    with override(cache_dir=tmp_path / "cache", mode="replay"):
        for kv_len in (700, 701, 5000):
            untuned.note(problem("decode", kv_len=kv_len), H200, "default", None, None)
    shown = flexattn("doctor").stdout
    assert re.findall(r" (kv_len=\d+) D=128 on nvidia-h200: default", shown) == [
        "kv_len=700", "kv_len=5000",
    ]  # fmt: skip
    monkeypatch.setattr(doctor, "_SHOWN", 1)
    shown = flexattn("doctor").stdout
    assert f"2 in {tmp_path / 'cache' / 'untuned.jsonl'}; `flexattn tune --from-untuned`" in shown
    assert "kv_len=700 D=128 on nvidia-h200: default" in shown and "1 more" in shown
    path = tmp_path / "cache" / "untuned.jsonl"
    path.unlink()
    path.mkdir()
    (fault,) = re.findall("^FAULT .*", flexattn("doctor", status=1).stdout, re.MULTILINE)
    assert "untuned.jsonl" in fault


def test_bench_needs_a_gpu(flexattn, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shown = flexattn("bench").stdout
    assert "torch sees no GPU here" in shown and "  llama3-8b prefill B1 8192x8192\n" in shown
    told = json.loads(flexattn("bench", "causal", "--heads", "8:2", "--json").stdout)
    assert told["would_time"] == ["causal"] and {"torch", "SDPA"} <= set(told["beside"])


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        (["--q-len", "8192"], ["noop"]),
        (["--kind", "decode", "--only", "noop"], ["noop"]),
        (["--only", "8b decode B8 8192$"], ["llama3-8b decode B8 8192"]),
        (["--preset", "sd21", "causal", "--only", "causal"], ["causal"]),
    ],
)
def test_bench_times_what_is_asked_for(flexattn, monkeypatch, asked, rows):
    """It took the user's --only and sizes for its own."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    told = json.loads(flexattn("bench", *asked, "--no-torch", "--json").stdout)
    assert told["would_time"] == rows and told["beside"] == ["flexattn", "default"]


@pytest.mark.parametrize("more", [[], ["--preset", "sd21"]])
def test_bench_drops_no_gradients_without_a_word(flexattn, more):
    shown = flexattn("bench", "causal", "--kind", "backward", *more, status=2).stderr
    assert "only plans, or only gradients" in shown and "bench.backward" in shown


def test_a_mod_has_one_grammar_in_every_verb(flexattn, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def near(b, h, q_idx, kv_idx):\n    return q_idx - kv_idx < 9\n")
    layer = 'heads = 8\nhead_dim = 64\nscore = { mod = "softcap", args = [30.0] }\n'
    call = '[[layers.calls]]\nq_len = 128\nmask = "./mine.py:near"\n'
    Path("w.toml").write_text(f"[[layers]]\n{layer}{call}")
    sizes = ("--q-len", "128", "--heads", "8:2", "--device", "h200")
    for mod in ("causal", "flexattn.catalogue:causal", "./mine.py:near"):
        assert flexattn("why", mod, *sizes).stdout.startswith(f"{mod}: ")
        tuned = flexattn("tune", mod, *sizes, "--effort", "quick", "--dry-run", "--json").stdout
        (problem,) = json.loads(tuned)["problems"]
        assert problem["title"] == mod and problem["key"]["Hkv"] == 2
    trusted = ("w.toml", "--allow-module", "./mine.py", "--device", "h200")
    assert "q_idx - kv_idx" in flexattn("why", *trusted).stdout
    assert "--allow-module ./mine.py" in flexattn("why", "w.toml", status=2).stderr


def test_bench_times_other_libraries_where_they_can_be_imported(monkeypatch):
    """Stand-ins, which compute by SDPA, for libraries that need a GPU."""
    from flexattn.cli import bench

    def flash(q, k, v, causal, softmax_scale):
        given = (each.transpose(1, 2) for each in (q, k, v))
        scaled = {"is_causal": causal, "scale": softmax_scale, "enable_gqa": True}
        return bench.scaled_dot_product_attention(*given, **scaled).transpose(1, 2)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash))
    q, k, v = (torch.randn(2, heads, 33, 16) for heads in (4, 2, 2))
    calls = bench.rivals(q, k, v, True, 0.25)
    assert list(calls)[:2] == ["SDPA", "FlashAttention 2"]
    out = calls["FlashAttention 2"]().transpose(1, 2)
    torch.testing.assert_close(out, calls["SDPA"]())


def test_a_failed_winner_is_not_shipped(user):
    from flexattn.cli.records import _faults

    record = next(entry for _, entry in user.entries())
    trials = list(record.trials)
    winner = record.decision.winner
    trials[winner] = replace(trials[winner], failed=Failed("gate", "Inaccurate", ""))
    assert "accuracy gate" in _faults(replace(record, trials=tuple(trials)), None, H200)
