"""`python -m bench.releases`: kernels that two Tritons compiled, raced in one process.

    python -m bench.releases compile DIR     with each Triton, on any machine: no GPU is needed
    python -m bench.releases race A B        on a GPU: what dispatch took there, interleaved

One process holds one Triton, and times of two processes drift apart. So each Triton's kernels are
compiled ahead, those that dispatch takes for the prefill grid and its mods, and loaded from there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

import flexattn
from bench.inputs import Inputs, make
from bench.peers import OURS, Peer, Refusal, ours
from bench.results import save
from bench.rows import Row, prefill_rows
from bench.runner import Method, run
from bench.table import markdown
from flexattn.device import Device, named
from flexattn.frontend.call import make_call
from flexattn.frontend.plan import plan
from flexattn.kernels.base.config import describe
from flexattn.kernels.base.source import Source
from flexattn.kernels.choose.options import NONE, Options
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.hopper.space import preferences
from flexattn.kernels.ptx.assembler import PTXAS
from flexattn.mods import bind
from flexattn.problem import Layout, Problem, Shape, make_problem
from flexattn.problem.mask_lists import mask_class
from flexattn.runtime.build import Kernel, builder, unloaded
from flexattn.runtime.dispatch import Dispatcher, chosen
from flexattn.runtime.kernel_store import KernelStore
from flexattn.runtime.launch import Lists, prepare_launch

H200 = named("nvidia-h200")


def rows() -> Iterator[Row]:
    """The grid and its mods; a kernel of random lists is one of lists."""
    for row in prefill_rows():
        if row.group in ("grid", "mods") and row.mask != "blocks":
            yield row


def problem_of(row: Row) -> Problem:
    """A row as a call of aligned tensors sees it; lengths decide no kernel, so short ones do."""
    s = row.shape
    length = s.q_len if row.score == "relative" or row.mask == "documents" else 2048
    x = make(
        replace(row, shape=replace(s, batch=1, q_len=length, kv_len=length)), "cpu", torch.bfloat16
    )
    mask = sparsity = None
    if x.mask_mod is not None:
        blocks = flexattn.create_block_mask(x.mask_mod, None, None, length, length, "cpu")
        mask_class(blocks)
        sparsity = Lists.of(blocks).sparsity(blocks.BLOCK_SIZE, s.hq // s.hkv)
        mask = bind(x.mask_mod, "mask")
    shape = Shape(1, s.hq, s.hkv, length, length, s.d, s.d)
    layout, score = Layout(True, True, True, True), bind(x.score_mod, "score")
    return make_problem("prefill", "bfloat16", shape, score, mask, sparsity, layout, lse=False)


def compiled(root: Path) -> None:
    """Write what dispatch takes for each row with this process's Triton."""
    store, build = KernelStore(root), partial(unloaded, device=H200)
    for row in rows():
        choice, kernel, _ = chosen(problem_of(row), H200, NONE, build)
        if kernel.binary is not None:
            store.write_binary(choice.source, kernel.binary, triton.__version__)
        print(f"{row.name:20} {choice.config.language} {describe(choice.config)}", flush=True)


class _Stored:
    """A builder that loads a directory's kernels; small ones beside them are compiled here."""

    def __init__(self, root: Path) -> None:
        self._store = KernelStore(root)

    def kernel(self, source: Source, device: Device, index: int) -> Kernel:
        found = self._store.binary(source, device) if source.language == "gluon" else None
        if found is not None:
            return Kernel(source, None, index, found)
        return builder().kernel(source, device, index)


def stored(root: Path) -> Peer:
    """Ours with the kernel that lies in a directory."""

    def build(x: Inputs) -> Callable[[], Tensor] | Refusal:
        mask = None
        if x.mask_mod is not None:
            lengths = x.row.shape.q_len, x.row.shape.kv_len
            mask = flexattn.create_block_mask(x.mask_mod, None, None, *lengths, x.q.device)
        made = plan(make_call(x.q, x.k, x.v, x.score_mod, mask, None, x.gqa, False, None, None))
        problem, device = made.launch.problem, made.launch.choice.device
        config = _config_of(root, problem, device)
        if config is None:
            return Refusal(f"{root} has no kernel of Hopper's template for it")
        launch = prepare_launch(
            problem, device, x.q.device, Dispatcher(_Stored(root)),  # type: ignore[arg-type]
            Options(exact=config), x.q, x.k, x.v, made.lists, x.descales,
        )  # fmt: skip
        exact = made._replace(launch=launch)
        return lambda: exact.run().out

    return build


def _config_of(root: Path, problem: Problem, device: Device) -> HopperPrefillConfig | None:
    """Which config a directory has for a problem: any that dispatch may have taken."""
    from flexattn.kernels.choose.registry import family_of

    store = KernelStore(root)
    for start in preferences(problem.structure):
        for ptxas in PTXAS:
            for merge in (True, False):
                config = replace(start, ptxas=ptxas, merge_consumers=merge)
                source = family_of(config).render(
                    problem.structure, config, device, "bench.releases"
                )
                if store.path(source, device.arch).exists():
                    return config
    return None


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.releases", description=__doc__)
    parser.add_argument("what", choices=["compile", "race"])
    parser.add_argument("roots", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    asked = parser.parse_args()
    if asked.what == "compile":
        compiled(asked.roots[0])
        return 0
    peers = {OURS: ours} | {f"{OURS}-{root.name}": stored(root) for root in asked.roots}
    report = run("releases", rows(), peers, Method(rounds=asked.rounds, min_ms=10.0))
    if asked.out:
        save(report, asked.out)
    print(markdown(report))
    return int(any(OURS in row.refused for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
