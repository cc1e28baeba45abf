"""`flexattn tune`: what it lists, refuses, keeps and goes on with."""

import json
import os
import re
import signal
import textwrap
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from flexattn.cli import selection
from flexattn.cli.selection import gpus_like
from flexattn.device import named
from flexattn.presets import files
from flexattn.records.record import key_of
from flexattn.records.store import Store
from flexattn.settings import override
from flexattn.tuning.tasks import tasks
from flexattn.tuning.workload import read
from tests.processes import python, started

TINY = """
dtype = "float16"
[[layers]]
heads = [4, 2]
head_dim = 16
[[layers.calls]]
name = "decode"
mixes = [[1, 1, 70], [1, 1, 150], [1, 1, 300], [1, 1, 600]]
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_plans_are_listed_for_gpus_and_left_out_elsewhere(flexattn):
    arguments = ("tune", "--preset", "serving", "--preset", "sd21", "--dry-run", "--json")
    chosen = ("--only", "level 3 B2 256|decode B8", "--effort", "quick", "--device")
    gpu, neuron = (
        json.loads(flexattn(*arguments, *chosen, device).stdout)["problems"]
        for device in ("nvidia-h200", "trn2")
    )
    assert [each["key"]["kind"] for each in gpu] == ["serving"] * 4 + ["prefill"]
    assert [each["title"] for each in neuron] == ["sd21 level 3 B2 256x256"]
    assert gpu[0]["configs"] == 32 and gpu[0]["rejected"]["left out by quick"] > 100
    assert "only plans" in flexattn("bench", "--preset", "serving", status=2).stderr


def test_a_host_s_other_gpus_measure_nothing(monkeypatch):
    names = ["nvidia-h200", "nvidia-a100", "nvidia-h200"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(names))
    monkeypatch.setattr(selection, "detect", lambda where: named(names[where.index]))
    assert gpus_like(named("nvidia-h200")) == [0, 2]
    assert gpus_like(named("nvidia-h100")) == []


def test_presets_are_listed(flexattn, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    lines = flexattn("tune", "--list-presets").stdout.splitlines()
    cells = (line.split("│")[1].strip() for line in lines if line.startswith("│"))
    assert list(filter(None, cells)) == sorted(files())


def test_a_dry_run_of_some_rows_as_a_table(flexattn):
    shown = flexattn("tune", "--preset", "sd21", "--only", "level 3", "--dry-run").stdout
    assert "nvidia-h200, effort full: nothing is built or timed" in shown
    assert "sd21 level 3 B2 256x256" in shown and "level 1" not in shown
    assert "key: the sizes under which a record is filed" in shown
    for name in ("mask class", "configs", "rejected"):
        assert f"\n{name}: " in shown
    assert re.search(r"2 problems, \d+ configs; rejected: \d+ \w+", shown)


def test_a_dry_run_for_another_device_and_effort(flexattn):
    arguments = ("tune", "--preset", "sd21", "--dry-run", "--json")
    quick, full = (
        json.loads(flexattn(*arguments, "--effort", effort, "--device", device).stdout)
        for effort, device in (("quick", "nvidia-a100"), ("full", "nvidia-h200"))
    )
    assert (quick["device"], quick["effort"]) == ("nvidia-a100", "quick")
    count = [sum(each["configs"] for each in plan["problems"]) for plan in (quick, full)]
    assert count[0] < count[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["no workload", "--list-presets"]),
        (["--preset", "lama3-8b"], ["no preset is called", "did you mean llama3-8b?"]),
        (["llama3-8b"], ["no such file", "--preset llama3-8b"]),
        (["mine.toml"], ["mine.toml: No such file or directory", "a workload is a readable file"]),
        (["--preset", "sd21", "--only", "["], ["regular expression"]),
        (["--preset", "sd21", "--only", "level 9"], ["finds none of 7 rows", "sd21 level 1"]),
        (["--preset", "sd21", "--effort", "much"], ["quick, full or exhaustive"]),
        (["--preset", "sd21", "--device", "h20"], ["no device is called 'h20'"]),
        (["--preset", "sd21"], ["torch sees no GPU", "--dry-run", "flexattn build --device"]),
        (["--from-untuned", "--preset", "sd21", "--dry-run"], ["--from-untuned with --preset"]),
        (["--from-untuned", "--workload", "w.toml"], ["--workload, --only or sizes"]),
        (["--from-untuned", "--only", "x"], ["a list of untuned problems is tuned whole"]),
        (["--from-untuned", "--q-len", "64"], ["leave out --from-untuned"]),
        (
            ["--preset", "sd21", "--heads", "16"],
            ["sizes beside a workload"],
        ),
        (["w.toml", "--kind", "decode"], ["sizes beside a workload", "a MOD's call"]),
        (["--preset", "sd21", "--again", "--storage", "sqlite://"], ["name another database"]),
        (["causal", "--heads", "8x2"], ["as 32:8", "two numbers with a colon"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else None,
)
def test_requests_that_are_refused(flexattn, arguments, words, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = flexattn("tune", *arguments, status=2)
    assert result.stderr.startswith("error: ") and "Traceback" not in result.output
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize(
    "verb",
    [
        ("tune", "{}", "--dry-run"), ("why", "--workload", "{}"), ("bench", "{}"),
        ("export", "out", "--device", "nvidia-h200", "--workload", "{}"),
    ],
    ids=lambda verb: verb[0],
)  # fmt: skip
def test_no_verb_runs_a_function_that_only_a_file_names(flexattn, monkeypatch, tmp_path, verb):
    """`flexattn tune FILE --dry-run` ran os:system with the file's words."""
    ran = []
    monkeypatch.setattr(os, "system", ran.append)
    monkeypatch.chdir(tmp_path)
    layer = 'heads = 2\nhead_dim = 64\nscore = { mod = "os:system", args = ["id"] }\n'
    Path("w.toml").write_text(f"[[layers]]\n{layer}[[layers.calls]]\nq_len = 128\n")
    result = flexattn(*(each.format("w.toml") for each in verb), status=2)
    assert "w.toml: layers[0]: score: 'os:system'" in result.stderr
    assert "--allow-module os" in result.stderr and not ran


