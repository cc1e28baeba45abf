"""A process that compiled a kernel ends without a word about it."""

import subprocess
import sys
from pathlib import Path

import pytest

from flexattn.settings import child_environment

pytestmark = pytest.mark.compile


def test_a_command_that_compiled_reports_no_leaks(tmp_path):
    """Triton 3.9 ended every compile for Hopper with pages of "nanobind: leaked"."""
    environment = child_environment(interpret=False) | {
        "FLEXATTN_CACHE_DIR": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    command = "render", "noop", "--backend", "GLUON", "--head-dim", "64", "--show", "resources"
    done = subprocess.run(
        [sys.executable, "-m", "flexattn", *command],
        capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0 and "registers=" in done.stdout, done.stderr
    assert "nanobind" not in done.stderr
