"""Sources of the Hopper backward: what comes before it, the kernel, and what comes after."""

from __future__ import annotations

from flexattn.errors import RenderError
from flexattn.kernels.base.environment import render_template
from flexattn.kernels.hopper_backward.config import WARPS, HopperBackwardConfig

__all__ = [
    "AFTER_ARGUMENTS",
    "ARGUMENTS",
    "BEFORE_ARGUMENTS",
    "render",
    "render_after",
    "render_before",
]

TEMPLATE = "hopper_backward/dkdvdq.py.jinja"
BEFORE_ARGUMENTS = (
    *("O", "DO", "LSE", "STATS", "DQ_ACC"),
    *("stride_ob", "stride_oh", "stride_om", "stride_dob", "stride_doh", "stride_dom"),
    *("Hq", "q_len"),
)
AFTER_ARGUMENTS = (
    *("DQ_ACC", "DQ", "stride_dqb", "stride_dqh", "stride_dqm"),
    *("Hq", "q_len", "sm_scale"),
)
LOG2E = 1.4426950408889634
ARGUMENTS = (
    *("Q", "K", "V", "DO", "STATS", "DK", "DV", "DQ_ACC"),
    *("num_heads", "num_tiles", "num_queries", "group", "kv_len", "sm_scale", "qk_scale"),
)
HARDWARE_BARRIERS = 16
# So many powers of 2 of a thread are made by one piece of assembly.
POWERS_AT_ONCE = 8
# The hardware barrier at which the second warpgroup waits for the first.
TURN = 7


def render(
    config: HopperBackwardConfig,
    head_dim: int,
    dtype: str = "bfloat16",
    causal: bool = False,
    even_keys: bool = True,
    grouped: bool = False,
    api: str = "flexattn.gluon_api",
) -> str:
    """The text of the kernel; even_keys: BLOCK_N divides the keys; grouped: several
    query heads share a key head. api: where Gluon's names are. RenderError: `rotated` of a causal
    mask with shared key heads."""
    if config.rotated and causal and grouped:
        raise RenderError(
            f"{config} of a causal mask whose key heads are shared",
            "the rotated loop walks the tiles of one query head",
            "render it without `rotated`",
        )
    rows, keys = config.BLOCK_M, config.BLOCK_N
    sums = _sums(config, head_dim)
    parts, width = sums["PARTS"], sums["WIDTH"]
    free_do = HARDWARE_BARRIERS - config.num_stages
    part_rows = rows * width // 256
    settings: dict[str, object] = {
        "BLOCK_M": rows,
        "BLOCK_N": keys,
        "HEAD_DIM": head_dim,
        "STAGES": config.num_stages,
        "Q_TYPE": f"gl.{dtype}",
        "FREE_DO": free_do,
        "FREE_Q": free_do - config.num_stages,
    }
    if config.dq == "tma":
        settings |= {
            "DQ_FULL": free_do - config.num_stages - 1,
            "DQ_FREE": free_do - config.num_stages - 2,
            "DQ_ROWS": part_rows * parts,
            "DQ_PART_ROWS": part_rows,
        }
    context = {
        "header": f"# {config} of {head_dim}",
        "api": api,
        "constants": tuple(settings.items()),
        "arguments": ARGUMENTS,
        "num_stages": config.num_stages,
        "rotated": config.rotated,
        "stagger": config.stagger,
        "spread": config.spread and not (causal or grouped),
        "by_length": config.by_length,
        "turn": TURN,
        "early": config.early,
        "polynomial": config.polynomial,
        "of": POWERS_AT_ONCE,
        "trailing": config.trailing,
        "short": config.short,
        "opaque": config.opaque,
        "counted": grouped,
        "dk_operand": "shared" if config.split else config.dk_operand,
        "dq": config.dq,
        "split": config.split,
        "causal": causal,
        "even_keys": even_keys,
        "grouped": grouped,
        "s_warps": [4, 2] if config.split else [8, 1],
        "s_columns": rows // 2 if config.split else rows,
        "dkv_columns": head_dim // 2 if config.split else head_dim,
        **_places(config, width),
        "dq_parts": parts,
        "dq_width": width,
        "dq_part_rows": part_rows,
        "per_thread": rows * width // (32 * WARPS),
    }
    return render_template(TEMPLATE, context)


def render_before(config: HopperBackwardConfig, head_dim: int) -> str:
    """The text of the kernel that makes STATS and clears DQ_ACC: a block a tile of a head."""
    settings = {"BLOCK_M": config.BLOCK_M, "HEAD_DIM": head_dim, "LOG2E": LOG2E}
    context: dict[str, object] = {
        "header": f"# before {config} of {head_dim}",
        "constants": tuple(settings.items()),
        "arguments": BEFORE_ARGUMENTS,
    }
    return render_template("hopper_backward/before.py.jinja", context)


def render_after(config: HopperBackwardConfig, head_dim: int) -> str:
    """The text of the kernel that makes DQ of DQ_ACC: a block a tile of a head."""
    settings = {"BLOCK_M": config.BLOCK_M, **_sums(config, head_dim)}
    context: dict[str, object] = {
        "header": f"# after {config} of {head_dim}",
        "constants": tuple(settings.items()),
        "arguments": AFTER_ARGUMENTS,
        **_places(config, settings["WIDTH"]),
    }
    return render_template("hopper_backward/after.py.jinja", context)


def _sums(config: HopperBackwardConfig, head_dim: int) -> dict[str, int]:
    parts = config.dq_parts(head_dim)
    return {"PARTS": parts, "WIDTH": head_dim // parts}


def _places(config: HopperBackwardConfig, width: int) -> dict[str, object]:
    """How the warps share a tile of dq, or a part of it, `width` columns wide."""
    tall = config.BLOCK_M == 64 * WARPS // 4
    return {
        "dq_warps": [WARPS, 1] if tall else [WARPS // 2, 2],
        "dq_columns": width if tall else width // 2,
    }
