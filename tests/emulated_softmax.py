"""Runs the assembly of the Hopper prefill's lazy softmax in Python, warp by warp.

A thread of lane l in warp w has the scores of rows 16 w + l // 4 and of the row eight below, of
eight keys the two from 2 (l % 4) on: of four operands the first two are of the first row.
"""

import re
import struct

import numpy as np
import torch

from tests.emulated_memory import Tile

LANES, WARP_ROWS = 32, 16
_OPERAND = re.compile(r"\{[^}]*\}|[$\w.-]+")
_COMPARISONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "neu": lambda a, b: ~(a == b),
}
_FLOATS = {
    "mov": lambda a: a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "max": np.fmax,
    "neg": lambda a: -a,
    "fma": lambda a, b, c: a * b + c,
    "ex2": np.exp2,
    "selp": lambda a, b, first: np.where(first, a, b),
}
_INTEGERS = {
    "mov": lambda a: a, "add": lambda a, b: a + b, "or": lambda a, b: a | b,
    "and": lambda a, b: a & b,
}  # fmt: skip


def e4m3(values):
    """Bytes of numbers as cvt.rn.satfinite makes them."""
    largest = torch.from_numpy(np.array(values, np.float32)).clamp(-448, 448)
    return largest.to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.int64)


def of_e4m3(numbers):
    found = torch.from_numpy(np.array(numbers, np.uint8)).view(torch.float8_e4m3fn)
    return found.float().numpy()


def run_warp(text, outputs, given):
    """The values of a statement's first operands, of which `outputs` are not given: [32] each."""
    body = text[text.index("{") + 1 : text.rindex("}")] if text.startswith("{") else text
    statements = []
    for each in body.split(";"):
        for label in re.findall(r"(\w+):", each):
            statements.append((f"{label}:", []))
        name, _, rest = each.rpartition(":")[2].strip().partition(" ")
        if name and name != ".reg":
            statements.append((name, _OPERAND.findall(rest)))
    places = {name[:-1]: i for i, (name, _) in enumerate(statements) if name.endswith(":")}
    registers = {f"${outputs + i}": x for i, x in enumerate(given)}

    def value(operand):
        if operand in registers:
            return registers[operand]
        if operand.startswith("0f"):
            return np.float32(struct.unpack(">f", bytes.fromhex(operand[2:]))[0])
        return np.int64(int(operand, 0))

    place = 0
    while place < len(statements):
        name, operands = statements[place]
        place += 1
        if name.startswith("@"):
            taken = ~registers[name[2:]] if name[1] == "!" else registers[name[1:]]
            assert taken.all() or not taken.any(), "lanes of a warp part"
            place = places[operands[1]] if taken.all() else place
        elif not name.endswith(":"):
            registers[operands[0]] = np.broadcast_to(_computed(name, operands, value), LANES)
    return [registers.get(f"${i}") for i in range(outputs)]


def _computed(name, operands, value):
    kind, *words = name.split(".")
    if kind == "setp":
        found = _COMPARISONS[words[0]](*map(value, operands[1:3]))
        return found | value(operands[3]) if "or" in words else found
    if kind == "vote":
        return value(operands[1]).any()
    if name == "or.pred":
        return value(operands[1]) | value(operands[2])
    if kind == "shfl":
        return value(operands[1])[np.arange(LANES) ^ int(operands[2])]
    if kind == "cvt":
        high, low = (e4m3(value(each)) for each in operands[1:])
        return high << 8 | low
    if operands[1].startswith("{"):
        low, high = map(value, _OPERAND.findall(operands[1][1:-1]))
        return high << 16 | low
    found = [value(each) for each in operands[1:]]
    if words[-1] == "f32":
        return np.float32(_FLOATS[kind](*found))
    return _INTEGERS[kind](*found) & 0xFFFFFFFF