# A child whose measurer is slow, so that Ctrl-C has something to end; the rest is as users run it.
CHILD = """
    import json, math, os, signal, sys, time

    # What a shell starts in the background ignores Ctrl-C, and its children with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    from flexattn.records.record import Gated
    from flexattn.tuning import tuner

    PAUSE = float(sys.argv.pop(1))

    class Slow:
        def __init__(self, **given):
            pass

        def start(self):
            pass

        def open(self, task):
            self.title = task.title

        def gate(self, config):
            return Gated("out max", 1e-4, 1e-3, 1e-4, True)

        def sample(self, configs, rounds, min_ms, limit_us=math.inf):
            if "TIMED" in os.environ:
                with open(os.environ["TIMED"], "a") as file:
                    lines = ((os.getpid(), rounds, self.title, str(each)) for each in configs)
                    file.write("".join(json.dumps(line) + "\\n" for line in lines))
            time.sleep(PAUSE * len(configs))
            return [
                tuple(10 + config.BLOCK_N / 64 + 0.01 * i for i in range(rounds))
                for config in configs
            ]

        def close(self):
            pass

    tuner.Worker = Slow
    from flexattn.cli import main
    main()
"""


def child(pause, tiny, out, *more, json=True, timed=None):
    about = {"FLEXATTN_CACHE_DIR": out / "cache", **({"TIMED": timed} if timed else {})}
    words = "tune", tiny, "--out", out / "records", *["--json"] * json, *more
    return started("-c", textwrap.dedent(CHILD), pause, *words, interpret=True, **about)


