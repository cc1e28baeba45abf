"""Tasks for the problems that dispatch listed as untuned: their mods' expressions, masks alike."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from flexattn.block_mask.classify import EMPTY, FULL, PARTIAL
from flexattn.block_mask.create import from_kinds
from flexattn.device import Device
from flexattn.measure.task import Task
from flexattn.problem import Sparsity
from flexattn.problem.mask_class import mask_class, representative
from flexattn.records.untuned import Untuned, bound_of, read_untuned
from flexattn.runtime.key_lists import BothLists
from flexattn.runtime.launch import Lists
from flexattn.tune.workload import policy_for

NOTE = "rebuilt from a list of untuned problems: made-up captures, a mask of the same class"


def untuned_tasks(path: Path, device: Device) -> list[Task]:
    """A task for each problem of the list that was met on this device.

    The tensors that mods captured are made up in the shapes they had, and the mask's lists are
    those of a typical mask of its class.
    """
    return [_task(each, device) for each in read_untuned(path) if each.device == device.name]


def _task(untuned: Untuned, device: Device) -> Task:
    problem = untuned.problem
    structure = problem.structure
    sign = 1 if structure.positive_scale else -1
    lists = by_key = None
    if structure.sparsity is not None:
        heads = problem.Hq if structure.sparsity.per_head else 1
        lengths = problem.q_len, problem.kv_len
        mask = _block_mask(problem.mask_class, structure.sparsity, heads, lengths)
        lists = Lists.of(mask)
        if structure.kind == "backward":
            lists, by_key = BothLists.of(mask)
        runs = lists.runs is not None
        structure = replace(structure, sparsity=replace(structure.sparsity, runs=runs))
        problem = replace(problem, structure=structure)
    return Task(
        f"untuned {problem.describe()}",
        problem,
        device,
        policy_for(structure.kind, device),
        sign / math.sqrt(structure.head_dim_qk),
        None if untuned.score is None else bound_of(untuned.score),
        None if untuned.mask is None else bound_of(untuned.mask),
        lists,
        by_key,
    )


def _block_mask(name: str, sparsity: Sparsity, heads: int, lengths: tuple[int, int]) -> BlockMask:
    block = sparsity.q_block, sparsity.kv_block
    rows, columns = (-(-length // size) for length, size in zip(lengths, block, strict=True))
    kinds = _kinds(representative(name, rows, columns), sparsity.has_full)
    mask = from_kinds(
        kinds.expand(1, heads, rows, columns), noop_mask, block, lengths, sparsity.has_full
    )
    mask_class(mask)  # finds the runs that its lists may have
    return mask


def _kinds(listed: Tensor, has_full: bool) -> Tensor:
    """Where full blocks are listed apart, the last block of each row alone is partial."""
    if not has_full:
        return torch.where(listed, PARTIAL, EMPTY).to(torch.int8)
    last = listed & (listed.flip(-1).cumsum(-1).flip(-1) == 1)
    return torch.where(last, PARTIAL, torch.where(listed, FULL, EMPTY)).to(torch.int8)
