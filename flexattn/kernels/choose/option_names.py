"""The names in kernel_options: what acts here, and what torch alone reads."""

from __future__ import annotations

from difflib import get_close_matches

from torch.nn.attention.flex_attention import FlexKernelOptions

from flexattn.errors import ConfigError, InputError

LEGACY = "FORCE_USE_FLEX_ATTENTION"
# Keys that torch does not have: they are taken out before a call is handed to it.
OURS_ALONE = (
    "SPLIT_KV", "RULES_OFF", "TANH", "MERGE_CONSUMERS", "PTXAS", "DETERMINISTIC",
    "BATCH_INVARIANT",
)  # fmt: skip
HONOURED = (
    "BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "USE_TMA", "FLOAT32_PRECISION", "BACKEND",
    LEGACY, *OURS_ALONE,
)  # fmt: skip
# Of a backward, with torch's names: rows and keys of the programs of dK and dV, then those of dQ.
TILES = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")
# Whoever writes for torch may pass them: ROCm's and its warps' settings,
# promises that no kernel here needs, and facts of a call that torch's lowering finds by itself.
_TORCHS = (
    "WRITE_DQ "
    "kpack matrix_instr_nonkdim waves_per_eu num_consumer_groups num_buffers_warp_spec "
    "PARTITION_SIZE SKIP_MASK_SCORE PRESCALE_QK ROWS_GUARANTEED_SAFE BLOCKS_ARE_CONTIGUOUS "
    "IS_DIVISIBLE SAFE_HEAD_DIM SAFE_M_BOUNDARY SAFE_N_BOUNDARY HAS_FULL_BLOCKS GQA_SHARED_HEADS "
    "QK_HEAD_DIM QK_HEAD_DIM_ROUNDED V_HEAD_DIM V_HEAD_DIM_ROUNDED "
    "SPARSE_Q_BLOCK_SIZE SPARSE_KV_BLOCK_SIZE"
).split()
_WITHOUT_EFFECT = frozenset(_TORCHS) | FlexKernelOptions.__annotations__.keys() - set(
    HONOURED
) - set(TILES)
# An argument says it: torch refuses the outputs too, and would compute with the other scale.
_ARGUMENTS = {
    "SM_SCALE": "scale=",
    "OUTPUT_LOGSUMEXP": "return_aux=AuxRequest(lse=True)",
    "OUTPUT_MAX": "return_aux=AuxRequest(max_scores=True)",
}


def bare_key(key: object) -> str:
    """A key without torch's prefix; raises InputError for one that is no string."""
    if not isinstance(key, str):
        raise InputError(
            f"kernel_options has the key {key!r} ({type(key).__name__})",
            "its keys are strings",
            'pass a dict such as {"BLOCK_M": 64}',
        )
    return key.removeprefix("fwd_").removeprefix("bwd_")


def acts(key: str) -> bool:
    """Whether a key decides something in a forward kernel here.

    Raises ConfigError for one that nobody has, and for what is an argument of the call instead.
    """
    name = bare_key(key)
    if name in _ARGUMENTS:
        raise ConfigError(
            f"kernel_options has {key!r}", "an argument says it", f"pass {_ARGUMENTS[name]}"
        )
    if name not in _WITHOUT_EFFECT and name not in (*HONOURED, *TILES):
        near = get_close_matches(name, (*HONOURED, *TILES, *sorted(_WITHOUT_EFFECT)), n=1)
        raise ConfigError(
            f"kernel_options has {key!r}",
            f"the keys are {', '.join((*HONOURED, *TILES))} and those that torch alone reads, "
            "bare or with fwd_ or bwd_ in front",
            f"did you mean {near[0]!r}?" if near else "remove it, or correct its spelling",
        )
    return name in HONOURED and not key.startswith("bwd_")


def acts_behind(key: str) -> bool:
    """Whether a key decides something in a backward kernel here: its tiles, or a bwd_ number."""
    name = bare_key(key)
    own = key.startswith("bwd_") and name in ("num_warps", "num_stages", "USE_TMA")
    return own or (name in TILES and not key.startswith("fwd_"))
