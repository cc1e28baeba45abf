"""README and manual are true: their code runs, and what they name exists."""

import importlib.util
import re
from pathlib import Path

import pytest
import tomllib
from typer.testing import CliRunner

from flexattn.cli.app import app
from flexattn.device import KNOWN, named
from flexattn.settings import VARIABLES, override
from flexattn.tuning.tasks import tasks
from flexattn.tuning.workload import read
from tests.blocks import PAGES, ROOT, blocks, run

README = (ROOT / "README.md").read_text()
MANUAL = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
EVERYTHING = "\n".join(MANUAL.values())
PYTHON = blocks("python")
RUNS = ("", "run in the interpreter")
UNRUN = {f"transformers.md-{i}" for i in range(3)}


def test_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 160


@pytest.mark.slow
@pytest.mark.parametrize(
    "interpret",
    [pytest.param(False, id="cpu"), pytest.param(True, id="interpreter", marks=pytest.mark.long)],
)
def test_python_blocks_run_without_a_gpu(interpret):
    """In one process: to import takes longer than most blocks.

    What explain prints of a block in the interpreter stands below it in docs/decode.md.
    """
    page = [ROOT / "docs/decode.md"]
    chosen = [block for block in PYTHON if block.note == RUNS[interpret]]
    chosen += blocks("python", page) if interpret else []
    done = run([block.code for block in chosen], interpret)
    wrong = [f"{block}: {text}" for block, (text, _) in zip(chosen, done, strict=True) if text]
    assert chosen and not wrong, "\n".join(wrong)
    if interpret:
        (shown,) = (block.code for block in blocks("text", page))
        assert _stable(done[-1][1]) == _stable(shown)


def _stable(explained):
    return re.sub(r"\S*/kernels/kernel_\w+", "kernel", explained).strip().splitlines()


def test_what_no_test_runs_says_why():
    unrun = {str(block): block.note for block in PYTHON if block.note not in RUNS}
    assert set(unrun) == UNRUN
    assert all(note.startswith("not run: ") for note in unrun.values())


def test_variables_are_those_of_the_settings():
    page = MANUAL["environment.md"]
    rows = re.findall(r"^\| `(FLEXATTN_\w+)` \| (?:`([^`]+)` )?\| (.+) \|$", page, re.MULTILINE)
    assert tuple(rows) == VARIABLES


