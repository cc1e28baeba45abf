"""warm(): compile what a workload's calls will need, before the first of them comes."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flexattn.problem import FP8

if TYPE_CHECKING:
    from flexattn.device import Device
    from flexattn.kernels.choose.options import Options
    from flexattn.measure.task import Task
    from flexattn.problem import Problem
    from flexattn.runtime.candidates import Choice
    from flexattn.tuning.workload import Row, Workload

# Query rows of short prompts and chunks: decode serves them, with a tile for few rows or for more.
_SHORT = 1, 16
# The shortest prompt that prefill serves: all of its keys lie in one block of a mask. Over so many
# keys decode serves as many rows, of which also a single head's have the tile for more.
_ONE_BLOCK, _CHUNKED = 17, 1024


def warm(
    workload: str | Path | Mapping[str, Any] | Workload,
    device: torch.device | str = "cuda",
    return_lse: bool = False,
    *,
    allow: Sequence[str] = (),
) -> int:
    """Compile and verify every kernel that flex_attention runs for a workload's calls on a device.

    Of calls that are differentiated it compiles the forward with lse, and the gradients' kernels
    where this library's own serve; the small kernels around them compile at the first backward.
    Rows of plans are left out: make a DecodePlan for them.

    The kernels of a prefill also run for other lengths of prompts and chunks: another length
    compiles a kernel only if a tuned record names one. Those of a decode run for any number of
    keys. Call it when a server starts: it forgets what was traced before, so that numbers in mods
    are constants. A number that changes from call to call costs a kernel at its second value;
    captured as a tensor it costs none.

    Args:
        workload: a file as `flexattn tune` reads it, what such a file holds, or one that was read.
        device: the GPU.
        allow: modules beside flexattn.catalogue whose functions the workload may name, which runs
            their code.
        return_lse: the calls ask for the log-sum-exp.

    Returns:
        How many kernels were compiled.

    Raises:
        InputError: for a workload that cannot be read.
        ModError: for its mods.
        BuildError: if a kernel does not build.

    Example::

        flexattn.warm("my_model.toml", allow=["my_model"])
    """
    # Reading workloads belongs to tuning, which a plain import of flexattn does not load.
    from flexattn.device import detect, usable
    from flexattn.errors import BuildError, InputTypeError
    from flexattn.kernels.choose.options import NONE
    from flexattn.mods import bind
    from flexattn.runtime.build import builder
    from flexattn.runtime.decay_skip import sources
    from flexattn.tuning.tasks import mods_of, task_from
    from flexattn.tuning.workload import Workload, parse_workload, read

    if isinstance(workload, (str, Path)):
        workload = read(Path(workload), allow)
    elif isinstance(workload, Mapping):
        workload = parse_workload(workload, "workload", "warm(...)", allow)
    elif not isinstance(workload, Workload):
        raise InputTypeError(
            f"workload is a {type(workload).__name__}",
            "it is a workload file's path, what such a file holds, or one that was read",
        )
    where = usable(device)
    target, index = detect(where), -1 if where.type == "cpu" else where.index
    before, found = builder().compiled, []
    for row in workload.rows:
        if row.served is not None:
            continue
        mods = mods_of(row)
        for each in rows_like(row):
            # The blocks of its mask are found and listed on the device, which compiles the kernel
            # for that too, and loads torch's.
            task = task_from(each, *mods, target, where)
            structure = task.problem.structure
            if return_lse and row.kind != "backward":
                structure = replace(structure, lse=True)
            asked = replace(task.problem, structure=structure)
            config = verified(task, asked, NONE, where).config
            for options in () if row.kind == "backward" else at_other_sizes(asked, target):
                verified(task, asked, options, where)
            for source in () if row.kind == "backward" else sources(structure, config, target):
                with suppress(BuildError):  # a call goes on without it, and says so
                    builder().kernel(source, target, index)
        found.append(mods)
    for score_mod, mask_mod in found:
        bind(score_mod, "score")
        bind(mask_mod, "mask")
    # Compiling leaves many objects. A full collection, which takes 0.1 to 0.3 s in a process with
    # torch, would soon be due; after this one it is when many more are there.
    gc.collect()
    return builder().compiled - before


def verified(task: Task, problem: Problem, options: Options, where: torch.device) -> Choice:
    """The first choice for a task's problem whose kernels are right on a made-up call."""
    from flexattn.runtime.dispatch import dispatcher
    from flexattn.verify.first_use import LaunchedKernels, accepted
    from flexattn.verify.made_up import ChosenKernels, judge_backward, judge_forward
    from flexattn.verify.oracle import moved

    index = -1 if where.type == "cpu" else where.index
    judged = judge_backward if task.kind == "backward" else judge_forward
    score, mask = moved(task.score, where), moved(task.mask, where)
    lists = None if task.lists is None else task.lists.to(where)
    while True:
        choice = dispatcher().choose(problem, task.device, index, options)
        chosen = ChosenKernels(choice, where, task.scale, score, mask, lists)
        if accepted(LaunchedKernels.of(choice), [partial(judged, chosen)]):
            return choice


def at_other_sizes(problem: Problem, device: Device) -> Iterator[Options]:
    """What asks for the kernels that serve a problem's mods and head dimensions at other sizes."""
    from flexattn.kernels.choose.options import Options
    from flexattn.kernels.choose.registry import leading

    for family in leading(problem.structure, device):
        for config in family.at_other_sizes(problem, device):
            if not family.limits.violated(config, problem.structure, device):
                yield Options(exact=config)


def rows_like(row: Row) -> Iterator[Row]:
    """A row, then rows of its prompts at lengths that other kernels serve.

    Training has its own lengths, and a decode its query rows: of these there is the row alone.
    """
    yield row
    if row.lse or row.kind is not None or row.shape.q_len < _ONE_BLOCK:
        return
    keys = row.shape.kv_len
    lengths = [(q_len, kv_len) for q_len in _SHORT for kv_len in (q_len, keys)]
    for q_len, kv_len in (*lengths, (_ONE_BLOCK, _ONE_BLOCK)):
        yield replace(row, shape=replace(row.shape, q_len=q_len, kv_len=kv_len))
    if row.dtype not in FP8.values():  # which has no decode
        chunk = replace(row.shape, B=1, q_len=_ONE_BLOCK, kv_len=max(keys, _CHUNKED))
        yield replace(row, shape=chunk, kind="decode")
