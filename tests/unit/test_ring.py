"""Keys in shards on two processes, merged by lse: the example gives what one process gives."""

import socket

from tests.processes import ROOT, started


def test_two_processes_give_what_one_gives():
    """Output, lse and gradients, with masks and score mods in positions of the whole sequence."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "OMP_NUM_THREADS": 1
    }  # fmt: skip
    example = ROOT / "examples" / "ring_attention.py"
    both = [started(example, RANK=rank, **shared) for rank in range(2)]
    for process in both:
        out, said = process.communicate(timeout=300)
        assert process.returncode == 0, said[-2000:]
        assert "largest difference" in out
