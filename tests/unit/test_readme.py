"""The README is true: its code runs, and what it names exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexattn.cli.app import app
from flexattn.device import named
from flexattn.settings import VARIABLES, child_environment, override
from flexattn.tune.tasks import tasks
from flexattn.tune.workload import read

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCS = README + (ROOT / "CONTRIBUTING.md").read_text()


def blocks(language, page=README):
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


EXAMPLES = blocks("python") + blocks("python", (ROOT / "docs/gradients.md").read_text())


def run(code, interpret):
    environment = child_environment(interpret=interpret)
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": ":".join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs_without_a_gpu(number):
    hidden = "import torch; torch.cuda.is_available = lambda: False\n"
    code = hidden + EXAMPLES[number] + "\nprint(tuple(out.shape), bool(out.isfinite().all()))"
    shape = ["(1, 8, 2000, 128)", "(4, 32, 1, 128)", "(1, 8, 512, 64)"][number]
    assert run(code, interpret=False).splitlines()[-1] == f"{shape} True"


@pytest.mark.slow
def test_the_explanation_is_what_explain_prints():
    code = next(block for block in blocks("python") if "print(explain" in block)
    hidden = "import torch; torch.cuda.is_available = lambda: False\n"
    shown = next(block for block in blocks("text") if "FLEXATTN_INTERPRET" in block)

    def stable(text):
        return re.sub(r"\S*/kernels/kernel_\w+", "kernel", text).strip().splitlines()

    assert stable(run(hidden + code, interpret=True)) == stable(shown)


def test_variables_are_those_of_the_settings():
    rows = re.findall(r"^\| `(FLEXATTN_\w+)` \| (?:`([^`]+)` )?\| (.+) \|$", README, re.MULTILINE)
    assert tuple(rows) == VARIABLES


def test_make_targets_exist():
    targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    code = " ".join(re.findall(r"`[^`\n]+`|^make .*$", DOCS, re.MULTILINE))
    named = {name for name in re.findall(r"\bmake ([a-z][\w-]*)", code)}
    assert {"demo", "test", "test-compile", "test-gpu"} <= named <= set(targets)


def test_the_oldest_triton_gets_every_folder_with_its_mark():
    """make test-oldest names folders: to collect all of tests/unit took seconds for nothing."""
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^test-oldest:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1]
    folders = [ROOT / name for name in re.findall(r"\btests/[\w/]+", recipe)]
    marked = [
        path for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.oldest", path.read_text())
    ]  # fmt: skip
    assert len(marked) > 20
    for path in marked:
        assert any(path.is_relative_to(folder) for folder in folders), path


def test_command_lines_are_understood(tmp_path, monkeypatch):
    (tmp_path / "my_module.py").write_text(
        "def my_mask(b, h, q_idx, kv_idx):\n    return q_idx > 3\n"
    )
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^flexattn (.+?)(?: +#.*)?$", "\n".join(blocks("sh")), re.MULTILINE)
    assert len(lines) >= 6
    for line in lines:
        tunes = line.startswith("tune ") and not re.search("--(dry-run|list-presets)", line)
        too_much = tunes or "ptx" in line or line.startswith("demo")
        with override(cache_dir=tmp_path):
            result = CliRunner().invoke(app, line.split() + ["--help"] * too_much)
        assert result.exit_code == 0, f"{line}: {result.output}"


def test_the_table_of_verbs_is_complete():
    table = README[README.index("| verb |") :].split("\n\n")[0]
    named = re.findall(r"`([a-z-]+)`", "".join(re.findall(r"^\| (.+?) \|", table, re.MULTILINE)))
    verbs = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert sorted(named) == sorted(verb.replace("_", "-") for verb in verbs)


def test_the_workload_is_one(tmp_path):
    (block,) = blocks("toml")
    path = tmp_path / "mine.toml"
    path.write_text(block)
    workload = read(path)
    found = list(tasks(workload.rows, named("nvidia-h200")))
    assert len(found) == 8
    kinds = {t.problem.structure.kind for t in found}
    assert kinds == {"prefill", "decode", "backward"}


def test_files_that_are_named_exist():
    for name in re.findall(r"`([\w./-]+/|[\w./-]+\.(?:py|md|toml|txt))`", DOCS):
        places = (ROOT / name, ROOT / "flexattn" / name)
        assert any(place.exists() for place in places), name
    for module in re.findall(r"python -m (bench\.\w+)", DOCS):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists()
