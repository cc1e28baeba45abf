"""Records made up from a model of costs, for tests of what reads records."""

import math
import random
from dataclasses import replace
from itertools import product

from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig
from flexattn.records.record import (
    SCHEMA,
    Decision,
    Environment,
    Failed,
    Gated,
    Key,
    Policy,
    Record,
    Sizes,
    Trial,
)

POLICY = Policy(graph=False, cold_l2=True, rounds=20, min_ms=5.0)
HERE = Environment(
    SCHEMA, "0123456789abcdef", "3.6.0", "2.11.0", "13", "nvidia-h200", "sm_90", 132, False, True
)
GATE = Gated("out max", 4.3e-4, 2.2e-3, 6.2e-4, True)


def key(kind="prefill", sizes=(2, 4096, 4096), **changes):
    """A key of Llama-3 8B's heads at the sizes, rounded."""
    B, q_len, kv_len = Sizes(*sizes).rounded()
    plain = Key(
        kind, "bfloat16", 128, 128, 32, 8, B, q_len, kv_len, "", "", "", "", "qkv aligned", ""
    )  # fmt: skip
    return replace(plain, **changes)


def prefill_record(title="llama-3 prefill", seed=0, rounds=20, **changes):
    """72 configs whose times follow a smooth model with noise; some fail, some are rejected."""
    noise = random.Random(seed)
    trials = []
    grid = product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4), (False, True))
    for m, n, warps, stages, tma in grid:
        config = PrefillConfig(m, n, warps, stages, tma)
        cost = 800 * (1 + 0.5 * abs(math.log2(m / 128)) + 0.2 * abs(math.log2(n / 64)))
        cost *= 1 + 0.06 * abs(stages - 3) - 0.05 * tma + 0.1 * (warps != 4 + 4 * (m == 128))
        trials.append(_trial(config, cost, noise, rounds))
    trials[5] = replace(
        trials[5], screening=(), failed=Failed("build", "ptxas", "out of registers")
    )
    trials[9] = replace(
        trials[9], screening=(), failed=Failed("gate", "over budget", "out max 3.1e-2 > 2.2e-3")
    )
    trials[12] = replace(trials[12], screening=(), failed=Failed("crash", "illegal access", ""))
    trials[20] = replace(trials[20], screening=())
    trials[30] = replace(trials[30], screening=(), same_code_as=31)
    return _decided(
        key(sizes=(2, 4096, 4096)), trials, PrefillConfig(128, 64, 4, 2, True), title, noise,
        (2, 4096, 4096), rounds, **changes,
    )  # fmt: skip


def decode_record(title="llama-3 decode", seed=1, rounds=20, **changes):
    """Configs of split-KV decode, bound by memory."""
    noise = random.Random(seed)
    trials = []
    for n, warps, stages, splits in product((32, 64, 128), (4, 8), (2, 3), (0, 4, 8, 16, 32)):
        config = DecodeConfig(16, n, warps, stages, splits)
        cost = 80 * (1 + 0.25 * abs(math.log2((splits or 16) / 16)) + 0.04 * (n == 32))
        trials.append(_trial(config, cost * (1 + 0.03 * (warps == 8)), noise, rounds))
    changes = {"environment": replace(HERE, graph=True), **changes}
    return _decided(
        key("decode", (8, 1, 8192)), trials, DecodeConfig(16, 128, 4, 3, 0), title, noise,
        (8, 1, 8192), rounds, **changes,
    )  # fmt: skip


def _trial(config, cost, noise, rounds):
    samples = tuple(cost * noise.gauss(1, 0.006) for _ in range(max(rounds // 4, 1)))
    shared = config.num_stages * config.BLOCK_N * 512 + config.BLOCK_M * 256 + 1024
    registers = min(255, 60 + config.BLOCK_M * 128 // (config.num_warps * 32))
    return Trial(config, registers, 0, shared, GATE, samples)


def _decided(where, made, default, title, noise, sizes, rounds, **changes):
    """The record with a race of the default and the three best, and the best as the winner."""
    first = next(i for i, trial in enumerate(made) if trial.config == default)
    timed = [i for i, trial in enumerate(made) if trial.screening]
    best = sorted(timed, key=lambda i: min(made[i].screening))[:3]
    for index in {first, *best}:
        middle = min(made[index].screening)
        finals = tuple(middle * noise.gauss(1.01, 0.004) for _ in range(rounds))
        made[index] = replace(made[index], finals=finals)
    winner = min({first, *best}, key=lambda i: sum(made[i].finals))
    gain = sum(made[first].finals) / sum(made[winner].finals)
    why = f"{gain:.3f}x the default in the median of {rounds} paired rounds"
    record = Record(
        where, HERE, POLICY, "measured", sizes, tuple(made),
        Decision(winner, first, gain, 1e-6, 1.02, 0.95, why),
        rejected=(("shared memory", 31), ("registers", 12)),
        seconds=41.5, made="2026-11-21T12:00:00+00:00", tool="flexattn", title=title,
    )  # fmt: skip
    return replace(record, **changes)
