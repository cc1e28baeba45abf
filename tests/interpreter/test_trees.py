"""Rows of `bench.trees` whose plans need kernels: what they compute passes their own check."""

from __future__ import annotations

import pytest
import torch

from bench.trees_child import plan_case
from bench.trees_rows import race_rows, shrunk


@pytest.mark.parametrize(
    "name",
    ["1984-of-8k-64x4k-fp8", "b8-8k-q8-tree", "b64-3-levels-tree", "b32-8k-256-cascade"],
)
def test_a_plans_row_passes_its_check(name):
    row = shrunk(race_rows()[f"serving/{name}"], 256)
    torch.manual_seed(0)
    with torch.no_grad():
        assert plan_case(row, "cpu").check() == ""
