"""The worked examples of docs/adding.md do what they say, in a copy of the package."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

TEXT = (ROOT / "docs/adding.md").read_text(encoding="utf-8")
SECTIONS = {
    part.split("\n", 1)[0]: part for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
}
HEAD = re.compile(r"^--- (?:a/\S+|/dev/null)\n\+\+\+ b/(\S+)\n", re.MULTILINE)


def diffs(section):
    """(path, hunks) of each file that a section's diffs touch, a hunk as its lines."""
    blocks = re.findall(r"^```diff\n(.*?)^```", SECTIONS[section], re.MULTILINE | re.DOTALL)
    for block in blocks:
        _, *parts = HEAD.split(block)
        for path, body in zip(parts[::2], parts[1::2], strict=True):
            yield path, [hunk.splitlines() for hunk in body.split("@@\n")[1:]]


def applied(text, hunk):
    """A file's text with a hunk in it, which fits in one place."""
    before, after = (
        "".join(f"{line[1:]}\n" for line in hunk if line[:1] != left) for left in "+-"
    )
    assert text.count(before) == 1 or not text, before
    return text.replace(before, after) if text else after


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The package with every example in it, and a knob of Hopper's."""
    root = tmp_path_factory.mktemp("copy")
    for folder in ("flexattn", "templates"):
        shutil.copytree(ROOT / folder, root / folder)
    (root / "tests").mkdir()
    for name in ("__init__.py", "problems.py", "added.py"):
        shutil.copy(ROOT / "tests" / name, root / "tests" / name)
    for section in ("a knob", "a device", "a family", "a source of keys"):
        for path, hunks in diffs(section):
            file = root / path
            file.parent.mkdir(exist_ok=True)
            text = file.read_text() if file.exists() else ""
            for hunk in hunks:
                text = applied(text, hunk)
            file.write_text(text)
    config = root / "flexattn/kernels/hopper/config.py"
    text = config.read_text()
    field, first = '    ptxas: Ptxas = ""\n', "from flexattn.device import Device\n"
    text = text.replace(field, f'{field}    probe: int = knob(0, 1, word="p")\n')
    imported = "from flexattn.kernels.base.config import knob\n"
    config.write_text(text.replace(first, first + imported))
    return root


@pytest.fixture(scope="module")
def found(copy):
    interpreted = {"FLEXATTN_INTERPRET": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    places = {"PYTHONPATH": str(copy), "FLEXATTN_CACHE_DIR": str(copy / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.added"], cwd=copy, env=os.environ | interpreted | places,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert Path(answers["home"]).is_relative_to(copy)
    return answers


def test_the_row_of_the_op_is_the_one_in_the_tree():
    ((path, hunks),) = diffs("an op")
    rows = [line[1:] for hunk in hunks for line in hunk]
    assert rows and all(f"{row}\n" in (ROOT / path).read_text() for row in rows)


def test_a_knob_is_searched_told_kept_and_rendered(found):
    knob = found["knob"]
    assert knob["searched"] and not knob["where nothing is masked"]
    assert knob["before the counts"] == [True, False]
    assert knob["short"].endswith(" q first") and knob["one tile"] and knob["read back"]
    assert knob["of Hopper"] == [0, 1]


def test_a_device_is_listed_rendered_for_and_has_limits(found):
    assert found["device"] == {"listed": True, "rendered": True, "limits": 362.0}


def test_a_family_is_chosen_searched_explained_hashed_and_computes(found):
    family = found["family"]
    assert family["first"] == ["DenseConfig", "PrefillConfig"] and family["searched"] == 8
    assert "DenseConfig" in family["explained"]
    assert family["meant by kernel_options"] == "PrefillConfig"
    assert family["error"] < 2e-3 and family["hashed"]


def test_keys_of_a_ring_are_read_by_the_launchers_of_dense_ones(found):
    keys = found["keys"]
    assert keys["prefill"] < 2e-3 and keys["decode"] < 2e-3
    assert keys["refused"] == [True] * 4, "a template without the piece would read other keys"
    assert not keys["served"] and not keys["dense"] and keys["a record of its own"]


@pytest.mark.parametrize(
    ("section", "folders", "files"),
    [
        ("an op", 0, 1), ("a knob", 0, 2), ("a device", 0, 1), ("a family", 2, 1),
        ("a source of keys", 0, 2),
    ],
)  # fmt: skip
def test_the_files_that_an_example_touches_are_those_of_the_table(section, folders, files):
    touched = [ROOT / path for path, _ in diffs(section)]
    new = {path.parent for path in touched if not path.exists()}
    assert len(new) == folders and sum(path.exists() for path in touched) == files
    row = re.search(rf"^\| {section} \| (.*?) \|", TEXT, re.MULTILINE)[1]
    assert row.startswith(str(files)) if not folders else row.count("a folder") == folders
