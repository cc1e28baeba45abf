"""`flexattn render` shows the kernel that a call with the same numbers gets."""

import json

import pytest
import torch
from typer.testing import CliRunner

from flexattn.block_mask.create import create_block_mask
from flexattn.catalogue import CASES
from flexattn.cli.app import app
from flexattn.device import named
from flexattn.frontend import plan
from flexattn.frontend.admission import make_call
from flexattn.kernels.choose.options import NONE
from flexattn.mods import bind
from flexattn.mods.bind import clear
from flexattn.mods.expr import walk
from flexattn.settings import override
from tests.problems import choices

H200 = named("nvidia-h200")
B, HEADS, LENGTHS, D = 2, (8, 2), (611, 747), 64


class Prepared(Exception):
    """Ends a call where its kernel would be compiled."""


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

    def prepare(problem, *rest):
        raise Prepared(problem)

    monkeypatch.setattr(plan, "detect", lambda device: H200)
    monkeypatch.setattr(plan, "prepare", prepare)
    call = make_call(q, k, k, built.score_mod, mask, None, True, False, None, None)
    with pytest.raises(Prepared) as found:
        plan.plan(call)
    return found.value.args[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_render_shows_what_a_call_gets(case, monkeypatch, tmp_path):
    """It took every mask for lists with full blocks: a causal call walks runs instead."""
    with override(cache_dir=tmp_path):
        wanted = next(choices(called(case, monkeypatch), H200, NONE))
        clear()
        numbers = {
            "--B": B, "--Hq": HEADS[0], "--Hkv": HEADS[1], "--q-len": LENGTHS[0],
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
