"""What lanes of a warp keep of a tile's diagonals: by definition, and by a kernel's assembly."""

import re
from functools import lru_cache

import numpy as np

LANES = 32


@lru_cache
def keepers(keys, rows):
    """Of each score of a tile the kept diagonal that it lies on, its place in [keys, rows // 2].

    A thread's scores are of lane 4 r + c: keys r and r + 8 of a warp's 16, and of each 8 rows 2 c
    and 2 c + 1. Even lanes keep diagonals of an even row less lane // 4, odd ones the others.
    """
    span = rows // 2 if keys == 64 else rows
    place = {}
    key, column = np.indices((keys, rows // 2))
    number = column % 2 + key % 16 // 8 * 2 + column % (span // 2) // 8 * 4
    lane = key % 8 * 4 + column % 8 // 2
    row = 8 * (number - 1 - lane % 2) + lane % 4 * 2 + lane % 2
    for at in np.ndindex(key.shape):
        if number[at] < span // 8 + 2:
            warp = key[at] // 16, column[at] // (span // 2)
            # As the row that the lane's first key has there, in its warp.
            place[(*warp, lane[at], row[at] - lane[at] // 4)] = np.ravel_multi_index(at, key.shape)
    found = np.zeros((keys, rows), np.int64)
    for at in np.ndindex(keys, rows):
        k, q = at
        own = k % 8 * 4 + q % 8 // 2
        other = (own + (9 if own % 2 == 0 else -9)) % LANES
        diagonal = q % span - k % 16
        kept = [place.get((k // 16, q // span, lane, diagonal)) for lane in (own, other)]
        (found[at],) = (each for each in kept if each is not None)
    return found


def broadcast_diagonals(read):
    keys, half = read.shape
    return np.asarray(read).reshape(-1)[keepers(keys, 2 * half)].view(type(read))


def reduce_diagonals(values):
    keys, rows = values.shape
    found = np.zeros(keys * rows // 2, np.float32)
    np.add.at(found, keepers(keys, rows), np.asarray(values))
    return found.reshape(keys, rows // 2).view(type(values))


def threads(tile, span):
    """A tile's elements as [warps, lanes, registers], as a thread of MMA_S holds them."""
    keys, rows = tile.shape
    parts = tile.reshape(keys // 16, 2, 8, rows // span, span // 8, 4, 2)
    return parts.transpose(0, 3, 2, 5, 4, 1, 6).reshape(-1, LANES, span // 2)


def lanes_run(text, given):
    """Run assembly of one warp; given: [lanes, registers], what comes out has the same shape."""
    count = given.shape[1]
    names = {f"${count + i}": given[:, i].copy() for i in range(count)}
    names["%laneid"] = np.arange(LANES)

    def value(word):
        word = word.strip()
        if word.startswith("0f"):
            return np.zeros(LANES, np.float32)
        return np.full(LANES, int(word)) if re.fullmatch(r"-?\d+", word) else names[word]

    for line in text.strip("{} ").split(";"):
        op, _, operands = line.strip().partition(" ")
        if not op or op.startswith(".reg"):
            continue
        to, *of = operands.split(", ")
        a, *rest = map(value, of)
        names[to.strip()] = {
            "mov": lambda a=a: a.copy(),
            "add": lambda a=a, rest=rest: a + rest[0],
            "and": lambda a=a, rest=rest: a & rest[0],
            "shr": lambda a=a, rest=rest: a >> rest[0],
            "setp.ne": lambda a=a, rest=rest: a != rest[0],
            "setp.ge": lambda a=a, rest=rest: a >= rest[0],
            "selp": lambda a=a, rest=rest: np.where(rest[1], a, rest[0]),
            "shfl": lambda a=a, rest=rest: a[rest[0]],
        }[".".join(op.split(".")[: 1 + op.startswith("setp")])]()
    return np.stack([names[f"${i}"] for i in range(count)], -1)
