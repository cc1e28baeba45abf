"""What Hopper's backward launches before its kernel, beside plain torch."""

from dataclasses import replace
from math import inf, log2

import torch

from flexattn.device import detect
from flexattn.kernels.choose.registry import family_of
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig, multiplied_columns
from flexattn.runtime.build import builder
from tests.covering import each_choice
from tests.problems import problem

CPU = torch.device("cpu")
B, HEADS = 2, 8
FORMS = {
    "plain": {},
    "lse": {"through_lse": True},
    "dropped": {"dropout": True},
    "by_engine": {"dq_tma": True},
    "halves": {"dq_tma": True, "dq_halves": True},
    "persistent": {"dq_tma": True, "persistent": True},
    "in_order": {"dq_tma": True, "deterministic": True, "through_lse": True},
}


def drawn(*shape, dtype=torch.float32):
    """Heads lie behind rows, as a model's do."""
    return torch.randn(B, shape[1], HEADS, *shape[2:]).to(dtype).transpose(1, 2)


@each_choice(form=FORMS, sizes=[(1, 64, 64), (130, 96, 64), (200, 64, 128)])
def test_delta_is_made_and_sums_are_cleared(form, sizes):
    """sizes: the length, the head dimension, rows of a tile."""
    length, D, rows = sizes
    fields = dict(FORMS[form])
    through_lse, dropout = (fields.pop(name, False) for name in ("through_lse", "dropout"))
    wanted = problem("backward", D, dtype="float16", kv_len=length, q_len=length, group=1)
    wanted = replace(wanted, structure=replace(wanted.structure, dropout=dropout))
    config = HopperBackwardConfig(rows, 128, 2, **fields)
    around = family_of(config).around(wanted, config, detect(CPU))
    out, dout = (drawn(HEADS, length, D, dtype=torch.float16) for _ in range(2))
    lse, dlse = torch.randn(2, B, HEADS, length)
    lse[0, 1, length // 2] = -inf
    nan = {name: torch.full(shape, torch.nan) for name, shape in around.scratch}
    delta = torch.full((B, HEADS, length), torch.nan)
    steps = zip(("stride_{}b", "stride_{}h", "stride_{}m"), out.stride(), strict=False)
    fixed = {each.format(x): step for each, step in steps for x in ("o", "do")}
    tiles = -(-length // rows)
    fixed |= {"Hq": HEADS, "q_len": length, "num_queries": tiles, "keep_scale": 1.25}
    kernel = builder().kernel(around.before[through_lse], detect(CPU), -1)
    given = ("OUT", "DO", "LSE", "DLSE", "DELTA", *nan)
    launch = kernel.prepare(around.programs, fixed, given, spare=(*fixed, *given))
    launch.launch(-1, (out, dout, lse, dlse, delta, *nan.values()))

    made = (out.double() * dout.double()).sum(-1) - dlse * through_lse
    made = torch.where(lse == -inf, 0.0, made)
    torch.testing.assert_close(delta, made.float())
    assert nan["DQ_ACC"].numel() == B * HEADS * tiles * rows * multiplied_columns(D)
    cleared = nan[config.flags if config.dq_tma else "DQ_ACC"]
    assert cleared.numel() and not cleared.view(torch.int32).any()
    if config.persistent:
        assert nan["WORK_COUNTER"].view(torch.int32).flatten()[0] == 0
    stats = nan["STATS"].reshape(B, HEADS, tiles, 2, rows)
    first, second = (stats[:, :, :, i].reshape(B, HEADS, tiles * rows) for i in range(2))
    kept = 1.25 if dropout else 1.0
    base_2 = torch.where(lse == -inf, inf, lse.double() / torch.log(torch.tensor(2.0).double()))
    torch.testing.assert_close(first[..., :length], (base_2 - log2(kept)).float())
    torch.testing.assert_close(second[..., :length], (made / kept).float())
    # Weights of rows that are none are 0, and so are their gradients.
    assert bool((first[..., length:] == inf).all()) and not second[..., length:].any()
