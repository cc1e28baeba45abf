"""What is shipped: the wheel carries the templates, and the package imports without its extras."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

import flexattn
from tests.processes import ROOT

EXTRAS = ("matplotlib", "optuna", "hypothesis", "pytest", "pydantic")


def python(code: str, path: Path) -> str:
    """Output of `code` in a process of its own that finds flexattn at `path` first."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FLEXATTN", "TRITON"))}
    pythonpath = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment | {"PYTHONPATH": pythonpath},
        cwd=path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def shipped(folder: str) -> set[str]:
    """Files of a top-level folder as the wheel names them."""
    files = (p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {f"flexattn/_{p.relative_to(ROOT).as_posix()}" for p in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built by hatchling in a process that stands in the checkout."""
    out = tmp_path_factory.mktemp("wheel")
    code = f"from hatchling.build import build_wheel; print(build_wheel({str(out)!r}))"
    return out / python(code, ROOT)


@pytest.mark.slow
def test_wheel_contains_code_and_data(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = shipped("templates") | shipped("configs")
    assert expected and expected <= names, sorted(expected - names)
    assert "flexattn/__init__.py" in names and "flexattn/py.typed" in names
    presets = {f"flexattn/presets/{p.name}" for p in (ROOT / "flexattn/presets").glob("*.toml")}
    assert presets and presets <= names
    strangers = ("tests/", "bench/", "templates/", "configs/")
    assert not [n for n in names if n.startswith(strangers)]


@pytest.mark.slow
def test_servers_find_their_plug_ins(wheel, tmp_path):
    """vLLM and SGLang load them wherever the wheel is installed: without torch, in an instant."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = f"""
    import sys
    from importlib.metadata import distributions
    points = next(distributions(name="flexattn", path=[{str(tmp_path)!r}])).entry_points
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        (point,) = points.select(group=group)
        print(point.name, point.load().__name__)
    print([name for name in ("torch", "triton", "vllm", "sglang") if name in sys.modules])
    """
    found = python(code, tmp_path).splitlines()
    assert found == ["flexattn register_vllm", "flexattn register_sglang", "[]"]


FIND_TEMPLATES = """
import flexattn
from flexattn.kernels.base.environment import templates_folder
print(sorted(p.name for p in templates_folder().rglob("*.jinja")))
print(templates_folder())
"""


@pytest.mark.slow
def test_templates_are_found_in_an_installed_wheel(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    names, root = python(FIND_TEMPLATES, tmp_path).splitlines()
    assert Path(root) == tmp_path / "flexattn" / "_templates"
    assert names == str(sorted(p.name for p in (ROOT / "templates").rglob("*.jinja")))


@pytest.mark.slow
def test_templates_are_found_in_a_plain_checkout():
    names, root = python(FIND_TEMPLATES, ROOT).splitlines()
    assert Path(root) == ROOT / "templates"
    assert names == str(sorted(p.name for p in (ROOT / "templates").rglob("*.jinja")))


FIND_CONFIGS = """
from flexattn.records.layers import configs_folder, layers
from flexattn.device import named
print(configs_folder())
print(layers(named("nvidia-h200"))[-1].store.root)
"""


@pytest.mark.slow
@pytest.mark.parametrize("installed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_shipped_records_are_found(wheel, tmp_path, installed):
    where, expected = ROOT, ROOT / "configs"
    if installed:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path)
        where, expected = tmp_path, tmp_path / "flexattn" / "_configs"
    folder, root = python(FIND_CONFIGS, where).splitlines()
    assert (Path(folder), Path(root)) == (expected, expected / "nvidia-h200")


@pytest.mark.slow
def test_import_needs_no_extra():
    code = f"""
    import sys
    sys.modules.update(dict.fromkeys({EXTRAS!r}))  # an import fails, a look does not
    import flexattn
    print(all(hasattr(flexattn, name) for name in flexattn.__all__))
    """
    assert python(code, ROOT) == "True"


def extras():
    """The extras of pyproject.toml: each one's requirements by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = project["optional-dependencies"]
    return {name: [Requirement(each) for each in lines] for name, lines in found.items()}


def inside(names, known):
    """Extras with those that they bring."""
    found = set(names)
    for name in names:
        for each in known[name]:
            found |= inside(each.extras, known) if each.name == "flexattn" else set()
    return found


def test_extras_bring_what_they_are_for_and_no_more():
    """A study in a file needed a driver of PostgreSQL; nothing brought all that PyPI has."""
    known = extras()
    packages = {name: {each.name for each in known[name]} for name in known}
    assert packages["tune"] == {"optuna"} and "psycopg" in packages["postgres"]
    others = {"bench", "cli", "neuron", "serving-example", "test", "docs", "dev", "all"}
    assert inside(["all"], known) - {"all"} == known.keys() - others
    assert "neuron" not in inside(["dev"], known)


@pytest.mark.parametrize(("name", "stubs"), [("nki", "0.0.1"), ("neuronx-cc", "1.0.post1")])
def test_the_stubs_of_pypi_are_no_neuron(name, stubs):
    """They install without complaint and are empty."""
    (found,) = [each for each in extras()["neuron"] if each.name == name]
    assert stubs not in found.specifier


def test_advice_names_extras_that_there_are():
    files = [*(ROOT / "flexattn").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    texts = "\n".join(each.read_text() for each in files)
    named = re.findall(r"pip install[^\n]*?(?:flexattn|\.)\[([\w,-]+)\]", texts)
    advised = {name for names in named for name in names.split(",")}
    assert {"postgres", "transformers", "viz", "yaml"} <= advised <= extras().keys()


def test_the_version_stands_in_one_place(wheel):
    assert flexattn.__version__ == "0.3.0" and wheel.name.startswith("flexattn-0.3.0-")
    assert '__version__ = "0.3.0"' in (ROOT / "flexattn/__init__.py").read_text()
    assert "0.3.0" not in (ROOT / "pyproject.toml").read_text()


def test_the_hosted_check_is_the_one_that_runs_here():
    """.ci/run installs both archives of a release away from the checkout (.ci/package)."""
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert re.findall(r"- run: (.*)", workflow) == [".ci/run"]
    steps = re.findall(r'^step "[^"]+" \d+ (.+)$', (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert {"make test", ".ci/package", "make test-compile"} <= set(steps)
    assert os.access(ROOT / ".ci/package", os.X_OK)


def test_no_named_tuple_has_another_base():
    """Python 3.10, on which no test runs, raises a TypeError for one when it is imported."""
    for path in sorted((ROOT / "flexattn").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases):
                assert len(node.bases) == 1, f"{path}:{node.lineno}"
