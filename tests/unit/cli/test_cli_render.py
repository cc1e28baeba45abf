"""`flexattn render` shows the kernel that a call with the same numbers gets."""

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from flexattn.block_mask.create import create_block_mask
from flexattn.catalogue import CASES
from flexattn.cli.app import app
from flexattn.frontend import plan
from flexattn.frontend.call import make_call
from flexattn.kernels.choose.options import NONE
from flexattn.mods import bind
from flexattn.mods.bind import clear
from flexattn.mods.expr import walk
from flexattn.settings import override
from tests.problems import H200, choices, problems_asked

B, HEADS, LENGTHS, D = 2, (8, 2), (611, 747), 64


def called(case, monkeypatch):
    """The Problem of a real call with a case's mods, on a device that is not here."""
    clear()
    built = case.make(B, *HEADS, *LENGTHS, "cpu", torch.bfloat16)
    q, k = (torch.zeros(B, *s, D, dtype=torch.bfloat16) for s in zip(HEADS, LENGTHS, strict=True))
    mask = None
    if built.mask_mod is not None:
        names = {node.value for node in walk(bind(built.mask_mod, "mask").mod.expr)}
        sizes = (B if "b" in names else None, HEADS[0] if "h" in names else None)
        mask = create_block_mask(built.mask_mod, *sizes, *LENGTHS, "cpu")
    found = problems_asked(monkeypatch)
    plan.plan(make_call(q, k, k, built.score_mod, mask, None, True, False, None, None))
    return found[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_render_shows_what_a_call_gets(case, monkeypatch, tmp_path):
    """It took every mask for lists with full blocks: a causal call walks runs instead."""
    with override(cache_dir=tmp_path):
        wanted = next(choices(called(case, monkeypatch), H200, NONE))
        clear()
        numbers = {
            "--B": B, "--heads": "{}:{}".format(*HEADS), "--q-len": LENGTHS[0],
            "--kv-len": LENGTHS[1], "--head-dim": D,
        }  # fmt: skip
        flags = [str(each) for pair in numbers.items() for each in pair]
        words = ["render", case.name, *flags, "--device", "h200", "--json"]
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["source"] == wanted.source.text and found["origin"] == wanted.origin


def test_a_prefill_has_as_many_keys_as_queries_by_default(tmp_path):
    with override(cache_dir=tmp_path):
        result = CliRunner().invoke(app, ["render", "causal", "--q-len", "1031", "--show", "expr"])
    assert "q_len=1031 kv_len=1031" in result.output


def test_a_mod_of_a_file_is_named_by_its_path(flexattn, tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "beside_of_test_cli.py").write_text("STEP = 3\n")
    path = tmp_path / "deep" / "mods_of_test_cli.py"
    path.write_text(
        "from beside_of_test_cli import STEP\n"
        "def strided(b, h, q_idx, kv_idx):\n    return (q_idx - kv_idx) % STEP == 0\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("./deep/mods_of_test_cli.py", str(path)):
        shown = flexattn("render", f"{name}:strided", "--show", "expr").stdout
        assert "mask_mod" in shown and "% 3" in shown
    missing = flexattn("render", "./nowhere.py:f", status=2).stderr
    assert "nowhere.py: no such file" in missing
    near = flexattn("render", "./deep/mods_of_test_cl.py:strided", status=2).stderr
    assert "did you mean deep/mods_of_test_cli.py?" in near
    near = flexattn("render", "./deep/mods_of_test_cli.py:stridd", status=2).stderr
    assert "did you mean strided?" in near


BAD_MODS = {
    "raises_of_test_cli": "raise RuntimeError('no table here')\n",
    "ends_of_test_cli": "import sys\nsys.exit(3)\n",
    "unreadable_of_test_cli": "def f(:\n",
    "factory_of_test_cli": "def f(n):\n    raise ValueError('n is odd')\n",
}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./raises_of_test_cli.py:f"], ["RuntimeError: no table", "raises_of_test_cli.py:1"]),
        (["raises_of_test_cli:f"], ["RuntimeError: no table here"]),
        (["./ends_of_test_cli.py:f"], ["SystemExit: 3"]),
        (["unreadable_of_test_cli:f"], ["line 1", "SyntaxError"]),
        (["factory_of_test_cli:f", "--arg", "3"], ["f(3): ValueError: n is odd"]),
        (["torch:tanh"], ["no signature found"]),
        (["./deep:f"], ["'./deep' is no module", "ends with .py"]),
        (["..:f"], ["'..' is no module"]),
        ([":f"], ["':f' names no module"]),
        (["causal", "--kv-len", "0"], ["kv_len=0", "sizes are at least 1"]),
        (["causal", "--q-len", "99999999999"], ["q_len=99999999999", "at most"]),
        (["causal", "--q-len", "67108864"], ["blocks of (128, 128)", "use larger blocks"]),
    ],
    ids=lambda value: "-".join(value),
)
def test_what_a_mod_s_module_raises_is_no_traceback(
    arguments, words, flexattn, tmp_path, monkeypatch
):
    """Nor what its arguments and a call's sizes make impossible."""
    for name, text in BAD_MODS.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    shown = flexattn("render", *arguments, "--show", "expr", "--device", "h200", status=2).stderr
    assert shown.startswith("error: ") and not BAD_MODS.keys() & sys.modules.keys() - {
        "factory_of_test_cli"
    }
    for word in words:
        assert word in shown


@pytest.mark.parametrize(
    "sizes",
    [["--heads", "0"], ["--heads", "7:2"], ["--B", "0"], ["--head-dim", "-4"],
     ["--block-size", "0"], ["--kv-len", "0"], ["--q-len", "99999999999"]],
    ids="-".join,
)  # fmt: skip
def test_why_refuses_sizes_that_no_call_has(flexattn, sizes):
    """It divided by them, or said which config serves -4 columns."""
    assert flexattn("why", "causal", *sizes, "--device", "h200", status=2).stderr.count("rule:")
