"""Tasks: of a workload's rows, of plans, and of the problems that dispatch listed as untuned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from flexattn.block_mask.classify import EMPTY, FULL, PARTIAL, block_kinds
from flexattn.block_mask.create import from_kinds
from flexattn.device import Device
from flexattn.errors import InputError
from flexattn.kernels.base.config import values
from flexattn.measure.task import Task
from flexattn.mods import Bound, bind, look
from flexattn.mods.bind import clear
from flexattn.mods.path import load_path, role_of
from flexattn.problem import DTYPES, FP8, Shape, Sparsity, checks, kind_for, make_problem
from flexattn.problem.facts import products_for, torch_setting
from flexattn.problem.mask_lists import mask_class, representative
from flexattn.problem.serving import KV_DTYPES, Lengths
from flexattn.records.record import Key, Policy, key_of
from flexattn.records.untuned import Untuned, bound_of, read_untuned
from flexattn.runtime.backward import slots_of
from flexattn.runtime.key_lists import BothLists
from flexattn.runtime.launch import Lists
from flexattn.serving.kernels import plan_problem
from flexattn.serving.verified import batch_lengths
from flexattn.tuning.workload import ModPath, Row, policy_for
from flexattn.verify.oracle import moved


def tasks(
    rows: Iterable[Row], device: Device, where: torch.device | str = "cpu"
) -> Iterator[Task]:
    """A Task for each row, one after the other; `where` decides the blocks of its mask.

    Rows of plans are left out: `plan_task` is theirs.
    """
    for row in rows:
        if row.served is None:
            yield task_of(row, device, torch.device(where))


def plan_task(row: Row, device: Device) -> Task:
    """The task of a plan's row, its mods traced as a fresh process would."""
    served, shape = row.served, row.shape
    assert served is not None
    clear()
    score_mod, mask_mod = mods_of(row)
    score, mask = (
        moved(bind(*each), "cpu") for each in ((score_mod, "score"), (mask_mod, "mask"))
    )
    return serving_task(
        row.title, shape, row.dtype, device, policy_for("serving", device, row.policy),
        checks.check_scale(row.scale, shape.D), score, mask, sinks=row.sinks, **values(served),
    )  # fmt: skip


def distinct(found: Iterable[Task]) -> tuple[list[Task], list[tuple[Task, Task]]]:
    """The first task of each key, and the others, each with the one that stands for it."""
    first: dict[Key, Task] = {}
    others = []
    for task in found:
        kept = first.setdefault(key_of(task.problem), task)
        if kept is not task:
            others.append((task, kept))
    return list(first.values()), others


def task_of(row: Row, device: Device, where: torch.device) -> Task:
    """Import a row's mods, trace them as a fresh process would, and list its mask's blocks.

    Raises InputError for a mod that cannot be imported, ModError for one that cannot be read.
    """
    if row.served is not None:
        return plan_task(row, device)
    return task_from(row, *mods_of(row), device, where)


def mods_of(row: Row) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """A row's score_mod and mask_mod, imported and called with their arguments."""
    if row.made is not None:
        return row.made()
    return _made(row.score, "score", row), _made(row.mask, "mask", row)


def task_from(
    row: Row,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    device: Device,
    where: torch.device,
) -> Task:
    """The task of a row's sizes with these mods, whatever the row says of mods.

    where: the device that finds the blocks of its mask.
    """
    shape = row.shape
    # What was traced before decides whether a number is a constant or an argument, and so the
    # key: a server that sees this model first has constants.
    clear()
    found = bind(score_mod, "score")
    if score_mod is not None and row.kind == "backward":
        found = look(score_mod, "score")[0]
    slots = slots_of(found) if row.kind == "backward" else ()
    score, mask = moved(found, "cpu"), moved(bind(mask_mod, "mask"), "cpu")
    lists = by_key = sparsity = None
    name = ""
    fp8 = row.dtype in FP8.values()
    if mask_mod is not None and mask is not None:
        block_mask = _block_mask(mask_mod, mask, row, where)
        name = mask_class(block_mask)
        lists = Lists.of(block_mask)
        if row.kind == "backward":
            lists, by_key = BothLists.of(block_mask)
        group = 1 if row.kind == "backward" else shape.Hq // shape.Hkv
        sparsity = lists.sparsity(row.block_size, group)
        cpu = torch.device("cpu")
        lists, by_key = lists.to(cpu), by_key and by_key.to(cpu)
    kind = row.kind or kind_for(shape, device.num_sms, fp8, device.has_wgmma, sparsity)[0]
    scale = checks.check_scale(row.scale, shape.D)
    setting = torch_setting() if row.dtype == "float32" else "ieee"
    dims = shape.D, shape.Dv
    options: dict[str, Any] = {
        "mask_class": name,
        "fp32_products": products_for(setting, kind, dims, device.capability, False),
    }
    if kind == "backward":
        # Neither a scale's sign nor a sink, which lse has in it, decides anything in its kernel.
        options |= {"grads": slots}
    else:
        sinks = "" if not row.sinks else "bfloat16" if fp8 else row.dtype
        options |= {"lse": row.lse, "positive_scale": scale > 0, "sinks": sinks}
    return Task(
        row.title,
        make_problem(kind, row.dtype, shape, score, mask, sparsity, **options),
        device,
        policy_for(kind, device, row.policy),
        scale,
        score,
        mask,
        lists,
        by_key,
    )


