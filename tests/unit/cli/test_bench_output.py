"""What bench prints and draws of its races, in a shell and in Python."""

import re
import shlex
from dataclasses import replace

import pytest
import torch

import flexattn
from flexattn.cli import bench
from flexattn.cli.bench import Benched, print_rows, results_of
from flexattn.errors import InputError
from flexattn.report.page import write_page
from flexattn.settings import override

ROW = Benched(
    "prefill B1 8192x8192", "default", "128x128 c2",
    {"flexattn": 500.12, "default": 500.5, "torch": 900.26, "SDPA": None},
    {"default": 1.0, "torch": 1.8, "SDPA": None}, True, 1.0, 4.0, "SDPA: out of memory",
)  # fmt: skip


def test_bench_prints_a_line_for_each_library(capsys):
    print_rows([ROW])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1] == "prefill B1 8192x8192: default 128x128 c2"
    assert lines[2] == "  gate green, error 1.0e+00 of 4.0e+00"
    assert [line.split() for line in lines[3:7]] == [
        ["flexattn", "500.1"], ["default", "500.5", "1.00"], ["torch", "900.3", "1.80"],
        ["SDPA", "-"],
    ]  # fmt: skip
    assert lines[7] == "  SDPA: out of memory"


def test_what_lost_is_tuned_and_nothing_else():
    """All four rows of a real run were "lost": one by 0.5 %, three by 0.1 % to the same kernel."""
    close = replace(ROW, ratio={"default": 0.999, "torch": 1.8, "SDPA": 0.985})
    lost = replace(ROW, title="decode B8 (GQA) 4096", ratio={"default": 1.0, "SDPA": 0.97})
    assert bench._lost([ROW, close, lost]) == ["decode B8 (GQA) 4096"]
    words = bench._for_rows("tune --preset a --only '8b (x|y)' --only=z", [lost.title, "C"])
    *rest, only = shlex.split(words)
    assert rest == ["tune", "--preset", "a", "--only"]
    assert re.search(only, lost.title) and re.search(only, "C") and not re.search(only, ROW.title)


def test_bench_s_page_has_a_chart(tmp_path):
    more = {f"library {i}": 100.0 * i + 600 for i in range(6)}
    row = replace(ROW, us=ROW.us | more, ratio=ROW.ratio | {name: 1.5 for name in more})
    page = write_page((), tmp_path, [results_of([row], "NVIDIA H200")]).page.read_text()
    assert "Is flexattn faster here?" in page and "NVIDIA H200" in page
    assert page.count("<svg") == 1 and all(f"library {i}" in page for i in range(6))


def test_a_call_on_the_cpu_says_what_a_gpu_would_do(capsys, tmp_path):
    q, k, v = (torch.randn(1, heads, 37, 16) for heads in (4, 2, 2))
    assert flexattn.bench(q, k, v) is None
    shown = capsys.readouterr().out
    assert "q [1, 4, 37, 16] k [1, 2, 37, 16] float32" in shown and "torch, SDPA" in shown
    with override(cache_dir=tmp_path):
        assert flexattn.tune(q, k, v) is None
    shown = capsys.readouterr().out
    assert "nothing was tuned" in shown and str(tmp_path / "records") in shown
    with pytest.raises(InputError):
        flexattn.bench(q, k, v[..., :5, :])