class Threads:
    """A value of each element of a thread, as assembly has it: [warps][elements][lanes]."""

    def __init__(self, values):
        self.values = values

    @classmethod
    def of(cls, x):
        """Of a tile [rows, columns], or of one number a row and thread [rows, 4]."""
        rows, columns = x.shape
        if columns == 4:
            x = np.repeat(x[:, None, :, None], 2, 3)
        x = np.reshape(x, (rows // WARP_ROWS, 2, 8, -1, 4, 2))
        # [warps, halves of rows, groups, columns / 8, lanes of a group, neighbours]
        x = x.transpose(0, 3, 1, 5, 2, 4)
        return cls(x.reshape(x.shape[0], -1, LANES))

    def tile(self):
        """The tile [rows, columns] that `of` is of."""
        warps = len(self.values)
        x = np.reshape(self.values, (warps, -1, 2, 2, 8, 4)).transpose(0, 2, 4, 1, 5, 3)
        return x.reshape(warps * WARP_ROWS, -1).view(Tile)


def no_weights(keys):
    return np.zeros((WARP_ROWS * 4, keys), np.float32).view(Tile)


def at_once(keys):
    """The functions that are assembly where a softmax is not: weights become an operand."""

    def to_e4m3(weights):
        rounded = of_e4m3(e4m3(weights)).reshape(len(weights), -1, 2, 4, 2)
        return rounded.transpose(0, 1, 3, 2, 4).reshape(weights.shape).view(Tile)

    return {
        "to_e4m3": to_e4m3, "operand": lambda p: p, "no_weights": lambda: no_weights(keys),
    }  # fmt: skip


def assembled(names):
    """The functions of a rendered kernel that are assembly, by its own text: weights of e4m3."""

    def each_warp(text, outputs, *given):
        found = [
            run_warp(text, outputs, [lane for x in given for lane in x.values[warp]])
            for warp in range(len(given[0].values))
        ]
        return list(zip(*found, strict=True))

    def filled(x, count):
        """One number a row and thread for each element."""
        return Threads(np.tile(x.values, (1, count // x.values.shape[1], 1)))

    def exponents(qk, scale, m_i):
        scores = Threads.of(qk)
        count = scores.values.shape[1]
        scales = Threads(np.full_like(scores.values, np.float32(scale)))
        maxima = filled(Threads.of(m_i), count)
        found = each_warp(names["EXPONENTS"], count, scores, maxima, scales)
        return Threads(np.float32(np.stack(found, 1))).tile()

    def online_softmax(qk, m_i, l_i):
        scores = Threads.of(qk)
        count = scores.values.shape[1]
        maxima = filled(Threads.of(m_i), count)
        found = each_warp(names["ONLINE_SOFTMAX"], 4 * count, scores, maxima)
        # Of eight elements the first and the third are words, of the two rows.
        words = np.stack([found[e] for e in range(0, count, 2) if e % 8 < 4], 1)
        bytes_ = np.stack([words >> shift & 255 for shift in (0, 8, 16, 24)], -1)
        shape = len(words), -1, 2, 8, 4, 4
        # [warps, sixteens of keys, halves of rows, groups, lanes of a group, bytes]
        p = of_e4m3(bytes_).reshape(shape).transpose(0, 2, 3, 1, 4, 5)

        def of_rows(first):
            each = np.stack([found[first], found[first + 2]], 1).reshape(-1, 2, 8, 4)
            return np.float32(each).reshape(-1, 4).view(Tile)

        alpha = of_rows(3 * count)
        l_i = l_i * alpha + of_rows(count)
        return p.reshape(len(qk), -1).view(Tile), of_rows(2 * count), l_i, alpha

    return {
        "exponents": exponents,
        "online_softmax": online_softmax,
        "operand": lambda p: p,
        "no_weights": lambda: no_weights(names["BLOCK_N"]),
        "rescale": lambda acc, alpha: acc * alpha[:, :1],
        "by_thread": lambda x: np.reshape(x, (len(x), -1, 4, 2)),
        "thread_value": lambda x: x[:, 0, :, 0],
    }
