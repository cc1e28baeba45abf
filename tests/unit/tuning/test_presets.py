"""Every preset loads, can run on an H200, and holds no problem twice."""

import json
import math
import time

import pytest
import torch
from typer.testing import CliRunner

from flexattn.catalogue import sliding_tile_3d
from flexattn.cli.app import app
from flexattn.kernels.choose.defaults import space
from flexattn.presets import files
from flexattn.presets.mods import DOCUMENTS, beside, last_keys, packed, ragged, sliding_tiles
from flexattn.records.record import key_of
from flexattn.settings import override
from flexattn.tuning.tasks import distinct, task_of, tasks
from flexattn.tuning.workload import read
from tests.problems import H200

NAMES = sorted(files())


def test_the_models_of_the_list_are_there():
    wanted = "llama3-8b llama3-70b qwen3 gemma2 gemma3 mistral-7b deepseek-mla gpt-oss whisper"
    assert {*wanted.split(), "sd21", "video-dit", "serving", "training"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_problem_can_run_and_has_a_key_of_its_own(name):
    workload = read(files()[name])
    assert workload.models and all("/" in model for model in workload.models)
    found, others = distinct(made(workload.rows))
    assert len(found) == len(workload.rows) and not others
    for task in found:
        assert space(task.problem, H200, "quick"), task.title


def made(rows):
    return [task_of(row, H200, torch.device("cpu")) for row in rows]


def test_gpt_oss_alone_has_sinks():
    have = {
        row.title.partition(" ")[0]
        for name in NAMES
        for row in read(files()[name]).rows
        if row.sinks and not row.served
    }
    assert have == {"gpt-oss", "training"}
    assert all(row.sinks for row in read(files()["gpt-oss"]).rows)
    trained = read(files()["training"]).rows
    assert all(row.sinks == ("gpt-oss" in row.title) for row in trained)
    served = read(files()["serving"]).rows
    assert all(row.served for row in served)
    assert all(row.sinks == ("gpt-oss" in row.title) for row in served)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if i % 4 == 0 else pytest.mark.long) for i, n in enumerate(NAMES)],
)
def test_a_dry_run_takes_seconds(name, tmp_path):
    begin = time.perf_counter()
    with override(cache_dir=tmp_path, cache=()):
        done = CliRunner().invoke(app, ["tune", "--preset", name, "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    assert time.perf_counter() - begin < 20
    plan = json.loads(done.stdout)
    assert plan["device"] == "nvidia-h200" and plan["same_key"] == {}
    rows = read(files()[name]).rows
    assert [each["title"] for each in plan["problems"]] == [row.title for row in rows]
    for each in plan["problems"]:
        assert each["configs"] >= 1 and each["status"] == "to tune"
        assert sum(each["rejected"].values()) >= 0 and len(each["digest"]) == 24


def test_scales_are_those_of_the_models():
    scales = {
        (workload.name, row.title.split()[1]): row.scale
        for workload in map(read, files().values())
        for row in workload.rows
        if row.scale is not None
    }
    assert scales["gemma2", "9b"] == 256**-0.5
    assert scales["gemma2", "27b"] == 144**-0.5
    assert scales["gemma3", "27b"] == pytest.approx(168**-0.5, rel=1e-15)
    yarn = 0.1 * math.log(40) + 1
    assert scales["deepseek-mla", "absorbed"] == pytest.approx(192**-0.5 * yarn**2, rel=1e-7)


def lanes(mask_mod, B, L, S):
    q, k = torch.arange(L)[:, None], torch.arange(S)[None, :]
    return torch.stack([
        mask_mod(torch.tensor(b), torch.tensor(0), q, k).expand(L, S) for b in range(B)
    ])  # fmt: skip


def test_the_last_keys_of_each_sequence():
    kept = lanes(last_keys(4, 2, 11), 2, 1, 16)
    assert kept[0, 0].nonzero().flatten().tolist() == [7, 8, 9, 10]
    assert torch.equal(kept[0], kept[1])


def test_a_ragged_batch_ends_with_a_full_sequence():
    assert lanes(ragged(3, 80), 3, 1, 90).sum(-1).flatten().tolist() == [20, 50, 80]


def test_sliding_tiles_are_the_same_mask_in_the_tiles_order():
    """Tokens of a tile side by side instead of row-major: one mask, permuted."""
    canvas, tile, window = (4, 6, 8), (2, 3, 2), (1, 2, 3)
    place = torch.arange(4 * 6 * 8).view(2, 2, 2, 3, 4, 2).permute(0, 2, 4, 1, 3, 5).flatten()
    rows = lanes(sliding_tile_3d(canvas, tile, window), 1, 192, 192)[0]
    tiles = lanes(sliding_tiles((2, 2, 4), 12, window), 1, 192, 192)[0]
    assert torch.equal(tiles, rows[place][:, place])


def test_packed_documents_and_windows_on_both_sides():
    kept = lanes(packed(8192), 1, 8192, 8192)[0]
    assert kept.sum() == sum(n * (n + 1) // 2 for n in DOCUMENTS)
    assert kept[311].nonzero().flatten().tolist() == [311]
    assert lanes(beside(2), 1, 5, 9)[0].sum(1).tolist() == [3, 4, 5, 5, 5]


def test_training_is_forwards_with_lse_and_their_gradients():
    rows = read(files()["training"]).rows
    assert [row.kind for row in rows] == [None, "backward"] * (len(rows) // 2)
    assert [row.lse for row in rows] == [True, False] * (len(rows) // 2)
    (t5,) = (row for row in rows if "t5" in row.title and row.kind == "backward")
    task = task_of(t5, H200, torch.device("cpu"))
    assert task.problem.structure.grads == (0,) and task.scale == 1.0


def test_presets_that_share_a_key_are_tuned_once():
    """Mistral without its window is Llama-3 8B to a kernel."""
    both = [row for name in ("llama3-8b", "mistral-7b") for row in read(files()[name]).rows]
    found, others = distinct(tasks(both, H200))
    assert ("mistral-7b full decode B8 8192", "llama3-8b decode B8 8192") in [
        (task.title, kept.title) for task, kept in others
    ]
    assert len({key_of(task.problem) for task in found}) == len(found)
