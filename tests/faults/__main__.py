"""Plant each fault in a copy of the sources, and run the test that must fail with it.

    python -m tests.faults [--rows REGEX]

First all of these tests run as the sources are. It ends with 1 where one fails then, and where a
fault is not caught or its text not found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults import FAULTS
from tests.faults.fault import ROOT, Fault

COPIED = ("flexattn", "templates", "tests")
# Of one test with a fault, which may loop for ever.
SECONDS = 120
MODES = ("TRITON_INTERPRET", "FLEXATTN_INTERPRET")
# What most tests import beside this repository's modules: a process has it before it forks.
SHARED = (
    "jinja2",
    "numpy",
    "pytest",
    "torch._dynamo",
    "torch.nn.attention.flex_attention",
    "triton",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--rows", default="", help="faults whose name or file has this in it")
    parser.add_argument("--of", choices=("interpreted", "compiled"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    rows = [each for each in FAULTS if re.search(asked.rows, f"{each.name} {each.file}")]
    if asked.of:
        return _run([each for each in rows if each.interpreted == (asked.of == "interpreted")])
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.faults", "--rows", asked.rows, "--of", of],
            env=_environment(of == "interpreted"), cwd=ROOT,
        )
        for of in ("interpreted", "compiled")
    ]  # fmt: skip
    return max(child.wait() for child in children)


def _environment(interpreted: bool) -> dict[str, str]:
    """That of a process of tests, which holds one of Triton's two modes."""
    found = {name: value for name, value in os.environ.items() if name not in MODES}
    return found | {"OMP_NUM_THREADS": "1"} | dict.fromkeys(MODES * interpreted, "1")


def _run(rows: Sequence[Fault]) -> int:
    """Plant one fault after the other; returns 1 where one of them is not caught."""
    if not rows:
        return 0
    for name in SHARED:
        __import__(name)
    with tempfile.TemporaryDirectory() as folder:
        root = _copy(Path(folder, "copy"))
        os.environ["FLEXATTN_CACHE_DIR"] = f"{folder}/cache"
        status, said = _pytest(root, list(dict.fromkeys(each.test for each in rows)), 20 * SECONDS)
        if status:
            print(f"without a fault, status {status}:\n{said}", flush=True)
            return 1
        verdicts = [_verdict(root, each) for each in rows]
    print(f"{verdicts.count('caught')} of {len(rows)} faults are caught", flush=True)
    return int(set(verdicts) != {"caught"})


def _copy(root: Path) -> Path:
    """The sources in a folder of their own; what tests only read is linked."""
    root.mkdir()
    for each in ROOT.iterdir():
        if each.name in COPIED:
            shutil.copytree(each, root / each.name)
        elif not each.name.startswith(".git"):
            (root / each.name).symlink_to(each)
    return root


def _verdict(root: Path, fault: Fault) -> str:
    """Plant a fault, run its test, take the fault out again, and say what came of it."""
    place, before = root / fault.file, time.monotonic()
    try:
        text, seen = place.read_text(encoding="utf-8"), place.stat()
        planted = fault.planted(text)
    except (OSError, ValueError) as error:
        print(f"not found          {fault.name} | {error}", flush=True)
        return "not found"
    try:
        place.write_text(planted, encoding="utf-8")
        status, said = _pytest(root, [fault.test], SECONDS)
    finally:
        place.write_text(text, encoding="utf-8")
        os.utime(place, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    found = {0: "missed", 1: "caught"}.get(status, f"pytest's status {status}")
    print(
        f"{found:10} {time.monotonic() - before:4.0f} s  {fault.name} | {fault.test}", flush=True
    )
    if status != 1:
        print(said, flush=True)
    return found


def _pytest(root: Path, tests: list[str], seconds: int) -> tuple[int, str]:
    """pytest's status and output, in a fork of this process that imports from the copy alone.

    It is killed after so many seconds, which gives the status of a signal.
    """
    said = root.with_suffix(".txt")
    child = os.fork()
    if not child:
        status = 3
        try:
            _become(root, said)
            import pytest

            options = "-q -x -p no:cacheprovider -p no:xdist --show-capture=no --tb=short".split()
            status = int(pytest.main([*options, *tests]))
        finally:
            os._exit(status)
    end, ended = time.monotonic() + seconds, (0, 0)
    while not ended[0]:
        time.sleep(0.05)
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
        ended = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(ended[1]), said.read_text(encoding="utf-8", errors="replace")


def _become(root: Path, said: Path) -> None:
    """Import this repository's modules from the copy, without bytecode, and write to a file."""
    ours = {each.name for each in root.iterdir()}
    for name in [name for name in sys.modules if name.split(".")[0] in ours]:
        del sys.modules[name]
    sys.path[:] = [str(root), *(each for each in sys.path if each not in ("", str(ROOT)))]
    os.chdir(root)
    os.setpgid(0, 0)  # what a test starts is killed with it
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)


if __name__ == "__main__":
    raise SystemExit(main())
