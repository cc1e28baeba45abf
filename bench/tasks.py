"""Rows of the benches as tuning tasks: the same shapes and mods, by import path."""

from __future__ import annotations

from typing import Any

import torch

from bench.inputs import mask_of, score_of
from bench.rows import MODELS, Row, Shape
from flexattn.device import Device
from flexattn.measure.task import Task
from flexattn.problem import Shape as Sizes
from flexattn.tuning.tasks import task_of
from flexattn.tuning.workload import ModPath, Row as Call

GEMMA, LLAMA = MODELS["gemma2-9b-local"], MODELS["llama3-8b"]
# The problems that are measured whole and kept: mods, head dims and lengths that differ most.
STUDIED = (
    Row("prefill-d128-4k-causal", "grid", Shape(2, 16, 16, 4096, 4096, 128), "causal"),
    Row("prefill-d64-4k-full", "grid", Shape(2, 16, 16, 4096, 4096, 64)),
    Row(
        "prefill-gemma2-local-8k", "models", GEMMA.prefill(1, 8192), "window", "softcap",
        GEMMA.window, GEMMA.softcap,
    ),
    Row("prefill-d128-8k-documents", "mods", Shape(1, 16, 16, 8192, 8192, 128), "documents"),
    Row("decode-b1-8k", "grid", LLAMA.decode(1, 8192)),
    Row("decode-b8-8k", "grid", LLAMA.decode(8, 8192)),
    Row("decode-b64-4k", "grid", LLAMA.decode(64, 4096)),
    Row("decode-b1-128k", "grid", LLAMA.decode(1, 131072)),
)  # fmt: skip


def score_mod(row: Row) -> Any:
    """The score_mod of a row; a bias by distance is random."""
    table, draw = None, torch.Generator().manual_seed(0)
    if row.score == "relative":
        table = torch.randn(row.shape.hq, 2 * row.shape.kv_len, generator=draw).bfloat16()
    return score_of(row, table, "cpu")


def mask_mod(row: Row) -> Any:
    """The mask_mod of a row."""
    return mask_of(row, "cpu")


def call_of(row: Row) -> Call:
    """The row as a workload file would say it."""
    s = row.shape
    score = None if row.score == "none" else ModPath("bench.tasks:score_mod", (row,))
    mask = None if row.mask == "full" else ModPath("bench.tasks:mask_mod", (row,))
    sizes = Sizes(s.batch, s.hq, s.hkv, s.q_len, s.kv_len, s.d, s.d)
    return Call(row.name, None, row.dtype or "bfloat16", sizes, score, mask, (128, 128), None, ())


def task(row: Row, device: Device, where: torch.device | str) -> Task:
    """The task that tunes a row; `where` finds the blocks of its mask."""
    return task_of(call_of(row), device, torch.device(where))
