"""kernel(): two mods and the shapes of a call as an NKI kernel with all that it is called with.

The public way to Trainium, written from the documentation of NKI 0.7 and torch-neuronx 2.14
(Neuron SDK 2.33) and tested with stand-ins for both. No device has run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.create import create_block_mask
from flexattn.device import NEURON
from flexattn.device.neuroncore import CORES
from flexattn.errors import ConfigError, InputError, UnsupportedError
from flexattn.mods import Bound, bind
from flexattn.mods.expr import MaskMod, ScoreMod
from flexattn.neuron.config import CHUNK, NkiConfig, NkiPrefillConfig, visits_of
from flexattn.neuron.family import default_config, target_reasons
from flexattn.neuron.instance import driver_target
from flexattn.neuron.run import Prepared, prepare
from flexattn.problem import DTYPES, FP8, Problem, Shape, checks, kind_for, make_problem
from flexattn.problem.mask_lists import keeps_all
from flexattn.runtime.launch import Lists, Outputs
from flexattn.settings import neuron_names
from flexattn.verify.oracle import moved

_CPU = torch.device("cpu")


def kernel(
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | BlockMask | None,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    scale: float | None = None,
    return_lse: bool = False,
    target: str = "trn2",
    cores: int | None = None,
    config: NkiConfig | None = None,
) -> Prepared:
    """The kernel of flex_attention for two mods and shapes, on a target such as "trn2".

    Called with q, k and v it runs where AWS's packages are; `interpret` of them runs anywhere. Its
    `function` is what nki.jit makes, and `arguments(q, k, v)` what that takes: the schedule of key
    tiles, and tables of what the mods read of the tensors that they capture now.

    q_shape [B, Hq, L, E], k_shape [B or 1, Hkv, S, E], v_shape [B or 1, Hkv, S, Ev], k_shape where
    None. mask_mod: or a BlockMask of one. scale: 1/sqrt(E) where None. cores: physical cores of a
    logical one, which share the rows: 1 or 2; where None what NEURON_LOGICAL_NC_CONFIG says, else
    the compiler's default. config: the first that fits where None.

    Raises InputError, ModError, ConfigError, and UnsupportedError for what the target cannot
    express.
    """
    shapes = tuple(q_shape), tuple(k_shape), tuple(k_shape if v_shape is None else v_shape)
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    checks.check_tensors(q, k, v, True)
    block_mask = None
    if isinstance(mask_mod, BlockMask):
        block_mask, mask_mod = mask_mod, mask_mod.mask_mod
        checks.check_block_mask(block_mask, q, k)
    mask = bind(mask_mod, "mask")
    if mask_mod is not None and mask is not None and block_mask is None:
        read = mask.mod.expr.variables
        B, H = (size if name in read else None for name, size in zip("bh", q.shape, strict=False))
        block_mask = create_block_mask(mask_mod, B, H, q.shape[2], k.shape[2], "cpu")
    return _prepared(
        (q, k, v), bind(score_mod, "score"), mask, block_mask,
        checks.check_scale(scale, q.shape[-1]), (return_lse, False), target, cores, config,
    )  # fmt: skip


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Bound | None,
    mask: Bound | None,
    block_mask: BlockMask | None,
    scale: float,
    statistics: tuple[bool, bool],
) -> Outputs:
    """As Plugin.attend; raises UnsupportedError where AWS's packages are not those of SDK 2.33."""
    target, why = neuron_names()[0], ""
    if not target:
        target, why = driver_target()
    if not target:
        raise UnsupportedError(
            f"query is on {q.device}", why, "set NEURON_PLATFORM_TARGET_OVERRIDE to trn2 or trn3"
        )
    run = _prepared((q, k, v), score, mask, block_mask, scale, statistics, target, None, None)
    found = run(q, k, v)
    return Outputs(found.out, found.lse, found.max_scores)


def _prepared(
    tensors: tuple[Tensor, Tensor, Tensor],
    score: Bound | None,
    mask: Bound | None,
    block_mask: BlockMask | None,
    scale: float,
    statistics: tuple[bool, bool],
    target: str,
    cores: int | None,
    config: NkiConfig | None,
) -> Prepared:
    q, k, v = tensors
    if target not in CORES:
        raise InputError(f"target={target!r}", f"it is one of {', '.join(CORES)}")
    cores = cores_of(target, cores)
    if q.dtype in FP8 or checks.mixes(q, k):
        raise UnsupportedError(
            f"query is {q.dtype}, key {k.dtype}, for {target}",
            "kernels for Neuron take one dtype: float16, bfloat16 or float32",
            "convert them: x.to(torch.bfloat16)",
        )
    B, Hq, L, D = q.shape
    shape = Shape(B, Hq, k.shape[1], L, k.shape[2], D, v.shape[-1])
    lists = sparsity = None
    if block_mask is not None and not keeps_all(block_mask):
        lists = Lists.of(block_mask).to(_CPU)
        sparsity = lists.sparsity(block_mask.BLOCK_SIZE, shape.Hq // shape.Hkv)
    score, mask = moved(score, _CPU), None if lists is None else moved(mask, _CPU)
    problem = make_problem(
        kind_for(shape, NEURON[target].num_sms)[0], DTYPES[q.dtype], shape, score, mask, sparsity,
        lse=statistics[0], max_scores=statistics[1], positive_scale=scale > 0,
    )  # fmt: skip
    if config is None:
        config = first_config(problem, target, cores)
    elif config.kind != problem.structure.kind:
        problem = replace(problem, structure=replace(problem.structure, kind=config.kind))
    return prepare(
        problem, config, target, scale=scale, score=score, mask=mask, lists=lists, cores=cores
    )


def cores_of(target: str, cores: int | None) -> int:
    """The physical cores of a logical one, by the argument, the environment or the target."""
    most = CORES[target].physical_cores
    asked = neuron_names()[1] if cores is None else cores
    found = str(asked or most)
    if found not in ("1", str(most)):
        raise ConfigError(
            f"{found} physical cores of a logical one on {target}",
            f"it has 1{f' or {most}' if most > 1 else ''}",
            "see cores, and NEURON_LOGICAL_NC_CONFIG",
        )
    return int(found)


def first_config(problem: Problem, target: str, cores: int) -> NkiConfig:
    """The default; of a decode without rows for all cores its keys are split over them."""
    config = default_config(problem, target)
    tiles = problem.B * problem.Hkv * visits_of(problem, config)
    if isinstance(config, NkiPrefillConfig) or tiles >= cores or problem.kv_len <= cores * CHUNK:
        return config
    split = replace(config, num_splits=cores)
    return config if target_reasons(split, problem, target) else split
