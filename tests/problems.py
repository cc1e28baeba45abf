"""Problems without tensors, for tests that render and compile with no device."""

from types import SimpleNamespace

import torch

from flexattn.device import named
from flexattn.frontend import plan
from flexattn.frontend.launch_cache import launch_cache
from flexattn.kernels.choose.defaults import candidates, space
from flexattn.mods import bind
from flexattn.problem import Layout, Problem, Sparsity, Structure, captures_of
from flexattn.problem.serving import ServingProblem
from flexattn.runtime.candidates import candidates_of
from flexattn.serving.kernels import plan_problem

H200, A100 = named("nvidia-h200"), named("nvidia-a100")
BF16 = torch.bfloat16
DENSE = Layout(True, True, True, True)


def problems_asked(monkeypatch, how="hit", device=H200):
    """Problems of the launches that calls prepare from now on, as on a device; none is built."""
    found, launch = [], SimpleNamespace(choice=SimpleNamespace(how=how))
    monkeypatch.setattr(plan, "prepare_launch", lambda asked, *_: found.append(asked) or launch)
    monkeypatch.setattr(plan, "detect", lambda _: device)
    launch_cache.clear()
    return found


def problem(
    kind="prefill",
    D=128,
    Dv=None,
    dtype="bfloat16",
    *,
    score_mod=None,
    mask_mod=None,
    block=(128, 128),
    has_full=True,
    per_head=False,
    runs=False,
    group=4,
    q_len=None,
    kv_len=8192,
    lse=True,
    layout=DENSE,
    sinks="",
    kv_dtype="",
    fp32_products="ieee",
    fp8_weights="exact",
):
    """A problem of batch 2 with 8 key heads; with a mask_mod its lists have blocks of `block`.

    runs: the blocks of each row join up.
    """
    structure = Structure(
        kind=kind,
        dtype=dtype,
        head_dim_qk=D,
        head_dim_v=D if Dv is None else Dv,
        group=group if kind == "decode" else 0,
        score=captures_of(bind(score_mod, "score")),
        mask=captures_of(bind(mask_mod, "mask")),
        sparsity=None if mask_mod is None else Sparsity(*block, has_full, per_head, runs),
        layout=layout,
        lse=lse,
        max_scores=False,
        fp32_products=fp32_products,
        positive_scale=True,
        sinks=sinks,
        kv_dtype=kv_dtype,
        fp8_weights=fp8_weights,
    )
    length = q_len or (1 if kind == "decode" else 4096)
    return Problem(structure, 2, 8 * group, 8, length, kv_len)


def choices(*given, **more):
    """What may serve a problem, best first, each with its sources; as candidates_of."""
    return (each.choice() for each in candidates_of(*given, **more))


def plan_of(
    B=64, *, keys=8192, heads=(32, 8), D=128, kv=BF16, page=16, score=None, mask=None, **options
):
    """A plan's problem. D: of keys, or of keys and values; score, mask: mods, bound or not."""
    options["scaled"] = options.pop("scales", "") or options.pop("scaled", False)
    return plan_problem(
        batch=B, kv_len=keys, heads=heads, head_dim=D if isinstance(D, tuple) else (D, D),
        kv_dtype=kv, page=page, score=bind(score, "score"), mask=bind(mask, "mask"), **options,
    )  # fmt: skip


def of_form(form):
    """A plan's problem of a form, with more keys than any cache holds."""
    rows = max(1, form.rows // form.group)
    return ServingProblem(
        structure=form, B=form.requests, Hq=form.group * form.kv_heads, Hkv=form.kv_heads,
        q_len=rows, kv_len=2**26,
    )  # fmt: skip


def serving_candidates(work, device):
    """The static defaults of a plan's problem, or of a form."""
    return candidates(work if isinstance(work, Problem) else of_form(work), device)


def serving_space(work, device):
    """All that a full search may try of a plan's problem, or of a form."""
    return space(work if isinstance(work, Problem) else of_form(work), device)
