"""Serving plans as the tuner sees them: the task of a plan's sizes."""

from __future__ import annotations

from flexattn.device import Device
from flexattn.errors import InputError
from flexattn.measure.task import ServingTask
from flexattn.mods import Bound
from flexattn.problem import DTYPES, Shape
from flexattn.problem.serving import KV_DTYPES, Lengths
from flexattn.records.record import Policy
from flexattn.serving.batch import batch_lengths
from flexattn.serving.request import plan_problem


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
    page: int,
    lengths: Lengths = "uniform",
    layout: str = "NHD",
    kv_dtype: str = "",
    scaled: str = "",
    sinks: bool = False,
    shared_kv: bool = False,
    batch_invariant: bool = False,
) -> ServingTask:
    """A plan whose maxima are the sizes of a shape, with a batch of this class.

    kv_dtype: "" for dtype; a cache of eight bits has scales, of what `scaled` says. Raises
    InputError for what no plan is made for.
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
        page=page, layout=layout, score=score, mask=mask, sinks=sinks,
        scaled=scaled or kv.itemsize == 1, shared_kv=shared_kv, positive_scale=scale > 0,
        batch_invariant=batch_invariant, lengths=lengths,
    )  # fmt: skip
    return ServingTask(
        title=title, problem=problem, device=device, policy=policy, scale=scale, q_lens=q_lens,
        kv_lens=kv_lens, score=score, mask=mask,
    )  # fmt: skip
