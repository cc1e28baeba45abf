"""The notebooks run from top to bottom, are stored without outputs, and are valid and small."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from flexattn.settings import child_environment

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])


def test_there_are_four_in_order():
    assert [path.stem for path in NOTEBOOKS] == [
        "01_from_callable_to_kernel", "02_tune_and_read_the_landscape",
        "03_gqa_decode_for_serving", "04_train_a_gpt",
    ]  # fmt: skip


@each
def test_it_is_valid_and_small(path):
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(path, as_version=4))
    assert path.stat().st_size < 60_000


@each
def test_it_is_stored_without_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


@each
def test_the_process_interprets_before_it_imports(path):
    cells = json.loads(path.read_text())["cells"]
    first = "".join(next(c["source"] for c in cells if c["cell_type"] == "code"))
    assert first.index('os.environ["FLEXATTN_INTERPRET"] = "1"') < first.index("import flexattn")
    assert not re.search(r"/(home|root|work|tmp)/", path.read_text())


@pytest.mark.parametrize(
    "path",
    [pytest.param(x, marks=pytest.mark.long) if x.stem[:2] != "04" else x for x in NOTEBOOKS],
    ids=lambda path: path.stem[:2],
)
@pytest.mark.slow
def test_it_runs(path, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    jupyter_client = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    environment = child_environment(interpret=False)
    del environment["FLEXATTN_INTERPRET"]  # the notebook decides
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["FLEXATTN_CACHE_DIR"] = str(tmp_path / "cache")
    notebook = nbformat.read(path, as_version=4)
    # This interpreter, whatever kernels are registered on the machine.
    manager = jupyter_client.AsyncKernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable
    client = nbclient.NotebookClient(
        notebook,
        km=manager,
        timeout=300,
        resources={"metadata": {"path": str(ROOT / "notebooks")}},
    )
    client.execute(env=environment)
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [output for output in shown if "image/png" in output.get("data", {})]
    assert len(pictures) >= 3
    assert not [output for output in shown if output.get("name") == "stderr"], shown
