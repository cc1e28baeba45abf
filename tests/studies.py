"""Synthetic studies: landscapes with the ridges, failures and noise of measured ones."""

import random
from itertools import product

from bench.studies import Study
from flexattn.kernels.triton.config import ORDERS, DecodeConfig, PrefillConfig
from flexattn.records.record import SCHEMA, Environment, Failed, Gated, Key, Policy, Trial

ROUNDS = 12
POLICY = Policy(graph=True, cold_l2=True, rounds=20, min_ms=1.0)
ENVIRONMENT = Environment(
    SCHEMA, "0123456789abcdef", "3.9.0", "2.13.0", "13", "nvidia-h200", "sm_90", 132, True, True
)
FINE = Gated("out", 1e-3, 4e-3, 2e-3, True)


def key(kind="prefill", kv_len=8192):
    return Key(
        kind, "bfloat16", 128, 128, 32, 8, 1, 1 if kind == "decode" else kv_len, kv_len,
        "", "", "", "", "qkv aligned", "",
    )  # fmt: skip


def prefill_configs():
    """288 of them: more than are measured whole."""
    axes = product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4), (False, True), ORDERS)
    return [PrefillConfig(*numbers) for numbers in axes]


def decode_configs():
    axes = product((32, 64, 128), (4, 8), (2, 3, 4), (0, 1, 2, 4, 8, 16, 32))
    return [DecodeConfig(16, *numbers) for numbers in axes]


def study(seed, configs=None, *, noise=0.006, batch=15, failures=0.12, base_us=300.0):
    """Every config with ROUNDS samples, in batches that the default ran in; the default is 0.

    Each axis has an effect, each pair of axes a smaller one, and one corner is a ridge of its own.
    """
    draw = random.Random(seed)
    configs = list(prefill_configs() if configs is None else configs)
    draw.shuffle(configs)
    effects = {}

    def effect(scale, *names):
        return effects.setdefault(names, draw.expovariate(1 / scale))

    def true_us(config):
        fields = {name: getattr(config, name) for name in config.__slots__}
        cost = sum(effect(0.12, item) for item in fields.items())
        items = list(fields.items())
        cost += sum(effect(0.03, a, b) for i, a in enumerate(items) for b in items[:i])
        return base_us * (1 + cost)

    us = {config: true_us(config) for config in configs}
    # A static default is a good config, not the best.
    ranked = sorted(configs, key=us.__getitem__)
    default = ranked[len(ranked) // 6]
    others = [config for config in configs if config != default]
    trials, base = [Trial(default)], []
    for begin in range(0, len(others), batch):
        start = len(base)
        drift = [1 + draw.gauss(0, 0.02) for _ in range(ROUNDS)]
        base += [us[default] * d * (1 + abs(draw.gauss(0, noise))) for d in drift]
        for config in others[begin : begin + batch]:
            if draw.random() < failures:
                broken = Failed("resources", "Spills", "18 words in a loop")
                trials.append(Trial(config, 255, 18, failed=broken))
                continue
            taken = tuple(
                round(us[config] * d * (1 + abs(draw.gauss(0, noise))), 4) for d in drift
            )
            trials.append(Trial(config, 168, 0, 1 << 16, FINE, taken, start))
    trials[0] = Trial(default, 168, 0, 1 << 16, FINE, tuple(round(t, 4) for t in base))
    kind = "prefill" if isinstance(configs[0], PrefillConfig) else "decode"
    sizes = (1, 1 if kind == "decode" else 8192, 8192)
    return Study(
        SCHEMA, key(kind), sizes, ENVIRONMENT, POLICY, 0, tuple(trials),
        (("registers", 12),), f"synthetic {kind} {seed}", "2026-11-21", "tests",
    )  # fmt: skip
