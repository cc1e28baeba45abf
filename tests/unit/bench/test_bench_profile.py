"""What a profiler is given: rows that there are, on a GPU."""

import pytest
import torch

from bench import profile


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert profile.main(["mods-8k-softcap"]) == 2
    assert "needs one" in capsys.readouterr().err


def test_a_row_that_there_is_not_names_those_that_there_are(capsys):
    with pytest.raises(SystemExit):
        profile.main(["mods-9k-softcap"])
    assert "mods-8k-softcap" in capsys.readouterr().err