def _block_mask(
    mask_mod: Callable[..., Any], mask: Bound, row: Row, where: torch.device
) -> BlockMask:
    """The mask, on the device that finds its blocks.

    There its lists are made too, as those of a call are: torch loads each of its kernels at its
    first use, and warm() is to come before the calls.
    """
    names = mask.mod.expr.variables
    shape, lengths = row.shape, (row.shape.q_len, row.shape.kv_len)
    sizes = (shape.B if "b" in names else 1, shape.Hq if "h" in names else 1, *lengths)
    rows, columns = (-(-n // size) for n, size in zip(lengths, row.block_size, strict=True))
    if (blocks := sizes[0] * sizes[1] * rows * columns) >= 2**31:
        raise InputError(
            f"{row.title or 'a mask'}: {blocks} blocks of {row.block_size}",
            "a kernel counts the blocks of a mask in 32 bits",
            "use larger blocks, or shorter lengths",
        )
    there = moved(mask, where)
    assert there is not None
    kinds = block_kinds(there, sizes, row.block_size, where)
    return from_kinds(kinds, mask_mod, row.block_size, lengths)


def _made(mod: ModPath | None, role: str, row: Row) -> Callable[..., Any] | None:
    if mod is None:
        return None
    found = load_path(mod.path, _filled(mod.args, row))
    hint = "name the factory's arguments: { mod = …, args = […] }"
    if (is_role := role_of(mod.path, found, hint)) != role:
        raise InputError(f"{row.title}: {role} = {mod.path!r}", f"it is a {is_role}_mod")
    return found


def _filled(args: Sequence[object], row: Row) -> list[object]:
    return [
        getattr(row.shape, arg[1:]) if isinstance(arg, str) and arg.startswith("$") else arg
        for arg in args
    ]


def serving_task(
    title: str,
    shape: Shape,
    dtype: str,
    device: Device,
    policy: Policy,
    scale: float,
    score: Bound | None,
    mask: Bound | None,
    *,
    lengths: Lengths = "uniform",
    kv_dtype: str = "",
    scaled: str = "",
    **plan: Any,
) -> Task:
    """A plan whose maxima are the sizes of a shape, with a batch of this class.

    kv_dtype: "" for dtype; a cache of eight bits has scales, of what `scaled` says. plan: more of
    what `plan_problem` takes. Raises InputError for what no plan is made for.
    """
    named = {name: each for each, name in KV_DTYPES.items()}
    kv = named.get(kv_dtype or dtype)
    if kv is None:
        raise InputError(f"kv_dtype {kv_dtype!r}", f"it is one of {', '.join(named)}")
    q_lens, kv_lens = batch_lengths(lengths, shape.B, shape.q_len, shape.kv_len)
    widths = {name: each for each, name in DTYPES.items()}
    if dtype not in widths:
        rule = f"queries of a plan are {', '.join(widths)}"
        raise InputError(f"dtype {dtype!r}", rule, "say float8_e4m3fn in kv_dtype, for the cache")
    problem = plan_problem(
        batch=shape.B, kv_len=shape.kv_len, heads=(shape.Hq, shape.Hkv),
        head_dim=(shape.D, shape.Dv), q_len=shape.q_len,
        total_q=sum(q_lens) if lengths == "mixed" else 0, dtype=widths[dtype], kv_dtype=kv,
        score=score, mask=mask, scaled=scaled or kv.itemsize == 1, positive_scale=scale > 0,
        lengths=lengths, **plan,
    )  # fmt: skip
    return Task(title, problem, device, policy, scale, score, mask, q_lens=q_lens, kv_lens=kv_lens)


NOTE = "rebuilt from a list of untuned problems: made-up captures, a mask of the same class"


def untuned_tasks(path: Path, device: Device) -> list[Task]:
    """A task for each problem of the list that was met on this device.

    The tensors that mods captured are made up in the shapes they had, and the mask's lists are
    those of a typical mask of its class.
    """
    return [
        _untuned_task(each, device) for each in read_untuned(path) if each.device == device.name
    ]


def _untuned_task(untuned: Untuned, device: Device) -> Task:
    problem = untuned.problem
    structure = problem.structure
    sign = 1 if structure.positive_scale else -1
    lists = by_key = None
    if structure.sparsity is not None:
        heads = problem.Hq if structure.sparsity.per_head else 1
        lengths = problem.q_len, problem.kv_len
        mask = _typical_mask(problem.mask_class, structure.sparsity, heads, lengths)
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


def _typical_mask(
    name: str, sparsity: Sparsity, heads: int, lengths: tuple[int, int]
) -> BlockMask:
    block = sparsity.q_block, sparsity.kv_block
    rows, columns = (-(-length // size) for length, size in zip(lengths, block, strict=True))
    kinds = _kinds(representative(name, rows, columns), sparsity.has_full)
    mask = from_kinds(
        kinds.expand(1, heads, rows, columns), noop_mask, block, lengths, sparsity.has_full
    )
    mask_class(mask)  # finds the runs that its lists may have
    return mask


def _kinds(listed: Tensor, has_full: bool) -> Tensor:
    """The kinds of listed blocks: partial, or with has_full full except each row's last one."""
    if not has_full:
        return torch.where(listed, PARTIAL, EMPTY).to(torch.int8)
    last = listed & (listed.flip(-1).cumsum(-1).flip(-1) == 1)
    return torch.where(last, PARTIAL, torch.where(listed, FULL, EMPTY)).to(torch.int8)
