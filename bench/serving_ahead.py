"""Compile the kernels of serving rows in child processes, before the first of them is timed."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import torch

from bench.serving_inputs import DTYPES, mods_of
from bench.serving_rows import ServingRow
from flexattn.device import Device
from flexattn.kernels.paged_decode.source import render_serving, render_serving_combine
from flexattn.kernels.paged_decode.space import serving_candidates
from flexattn.mods import bind
from flexattn.runtime.build import compile_source
from flexattn.serving.cache import asked_scales
from flexattn.serving.request import Maxima, form_of

__all__ = ["compile_ahead", "compiled"]

MOST = 16  # processes


def compile_ahead(rows: Sequence[ServingRow], device: Device) -> None:
    """Leave the rows' default kernels in Triton's cache on disk, where the plans find them.

    The launches of a cascade or a tree are compiled when its plan is made, and so is what does not
    compile here: that is printed, and no row is lost for it.
    """
    found = [row for row in rows if row.variant not in ("cascade", "prefix-tree")]
    count = min(MOST, len(found), os.cpu_count() or 1)
    if count < 2:
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=spawn) as pool:
        try:
            for told in filter(None, pool.map(partial(compiled, device=device), found)):
                print(told, flush=True)
        except BrokenProcessPool as error:
            print(f"nothing more is compiled ahead: {error}", flush=True)


def compiled(row: ServingRow, device: Device) -> str:
    """Compile a row's kernels; why that cannot be, or nothing."""
    try:
        _compile(row, device)
    except Exception as error:
        return f"{row.name} is not compiled ahead: {type(error).__name__}: {error}"
    return ""


def _compile(row: ServingRow, device: Device) -> None:
    dtype = DTYPES[row.dtype]
    kv = torch.float8_e4m3fn if row.eight_bits else dtype
    maxima = Maxima(
        len(row.lens), row.q_len, 0, max(row.lens), row.hq, row.hkv, row.d, row.dv, dtype,
        kv, row.page, "NHD",
    )  # fmt: skip
    score, mask = mods_of(row, torch.tensor(row.lens, dtype=torch.int32), "cpu")
    cpu = torch.device("cpu")
    form = form_of(
        maxima, bind(score, "score", cpu), bind(mask, "mask", cpu), sinks=row.variant == "sinks",
        shared_kv=row.variant == "mla", **asked_scales(row.scaled, row.page)._asdict(),
    )  # fmt: skip
    config = next(serving_candidates(form, device))
    compile_source(render_serving(form, config, device, row.name), device)
    if config.merges_apart:
        compile_source(render_serving_combine(form, config, device), device)
