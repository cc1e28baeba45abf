"""Problems without tensors, for tests that render and compile with no device."""

from flexattn.mods import bind
from flexattn.problem import Layout, Problem, Sparsity, Structure, captures_of
from flexattn.runtime.dispatch import candidates_of

DENSE = Layout(True, True, True, True)


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
    )
    length = q_len or (1 if kind == "decode" else 4096)
    return Problem(structure, 2, 8 * group, 8, length, kv_len)


def choices(*given, **more):
    """What may serve a problem, best first, each with its sources; as candidates_of."""
    return (each.choice() for each in candidates_of(*given, **more))