@pytest.mark.long
@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished_and_the_same_command_goes_on(tiny, tmp_path):
    store = Store(tmp_path / "records")
    process = child(0.05, tiny, tmp_path)
    for _ in range(600):
        if list(store.paths()) or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    told = json.loads(stdout)
    assert told["interrupted"] and 1 <= len(told["problems"]) and told["left"] >= 1
    assert "go on with: flexattn tune" in stderr and "Traceback" not in stderr
    finished = {Path(each["path"]): Path(each["path"]).read_bytes() for each in told["problems"]}
    assert set(finished) == {path for path, _ in store.entries()}

    process = child(0, tiny, tmp_path)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    told = json.loads(stdout)
    assert not told["interrupted"] and told["left"] == 0
    status = [each["status"] for each in told["problems"]]
    assert status == ["kept"] * len(finished) + ["tuned"] * (4 - len(finished))
    assert all(path.read_bytes() == content for path, content in finished.items())

    process = child(0, tiny, tmp_path, "--again", "--effort", "quick")
    stdout, stderr = process.communicate(timeout=120)
    assert [each["status"] for each in json.loads(stdout)["problems"]] == ["tuned"] * 4
    assert not list(store.strays())


@pytest.mark.slow
def test_an_interrupt_before_anything_is_finished_says_how_to_go_on(tiny, tmp_path):
    """It said that there was nothing to tune."""
    log = tmp_path / "timed"
    process = child(0.5, tiny, tmp_path, json=False, timed=log)
    until(log.exists, process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "nothing to tune" not in stdout
    assert "nothing finished, of 4; records in" in stdout
    assert "interrupted with 4 left; go on with: fl" in stderr


def until(holds, process):
    for _ in range(600):
        if holds() or process.poll() is not None:
            break
        time.sleep(0.05)
    assert holds(), process.communicate()


@pytest.mark.long
@pytest.mark.slow
def test_two_tuners_of_one_folder_share_its_problems(tiny, tmp_path):
    """Two on one --out measured 236 of 246 configs twice. The bar: not one is."""
    log, more = tmp_path / "timed", ["--effort", "quick", "--budget", "600"]
    both = [child(0.03, tiny, tmp_path, *more, timed=log) for _ in range(2)]
    told = []
    for process in both:
        stdout, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr
        told.append(json.loads(stdout))
    assert [each["left"] for each in told] == [0, 0]
    status = Counter(each["status"] for run in told for each in run["problems"])
    assert status == {"tuned": 4, "kept": 4}
    timed = {tuple(json.loads(line)[::2]) for line in log.read_text().splitlines()}
    assert {pid for pid, _ in timed} == {each.pid for each in both}, "each does a part"
    assert len(timed) == 4, "and nothing of a problem that the other does"
    assert not list((tmp_path / "records" / "locks").iterdir())


@pytest.mark.slow
@pytest.mark.long
def test_a_tuner_that_was_killed_holds_nobody_up(tiny, tmp_path):
    log, more = tmp_path / "timed", ["--effort", "quick", "--budget", "600"]
    dead = child(600, tiny, tmp_path, *more, timed=log)
    until(log.exists, dead)
    (held,) = (tmp_path / "records" / "locks").iterdir()
    # The other does what is left, and then waits for the one that is held.
    other = child(0, tiny, tmp_path, *more)
    store = Store(tmp_path / "records")
    until(lambda: len(list(store.paths())) == 3, other)
    dead.kill()
    dead.communicate()
    stdout, stderr = other.communicate(timeout=60)
    told = json.loads(stdout)
    assert [each["status"] for each in told["problems"]] == ["tuned"] * 4, stderr
    assert "waiting for 1 that another tuner measures: " in stderr
    assert not held.exists()


@pytest.mark.slow
@pytest.mark.long
def test_time_that_is_over_ends_cleanly_and_old_records_make_way(tiny, tmp_path):
    process = child(0, tiny, tmp_path, "--time", "0")
    stdout, stderr = process.communicate(timeout=60)
    told = json.loads(stdout)
    assert process.returncode == 0 and (told["left"], told["problems"]) == (4, [])
    assert "the time is over, with 4 left; go on with: flexattn tune" in stderr

    process = child(0, tiny, tmp_path, "--effort", "quick")
    assert process.communicate(timeout=60) and process.returncode == 0
    store = Store(tmp_path / "records")
    for _, record in list(store.entries()):
        store.write(replace(record, environment=replace(record.environment, template="old")))
    (old,) = {r.environment.folder for _, r in store.entries() if r.environment.template == "old"}
    process = child(0, tiny, tmp_path, "--effort", "quick", "--again", "--prune")
    assert process.communicate(timeout=60) and process.returncode == 0
    assert len(list(store.entries())) == 4 and old not in store.folders()


@pytest.mark.slow
def test_a_real_tuning_in_the_interpreter(tiny, flexattn, tmp_path):
    """Every part for real but the device: worker, gate, race, record, and the next call's hit."""
    tiny.write_text(TINY.partition("mixes")[0] + "q_len = 1\nkv_len = 70\n")
    command = ["tune", tiny, "--effort", "quick", "--budget", "2", "--json"]
    about = {"interpret": True, "FLEXATTN_CACHE_DIR": tmp_path / "cache"}
    (tuned,) = json.loads(python("-m", "flexattn", *command, **about)[0])["problems"]
    assert tuned["status"] == "tuned" and tuned["provenance"] == "measured"
    (record,) = json.loads(flexattn("show", "--json").stdout)["records"]
    assert record["environment"]["device"] == "interpreter"
    arguments = ("why", "--workload", tiny, "--device", "interpreter", "--json")
    (problem,) = json.loads(flexattn(*arguments).stdout)["problems"]
    assert problem["how"] == "hit" and problem["config"] == record["winner"]
    arguments = ("replay-study", tmp_path / "cache" / "records")
    assert "1 of 1 decisions are the same" in flexattn(*arguments).stdout


def test_untuned_problems_become_tasks(flexattn, tmp_path):
    """What dispatch lists is rebuilt: the same keys, masks alike, mods from their expressions."""
    from flexattn.records.untuned import note
    from flexattn.tuning.tasks import untuned_tasks

    device = named("nvidia-h200")
    rows = [row for row in read(files()["gemma2"]).rows if "local" in row.title]
    trained = read(files()["training"]).rows
    rows += [row for row in trained if re.search("(modern|t5).* backward", row.title)]
    found = list(tasks(rows, device))
    with override(cache_dir=tmp_path / "cache"):
        for task in found:
            note(task.problem, device, "default", task.score, task.mask)
    rebuilt = untuned_tasks(tmp_path / "cache" / "untuned.jsonl", device)
    assert [key_of(task.problem) for task in rebuilt] == [key_of(t.problem) for t in found]
    for task, old in zip(rebuilt, found, strict=True):
        for lists, others in ((task.lists, old.lists), (task.by_key, old.by_key)):
            assert (lists is None) == (others is None)
            assert lists is None or lists.kv_num.shape[-1] == others.kv_num.shape[-1]
        assert task.problem.structure.grads == old.problem.structure.grads
        if task.score is None:
            continue
        assert task.score.mod.fingerprint == old.score.mod.fingerprint
        assert task.policy == old.policy
    plan = json.loads(flexattn("tune", "--from-untuned", "--dry-run", "--json").stdout)
    assert len(plan["problems"]) == len(rows)


def test_a_bad_environment_is_said_without_a_traceback():
    _, said = python("-m", "flexattn", "show", status=2, FLEXATTN_DEBUG="loud")
    assert "error: FLEXATTN_DEBUG='loud'" in said and "level from 0 to 6" in said
    assert "Traceback" not in said
