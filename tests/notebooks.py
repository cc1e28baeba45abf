"""Runs the notebooks, and compares what they say with what is stored in them.

python -m tests.notebooks [NUMBER…]     runs them without a GPU and stores their outputs
"""

import base64
import io
import os
import re
import sys
import tempfile
from pathlib import Path

import jupyter_client
import nbclient
import nbformat
from PIL import Image

from flexattn.settings import child_environment
from tests.processes import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What differs from run to run or with the sources: hashes, places, objects. Floats depend on the
# processor.
VOLATILE = [
    (re.compile(r"\bnvidia-h200-[0-9a-f]{12}\b"), "environment"),
    (re.compile(r"\S*/kernels/kernel_\w+"), "kernel"),
    (re.compile(r"kernel_[0-9a-f]{24}"), "kernel"),
    (re.compile(r"/tmp/\S+"), "folder"),
    (re.compile(r"0x[0-9a-f]+"), "object"),
    (re.compile(r"-?\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+"), "number"),
]


def executed(path, cache):
    """The notebook after a run of all its cells, by a process whose records are new."""
    environment = child_environment(interpret=False)
    del environment["FLEXATTN_INTERPRET"]  # the notebook decides
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["FLEXATTN_CACHE_DIR"] = str(cache)
    environment["FLEXATTN_VERIFY"] = "off"  # as in tests: what was verified differs by caches
    notebook = nbformat.read(path, as_version=4)
    # This interpreter, whatever kernels are registered on the machine.
    manager = jupyter_client.AsyncKernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable
    nbclient.NotebookClient(
        notebook,
        km=manager,
        timeout=300,
        record_timing=False,
        resources={"metadata": {"path": str(ROOT / "notebooks")}},
    ).execute(env=environment)
    return notebook


def _smaller(png):
    """The same picture in 16 colours: plots have few, and the tree keeps all of them."""
    # Only who writes notebooks needs it.
    from zopfli.png import optimize

    written = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.quantize(16, dither=Image.Dither.NONE).save(written, "png", optimize=True)
    packed = base64.b64encode(optimize(written.getvalue())).decode()
    return min(packed, png, key=len)


def said(notebook):
    """For each code cell what it printed, without what differs, and its number of pictures.

    A cell with the tag `times` prints times, sizes or what follows from them.
    """
    found = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        texts, pictures = [], 0
        for output in cell.outputs:
            data = output.get("data", {})
            pictures += "image/png" in data
            texts.append(output.get("text", "") or data.get("text/plain", ""))
        text = "".join(texts)
        if "times" in cell.metadata.get("tags", ()):
            text = "times" if text else ""
        for pattern, word in VOLATILE:
            text = pattern.sub(word, text)
        found.append((" ".join(text.split()), pictures))
    return found


def _main(numbers):
    for path in NOTEBOOKS:
        if numbers and path.stem[:2] not in numbers:
            continue
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(path, Path(folder, "cache"))
        for cell in notebook.cells:
            for output in cell.get("outputs", ()):
                if png := output.get("data", {}).get("image/png"):
                    output["data"]["image/png"] = _smaller(png)
        shown = nbformat.writes(notebook).replace(folder, "~")
        path.write_text(shown + "\n", encoding="utf-8")
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    _main(sys.argv[1:])
