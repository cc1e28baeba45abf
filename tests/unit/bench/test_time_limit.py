"""A process that waits for a GPU without end is ended, and says where it was."""

import subprocess
import sys

from tests.processes import ROOT

# As a CUDA call that never returns, and with Python's lock held.
WAIT = "import ctypes\n\ndef stuck():\n    ctypes.PyDLL(None).sleep(60)\n"


def ended(*arguments, folder):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={"PYTHONPATH": f"{ROOT}:{folder}"},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_a_wait_that_holds_pythons_lock_is_ended(tmp_path):
    (tmp_path / "waiting.py").write_text(WAIT)
    script = (
        "from bench.time_limit import time_limit\nimport waiting\n"
        "with time_limit(20):\n    print('in time')\n"
        "with time_limit(0.2):\n    waiting.stuck()\n"
    )
    status, said = ended("-c", script, folder=tmp_path)
    assert status == 1 and "in stuck" in said


def test_a_test_of_a_gpu_is_ended(tmp_path):
    """Also where it hangs in a fixture, and although pytest has put its own file behind stderr."""
    (tmp_path / "waiting.py").write_text(WAIT)
    (tmp_path / "conftest.py").write_text((ROOT / "tests/gpu/conftest.py").read_text())
    (tmp_path / "test_hang.py").write_text(
        "import pytest\nimport waiting\n\n@pytest.fixture\ndef hang():\n    waiting.stuck()\n\n"
        "@pytest.mark.timeout(1)\ndef test_hangs(hang):\n    pass\n"
    )
    status, said = ended("-m", "pytest", "-q", "-p", "no:timeout", "test_hang.py", folder=tmp_path)
    assert status == 1 and "in stuck" in said and "Timeout" in said
