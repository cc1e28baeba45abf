"""DDP, FSDP2 and checkpointing: two processes have the gradients of one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flexattn.settings import child_environment


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
@pytest.mark.long
def test_two_ranks_have_the_gradients_of_one(tmp_path):
    """`tests/training_rank.py` holds them, of a GPT whose score_mods capture a parameter each."""
    command = [sys.executable, "-m", "tests.training_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], env=child_environment(interpret=True),
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, said, strict=True):
        assert rank.returncode == 0, text[-3000:]
        assert "fsdp checkpointed" in text
