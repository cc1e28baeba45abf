"""Rope: which columns it rotates, and by which angles."""

import pytest
import torch

from flexattn.errors import InputError
from flexattn.serving import Rope


def test_angles_are_those_of_models():
    found = Rope(64, base=10000.0).inv_freq()
    wanted = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert found.dtype == torch.float32 and found.shape == (32,)
    assert ((found.double() - wanted).abs() <= 2e-7 * wanted).all()


def test_what_no_head_has_is_refused():
    for rope, said in (
        (Rope(63), "even"), (Rope(0), "even"), (Rope(130), "at most all of a head"),
        (Rope(64, base=0.0), "above 0"), (Rope(64, table=torch.int32), "cos and sin are of"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            rope.form(128)
    assert Rope(64, True).form(128).table == "float32"
    assert Rope(64, base=1e4).form(64).table == ""
