"""Keys in shards on two processes, merged by lse: the example gives what one process gives."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_processes_give_what_one_gives(tmp_path):
    """Output, lse and gradients, with masks and score mods in positions of the whole sequence."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    both = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / "ring_attention.py")],
            env={**os.environ, **shared, "RANK": str(rank)}, cwd=tmp_path, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in both:
        out, said = process.communicate(timeout=300)
        assert process.returncode == 0, said[-2000:]
        assert "largest difference" in out
