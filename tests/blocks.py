"""Code blocks of pages: found with what a comment above says of them, and run one by one.

As a program it reads a list of blocks as JSON from its input, runs each in a namespace and a
folder of its own, and prints what each did wrong, "" for nothing. With the argument "types" it
runs mypy over the package and every Python block.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.processes import ROOT, environment

FENCE = re.compile(r"^(?:<!-- ([^\n]*?) -->\n)?```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
HIDE_GPU = "import torch; torch.cuda.is_available = lambda: False\n"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, which of that page's it is, and the comment above it."""

    page: str
    number: int
    note: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


def blocks(language, pages=PAGES):
    """The blocks of a language, page by page."""
    return [
        Block(page.name, number, found[0], found[2])
        for page in pages
        for number, found in enumerate(
            each for each in FENCE.findall(page.read_text(encoding="utf-8")) if each[1] == language
        )
    ]


def run(codes, interpret):
    """What each of the blocks did wrong, and printed, in one process without a GPU."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(codes),
        env=environment(interpret),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _main():
    exec(HIDE_GPU, {})
    results = []
    for number, code in enumerate(json.load(sys.stdin)):
        printed, wrong = io.StringIO(), ""
        # A mod's source is looked up by its file's name.
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
            os.chdir(folder)
            path = Path(folder, f"block_{number}.py")
            path.write_text(code)
            try:
                exec(compile(code, str(path), "exec"), {"__name__": f"block_{number}"})
            except BaseException:
                wrong = traceback.format_exc()
            os.chdir(ROOT)
        results.append([wrong, printed.getvalue()])
    print(json.dumps(results))


def check_types():
    """mypy's status for the package, and for each Python block as a module of its own."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "manual")
        package.mkdir()
        for block in blocks("python"):
            if not block.note.startswith("not run: it continues"):
                name = re.sub(r"\W", "_", str(block))
                (package / f"{name}.py").write_text(block.code)
        (package / "__init__.py").touch()
        return subprocess.call([sys.executable, "-m", "mypy", "flexattn", package], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(check_types() if sys.argv[1:] == ["types"] else _main())