def test_make_targets_exist():
    targets = re.findall(
        r"^([\w-]+)(?:[ \w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    code = " ".join(re.findall(r"`[^`\n]+`|^make .*$", EVERYTHING, re.MULTILINE))
    named = {name for name in re.findall(r"\bmake ([a-z][\w-]*)", code)}
    assert {"demo", "docs", "test", "test-compile", "test-gpu"} <= named <= set(targets)
    assert re.search(r"^make test\b", README, re.MULTILINE)


def test_the_oldest_triton_gets_every_folder_with_its_mark():
    """make test-oldest names folders: to collect all of tests/unit took seconds for nothing."""
    makefile = (ROOT / "Makefile").read_text()
    recipes = re.findall(r"^test-oldest.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    folders = [ROOT / name for name in re.findall(r"\btests/[\w/]+", "".join(recipes))]
    marked = [
        path for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.oldest", path.read_text())
    ]  # fmt: skip
    assert len(marked) > 20
    for path in marked:
        assert any(path.is_relative_to(folder) for folder in folders), path


def lines_of(block):
    return re.findall(r"^flexattn (.+?)(?: +#.*)?$", block.code, re.MULTILINE)


LINES = sorted({line for block in blocks("sh") for line in lines_of(block)})


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_is_understood(line, tmp_path, monkeypatch):
    """Dry where it would take a GPU, a compiler or minutes."""
    (tmp_path / "my_module.py").write_text(
        "def my_mask(b, h, q_idx, kv_idx):\n    return q_idx > 3\n"
    )
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    monkeypatch.chdir(tmp_path)
    tunes = line.startswith("tune ") and not re.search("--(dry-run|list-presets)", line)
    slow = (
        tunes
        or "ptx" in line
        or line.startswith(("demo", "report", "tune --preset sd21", "doctor"))
    )
    with override(cache_dir=tmp_path):
        result = CliRunner().invoke(app, line.split() + ["--help"] * slow)
    assert result.exit_code == 0, f"{line}: {result.output}"


def test_shell_blocks_have_no_other_programs():
    """Of a line that no test runs at least the program is known."""
    first = {
        next(word for word in line.split() if not re.match(r"[A-Z_]+=", word))
        for block in blocks("sh")
        for line in block.code.replace("\\\n", "").splitlines()
        if line and line[0] not in "# "
    }
    assert first <= {"flexattn", "make", "pip", "python", "vllm"}


def test_the_table_of_verbs_is_complete():
    page = MANUAL["commands.md"]
    table = page[page.index("| verb |") :].split("\n\n")[0]
    named = re.findall(r"`([a-z-]+)`", "".join(re.findall(r"^\| (.+?) \|", table, re.MULTILINE)))
    verbs = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert sorted(named) == sorted(verb.replace("_", "-") for verb in verbs)


def test_every_option_in_the_manual_has_three_cells():
    """Options show choices with a | between them, which ends a cell unless it is escaped."""
    path = ROOT / "docs/conf.py"
    spec = importlib.util.spec_from_file_location("manual_conf", path)
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    rows = [line for line in conf.commands().splitlines() if line.startswith("|")]
    assert len(rows) > 130 and any(r"\|" in row for row in rows)
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {5}


def test_no_code_block_is_cut():
    """The manual shows 88 columns at 1280 pixels; it wraps diffs, and what `explain` prints."""
    found = [block for kind in ("python", "sh", "toml", "text") for block in blocks(kind)]
    for block in found:
        width = max(map(len, block.code.splitlines()))
        assert width <= (99 if "room  " in block.code else 88), block


def test_workloads_are_read(tmp_path):
    found = {}
    for block in blocks("toml"):
        path = tmp_path / "mine.toml"
        path.write_text(block.code)
        found[str(block)] = read(path).rows
    assert len(found["serving.md-0"]) == 4
    problems = [task.problem for task in tasks(found["tuning.md-0"], named("nvidia-h200"))]
    assert len(problems) == 8
    assert {p.structure.kind for p in problems} == {"prefill", "decode", "backward"}


def test_files_that_are_named_exist():
    for name in re.findall(r"`([\w./-]+/|[\w./-]+\.(?:py|md|toml|txt))`", EVERYTHING):
        places = (ROOT / name, ROOT / "flexattn" / name)
        assert any(place.exists() for place in places) or name.startswith("/"), name
    for module in re.findall(r"python -m (bench\.\w+)", EVERYTHING):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists()


@pytest.mark.parametrize("name", MANUAL)
def test_links_lead_somewhere(name):
    """`make docs` looks at anchors and contents too; this needs no generator."""
    folder = ROOT if name in ("README.md", "CONTRIBUTING.md") else ROOT / "docs"
    for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", MANUAL[name]):
        assert (folder / link).exists(), link


def test_every_page_is_in_the_contents():
    index = MANUAL["index.md"]
    listed = re.findall(
        r"^[\w-]+$", "".join(b for b in re.findall(r"```{toctree}.*?```", index, re.S)), re.M
    )
    pages = {Path(name).stem for name in MANUAL} - {"README", "CONTRIBUTING", "index"}
    assert set(listed) == pages and len(listed) == len(pages)


def test_support_is_what_is_pinned_and_tested():
    page = MANUAL["support.md"]
    rows = [row for row in page.splitlines() if row.startswith("| ") and "---" not in row]
    for path in re.findall(r"`((?:tests|bench|requirements)/[\w./-]+)`", page):
        assert (ROOT / path).exists(), path
    named_devices = set(re.findall(r"`((?:nvidia|amd)-[\w-]+)`", page))
    assert named_devices == set(KNOWN)
    for device in KNOWN.values():
        assert any(device.arch in row and f"`{device.name}`" in row for row in rows), device.name
    pins = (ROOT / "requirements/ci.txt").read_text()
    for tool in ("torch", "triton"):
        version = re.search(rf"^{tool}==(\S+)$", pins, re.MULTILINE)[1]
        assert re.search(rf"{tool} {re.escape(version)}", page, re.IGNORECASE), tool
    for each in (ROOT / "requirements").glob("triton-*.txt"):
        version = re.search(r"^triton==(\S+)$", each.read_text(), re.MULTILINE)[1]
        assert version in page, version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.10" and "Python 3.10" in page
    assert "torch>=2.11" in project["dependencies"] and "torch 2.11" in README
