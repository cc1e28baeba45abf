"""Mods of many steps, as graphs and as a user writes them, and the work that they make."""

import random
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

import flexattn
from flexattn.mods.expr import VARS, Buffer, Expr, Mod, const, fingerprint
from flexattn.mods.simplify import make

HERE = str(Path(flexattn.__file__).parent)
SEED = 20261128
FLOAT, INT = "float32", "int64"
BUFFERS = (Buffer(FLOAT, 1),)
S, B, H, Q, K = (Expr("var", dtype, (), name) for name, dtype in VARS.items())


def f(op, *args):
    return make(op, FLOAT, args)


def i(op, *args):
    return make(op, INT, args)


def t(op, *args):
    return make(op, "bool", args)


def number(value):
    return const(value, FLOAT if isinstance(value, float) else INT)


def bias(step):
    return make("load", FLOAT, (i("add", K, number(step)),), 0)


# From x and y, which are used twice, to the next two; step is the number of it.
SCORES = {
    "fibonacci": lambda x, y, step: (y, f("add", x, y)),
    "doubled": lambda x, y, step: (f("add", x, x), y),
    "polynomial": lambda x, y, step: (f("add", f("mul", x, y), number(step / 7)), y),
    "scaled": lambda x, y, step: (
        f("add", f("mul", x, number(0.5)), f("mul", make("cast", FLOAT, (K,)), number(step / 3))),
        y,
    ),
    "functions": lambda x, y, step: (f("add", f("sin", x), number(0.1)), y),
    "biases": lambda x, y, step: (f("add", x, f("mul", bias(step), y)), y),
    "quotients": lambda x, y, step: (f("div", y, f("add", f("mul", x, x), number(1.5))), x),
    "chosen": lambda x, y, step: (f("where", t("lt", Q, number(step)), x, f("sub", y, x)), x),
    "masks": lambda x, y, step: (
        f("where", t("lt", i("sub", Q, K), number(7 * step)), x, number(float("-inf"))),
        y,
    ),
}  # fmt: skip
MASKS = {
    "halved": lambda x, y, step: (i("sub", y, x), i("add", x, i("floor_div", y, number(2)))),
    "sums": lambda x, y, step: (y, i("add", x, y)),
    "divided": lambda x, y, step: (i("floor_div", x, number(3)), i("floor_mod", y, number(97))),
    "extremes": lambda x, y, step: (i("minimum", y, i("add", x, Q)), i("maximum", x, y)),
    "distances": lambda x, y, step: (i("abs", i("sub", x, y)), x),
    "bits": lambda x, y, step: (i("and", x, i("or", y, number(step))), i("xor", x, y)),
    "squares": lambda x, y, step: (i("floor_mod", i("mul", x, x), number(101)), y),
}  # fmt: skip
CONDITIONS = {
    "shared": lambda x, y, step: (y, t("and", t("or", x, y), t("ne", K, number(step)))),
    "removed": lambda x, y, step: (t("and", x, t("ne", K, number(7 * step + 100))), y),
    "kept": lambda x, y, step: (t("or", x, t("eq", K, number(3 * step))), y),
    "windows": lambda x, y, step: (
        t("or", x, t("and", t("lt", i("sub", Q, K), number(step)), t("le", number(step - 3), K))),
        y,
    ),
    "differing": lambda x, y, step: (t("xor", x, y), t("not", t("and", x, y))),
}  # fmt: skip


def mod_of(kind, expr):
    return Mod(kind, expr, BUFFERS, (), fingerprint(kind, expr, BUFFERS, ()))


def graph(name, steps):
    """The Mod of a recurrence by its name; "random N": of steps that a seed draws."""
    draw = random.Random(f"{SEED} {name}")
    for kind, table, x, y in (
        ("score", SCORES, S, f("mul", S, number(0.5))),
        ("mask", MASKS, Q, K),
        ("mask", CONDITIONS, t("le", K, Q), t("lt", i("sub", Q, K), number(5))),
    ):
        rows = [table[name]] if name in table else list(table.values())
        if name not in table and not name.startswith(f"random {kind}"):
            continue
        if table is MASKS and name.startswith("random") and draw.random() < 0.5:
            continue
        for step in range(steps):
            x, y = draw.choice(rows)(x, y, step)
        if table is MASKS:
            x = t("le", y, x)
        return mod_of(kind, x)
    raise KeyError(name)


@contextmanager
def counted():
    """How many functions of flexattn are called inside, nodes that a walk gives among them."""
    calls, before = [0], sys.getprofile()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(HERE):
            calls[0] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def nested(text):
    """How many brackets of a text are open at once."""
    depth = most = 0
    for each in text:
        depth += (each in "([{") - (each in ")]}")
        most = max(most, depth)
    return most


def fibonacci(steps):
    def score_mod(score, b, h, q_idx, kv_idx):
        x, y = score, score * 0.5
        for _ in range(steps):
            x, y = y, (x + y) * 0.5
        return y

    return score_mod


def polynomial(steps):
    def score_mod(score, b, h, q_idx, kv_idx):
        x = torch.tanh(score)
        y = x
        for step in range(steps):
            y = y * x + 0.01 * (step % 3)
        return y

    return score_mod


def functions(steps):
    """No two steps are alike: where they end in one number, each derivative is rounded the same
    way, and what all of them multiply to is off by hundreds of roundings."""

    def score_mod(score, b, h, q_idx, kv_idx):
        for step in range(steps):
            score = score + 0.125 * torch.sin(score + step)
        return score

    return score_mod


def vectors(steps):
    """Steps on a small tensor, of which an element is taken at the end."""
    table = torch.arange(4.0)

    def score_mod(score, b, h, q_idx, kv_idx):
        row = table
        for _ in range(steps):
            row = row * 0.5 + 0.1 * score
        return row[kv_idx % 4] + row.sum()

    return score_mod


def halved(steps):
    def mask_mod(b, h, q_idx, kv_idx):
        x, y = q_idx, kv_idx
        for _ in range(steps):
            x, y = y - x, x + y // 2
        return (x >= y) | (q_idx == kv_idx)

    return mask_mod


def removed(steps):
    def mask_mod(b, h, q_idx, kv_idx):
        kept = q_idx + 17 >= kv_idx
        for step in range(steps):
            kept = kept & (kv_idx != 3 * step + 1)
        return kept

    return mask_mod


def kept(steps):
    def mask_mod(b, h, q_idx, kv_idx):
        found = q_idx == kv_idx
        for step in range(steps):
            found = found | (kv_idx == 3 * step)
        return found

    return mask_mod


def windows(steps):
    def mask_mod(b, h, q_idx, kv_idx):
        found = q_idx == kv_idx
        for step in range(steps):
            found = found | ((q_idx - kv_idx < step) & (kv_idx >= 5 * step - 3))
        return found

    return mask_mod
