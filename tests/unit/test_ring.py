"""Keys in shards on two processes, merged by lse: the example gives what one process gives."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_processes_give_what_one_gives(tmp_path):
    """Output, lse and gradients, with masks and score mods in positions of the whole sequence."""
    ring = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*ring, str(ROOT / "examples" / "ring_attention.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("largest difference") == 2
