"""Random Python expressions over captured numbers, whose values change by Python's rules."""

from __future__ import annotations

import random

# Of ints, floats and conditions: {i}, {x} and {c} are smaller ones, which are drawn anew.
ARITHMETIC = {
    "i": (
        "{i} + {i}", "{i} - {i}", "{i} * {i}", "{i} // 3", "{i} % 5", "7 - {i}", "{i} * {i} % 7",
        "{i} ** 2", "2 ** ({i} % 9)", "{i} << {i} % 5", "{i} >> {i} % 5", "{i} & {i}",
        "{i} | {i}", "{i} ^ {i}", "~{i}", "-{i}", "abs({i})", "{c} + {c}", "{c} + {c} + {c}",
        "{c} * {i}", "sum([{i}, {i}])", "round({x})", "math.floor({x})", "math.ceil({x})",
        "divmod({i}, 7)[1]", "({i} if isinstance({i}, int) else 50)", "pow({i}, 3, 7)",
        "True + {i}",
    ),
    "x": (
        "{x} + {x}", "{x} - {x}", "{x} * {x}", "{x} / 1.5", "{i} / 3", "{x} // 1.5", "{x} % 2.5",
        "abs({x}) ** 0.5", "{x} ** 2", "1.0 - {x}", "0.5 * {i}", "{i} + {x}", "round({x}, 1)",
        "-{x}", "({x} if isinstance({x}, float) else 9.0)", "{c} * 0.5", "2.0 ** -({i} % 9)",
        "({c} + {c}) * 0.5", "(1 - {x}) * 1e5",
    ),
    "c": (
        "({i} > {i})", "({i} <= 4)", "({x} < {x})", "({x} == 0.1)", "({i} == {i})", "({i} != 3)",
        "({x} >= {i})", "isinstance({i}, int)", "({c} & {c})",
    ),
}  # fmt: skip
# Python is told a value: by a branch, a length, a C function.
ASKING = {
    "i": (
        "{i} // ({i} or 3)", "{i} ** (abs({i}) % 4)", "min({i}, {i})", "max({i}, {i}, 2)",
        "int({x})", "len(range(abs({i}) % 6))", "({i} if {c} else {i})", "({i}).bit_length()",
        "int(f'{{{i}}}')", "math.gcd({i}, {i})", "[3, 1, 4][{i} % 3]", "({i} and {i})",
        "(not {i}) + {i}",
    ),
    "x": (
        "{x} / ({x} or 1.5)", "math.sqrt(abs({x}))", "math.exp(-abs({x}))", "float({i})",
        "math.log2(abs({x}) + 1)", "min({x}, {i})", "max({x}, {x})", "({x} if {c} else {x})",
    ),
    "c": (
        "({i} in (1, 2, 5))", "(2 < {i} < 7)", "bool({i})", "(not {i})", "({c} and {c})",
        "({c} or {c})",
    ),
}  # fmt: skip
LEAVES = {"i": ("n", "m", "n", "m", "3"), "x": ("x", "y", "x", "y", "0.75"), "c": ("(n > m)",)}
USES = {
    "score": (
        "score + ({i}) % 97 * kv_idx", "score + ({x}) * kv_idx", "score * ({x})",
        "torch.where(q_idx - kv_idx < ({i}) % 5, score, -score)", "score + ({i}) * 0.125",
        "score + kv_idx % (abs({i}) % 7 + 1)", "score + kv_idx // (abs({i}) % 7 + 1)",
        "score.clamp(max=({x}) % 3)", "score.clamp(({x}) % 2, 2.5)", "score + TABLE[({i}) % 8]",
        "score + (kv_idx + 1) ** (abs({i}) % 4)", "score + (kv_idx << abs({i}) % 4)",
        "score + torch.full_like(score, ({x}) % 5)", "(score if {c} else -score)",
        "score + ({c}) * kv_idx", "score - (kv_idx > ({x}) % 5) * 0.5",
    ),
    "mask": (
        "(q_idx - kv_idx < ({i}) % 6)", "((q_idx * 3 + kv_idx) % 10 < ({x}) % 8)",
        "(kv_idx % (abs({i}) % 5 + 1) == 0)", "((kv_idx > 1) & ({c}))",
        "(q_idx // (abs({i}) % 4 + 1) >= kv_idx)",
    ),
}  # fmt: skip
WHOLE = (*range(-3, 13), 10**9, 3037000500, 2**62, 10**20)
REAL = (0.0, 0.1, 0.5, 1.0, 1.5, 2.0, 2.5, -0.75, -3.25, 0.9999999, 1e8, 1e8 + 0.5, 1e-9)
SOURCE = """
import functools, math, torch
TABLE = torch.arange(8.0) / 4
def make(n, m, x, y):
    def {kind}_mod({names}):
        return {result}
    def change(*new):
        nonlocal n, m, x, y
        n, m, x, y = new
    return {kind}_mod, change
inner, change = make({first})
"""


def source(draw: random.Random, kind: str, names: str) -> tuple[str, list[str]]:
    """A module with a mod named inner, and the statements that change what it captures."""
    asking = draw.random() < 0.4
    grammar = {
        name: (*texts, *(ASKING[name] if asking else ())) for name, texts in ARITHMETIC.items()
    }
    uses = draw.choices(USES[kind], k=draw.choice((1, 1, 2)))
    lines = [_drawn(draw, use, grammar, draw.choice((1, 2, 3))) for use in uses]
    result = (" & " if kind == "mask" else " + ").join(lines)
    calls = [_numbers(draw)]
    for _ in range(5):  # often one number changes alone
        keep = draw.choice((0.0, 0.6))
        pairs = zip(calls[-1], _numbers(draw), strict=True)
        calls.append([old if draw.random() < keep else new for old, new in pairs])
    calls[4] = calls[1]
    text = SOURCE.format(kind=kind, names=names, result=result, first=", ".join(calls[0]))
    return text, [f"change({', '.join(each)})" for each in calls[1:]]


def _numbers(draw: random.Random) -> list[str]:
    numbers = [draw.choice(WHOLE[: draw.choice((16, 20))]) for _ in "nm"]
    return [repr(each) for each in (*numbers, *draw.choices(REAL, k=2))]


def _drawn(draw: random.Random, text: str, grammar: dict[str, tuple[str, ...]], depth: int) -> str:
    """The text with an expression in place of each name in braces."""
    parts = []
    while "{" in text:
        before, _, rest = text.partition("{")
        if rest.startswith("{"):  # braces of an f-string
            inner, _, text = rest[1:].partition("}}}")
            parts += [before, "{", _drawn(draw, f"{inner}}}", grammar, depth), "}"]
            continue
        name, _, text = rest.partition("}")
        kinds = grammar if depth > 0 else LEAVES
        found = _drawn(draw, draw.choice(kinds[name]), grammar, depth - 1)
        parts += [before, f"({found})"]
    return "".join((*parts, text))
