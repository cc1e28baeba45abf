"""Rows of the benches as tuning tasks: the same shapes and mods, by import path."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import and_masks

from bench.rows import DOCUMENTS, MODELS, Row, Shape
from flexattn.catalogue.masks import MaskMod, causal, document
from flexattn.catalogue.scores import ScoreMod, relative_bias
from flexattn.device import Device
from flexattn.measure.task import Task
from flexattn.problem import Shape as Sizes
from flexattn.tune.tasks import task_of
from flexattn.tune.workload import ModPath, Row as Call

__all__ = ["STUDIED", "call_of", "documents", "relative", "task"]

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


def documents() -> MaskMod:
    """Causal inside documents, whose lengths do not end where blocks do."""
    ids = torch.arange(len(DOCUMENTS), dtype=torch.int32)
    return and_masks(document(ids.repeat_interleave(torch.tensor(DOCUMENTS))), causal)


def relative(heads: int, length: int) -> ScoreMod:
    """A bias for each head and distance."""
    table = torch.randn(heads, 2 * length, generator=torch.Generator().manual_seed(0))
    return relative_bias(table.to(torch.bfloat16), length)


def call_of(row: Row, dtype: str = "bfloat16") -> Call:
    """The row as a workload file would say it."""
    s = row.shape
    scores = {
        "none": None,
        "alibi": ModPath("flexattn.catalogue:alibi", (s.hq, "cpu")),
        "softcap": ModPath("flexattn.catalogue:softcap", (row.cap,)),
        "relative": ModPath("bench.tasks:relative", (s.hq, s.kv_len)),
    }
    masks = {
        "full": None,
        "causal": ModPath("flexattn.catalogue:causal"),
        "window": ModPath("flexattn.catalogue:sliding_window", (row.window,)),
        "documents": ModPath("bench.tasks:documents_mod"),
        "blocks": ModPath("bench.inputs:random_blocks", (s.kv_len, row.density)),
    }
    sizes = Sizes(s.batch, s.hq, s.hkv, s.q_len, s.kv_len, s.d, s.d)
    return Call(
        row.name, None, dtype, sizes, scores[row.score], masks[row.mask], (128, 128), None, ()
    )


def task(row: Row, device: Device, where: torch.device | str, dtype: str = "bfloat16") -> Task:
    """The task that tunes a row; `where` finds the blocks of its mask."""
    return task_of(call_of(row, dtype), device, torch.device(where))


# A mod is named by a path alone where its factory takes no arguments.
documents_mod = documents()
