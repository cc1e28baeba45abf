"""What goes wrong around a request: a full output, a folder, a list that is not there."""

import os
import shutil
import subprocess
import sys

import pytest

from flexattn.cli import demo
from tests.processes import ROOT


@pytest.mark.parametrize("verb", ["-h", "devices"])
def test_a_full_output_ends_in_words(verb):
    """It was a traceback of 50 lines, through typer and rich."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "flexattn", verb], cwd=ROOT, stdout=full,
            stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [
        f"error: not all could be written: {os.strerror(28)}",
        "  do:   make room, or send the output elsewhere",
    ]
    assert "Traceback" not in done.stderr


def test_the_demo_looks_at_its_folder_first(flexattn, monkeypatch, tmp_path):
    """It ran for a minute, and then found that its picture had no place."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(demo, "show_cpu", lambda *_: pytest.fail("it ran"))
    (tmp_path / "file").write_text("")
    shown = flexattn("demo", "--out", tmp_path / "file" / "below", status=2).stderr
    assert f"error: {tmp_path / 'file'}" in shown


def test_a_list_of_untuned_problems_that_is_not_there(flexattn, tmp_path):
    """It counted as a list without a problem."""
    missing = tmp_path / "untuned.jsonl"
    asked = ("tune", "--from-untuned", "--dry-run", "--device", "h200")
    assert f"{missing}: no such file" in flexattn(*asked, missing, status=2).stderr
    missing.write_text("")
    assert "nvidia-h200, effort full" in flexattn(*asked, missing).stdout


def test_an_export_without_records_does_not_say_that_there_are_some(flexattn, tmp_path):
    shown = flexattn("export", tmp_path / "out", "--device", "a100").stdout
    assert "0 records" in shown and "nvidia-a100" in shown and "FLEXATTN_CACHE" not in shown


@pytest.mark.parametrize("verb", ["build", "why", "doctor"])
def test_devices_in_help_are_those_that_the_verb_takes(flexattn, verb):
    assert "trn1" not in flexattn(verb, "-h").stdout
    given = {"build": ["causal"], "why": ["causal"]}.get(verb, [])
    assert "trn1 is a Neuron device" in flexattn(verb, *given, "--device", "trn1", status=2).stderr


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["flexattn.catalog:softcap"], "did you mean catalogue?"),
        (["sliding_window", "--arg", "512"], "flexattn.catalogue:sliding_window --arg 512"),
        (["natten_2d", "--arg", "8", "--arg", "8"], "flexattn.catalogue:"),
        (["CASES"], "the catalogue has"),
    ],
)
def test_advice_names_what_was_meant(flexattn, arguments, advice):
    assert advice in flexattn("render", *arguments, status=2).stderr


def test_presets_are_told_whole_in_a_pipe(flexattn, monkeypatch):
    """At 80 columns, which a pipe was taken to have, half of each model's name was cut off."""
    monkeypatch.delenv("COLUMNS", raising=False)  # xdist's workers have it
    shown = flexattn("tune", "--list-presets").stdout
    assert "…" not in shown and "meta-llama/Meta-Llama-3-8B" in shown


@pytest.mark.parametrize(("word", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_a_workload_understands_short_names_of_dtypes(flexattn, tmp_path, word, dtype):
    path = tmp_path / "work.toml"
    text = f'dtype = "{word}"\n[[layers]]\nheads = [4]\nhead_dim = 64\n'
    path.write_text(text + "[[layers.calls]]\nq_len = 64\n")
    asked = ("why", "--workload", path, "--device", "h200")
    assert f"prefill {dtype}" in flexattn(*asked).stdout
    path.write_text(path.read_text().replace(word, "bflaot16"))
    assert "did you mean bfloat16?" in flexattn(*asked, status=2).stderr


def test_doctor_says_that_the_cache_takes_no_file(flexattn, tmp_path):
    """It called an installation sound whose `tune` could keep nothing."""
    assert "read-only" not in flexattn("doctor").stdout
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    (tmp_path / "cache").write_text("in its place")
    assert f"read-only   {tmp_path / 'cache'} takes no file" in flexattn("doctor").stdout


@pytest.mark.parametrize(
    "given", [["--kind", "backward"], ["--kind", "decode"], ["--device", "a100"]]
)
def test_advice_for_eight_bits_is_no_smaller_head(flexattn, given):
    shown = flexattn("render", "causal", "--dtype", "fp8", *given, status=2).stderr
    assert "convert to bfloat16" in shown and "head dimensions" not in shown


def test_a_dry_run_keeps_its_numbers_on_80_columns(flexattn, monkeypatch):
    """Titles did not wrap, and the count of what was rejected fell off the screen."""
    monkeypatch.setenv("COLUMNS", "80")
    asked = ("tune", "--preset", "llama3-8b", "--only", "decode", "--dry-run", "--device", "h200")
    shown = flexattn(*asked).stdout.splitlines()
    table = [line for line in shown if line.startswith("  ")]
    assert any(line.split()[-2:] == ["configs", "rejected"] for line in table)
    assert "…" not in "".join(table) and max(map(len, table)) <= 80
