"""What lanes of a warp keep of a tile's diagonals: by definition, and by a kernel's assembly."""

import re
from functools import lru_cache

import numpy as np

LANES = 32


def lanes_of(shape):
    """Of each place of a tile [keys, rows // 2] its lane, number and warp; a warp's rows."""
    keys, half = shape
    span = half if keys == 64 else 2 * half
    key, column = np.indices(shape)
    number = column % 2 + key % 16 // 8 * 2 + column % (span // 2) // 8 * 4
    lane = key % 8 * 4 + column % 8 // 2
    warp = key // 16 + column // (span // 2) * (keys // 16)
    return lane, number, warp, span


@lru_cache
def readers(keys, rows):
    """Of each score of a tile the place in [keys, rows // 2] of what is read for its diagonal.

    A thread's scores are of lane 4 r + c: keys r and r + 8 of a warp's 16, and of each 8 rows 2 c
    and 2 c + 1. Even lanes read diagonals of an even row less lane // 4, odd ones the others.
    """
    lane, number, warp, span = lanes_of((keys, rows // 2))
    own = (2 * (lane % 4) + lane % 2 - lane // 4) % 8
    place = {
        (warp[at], lane[at], 8 * number[at] - 16 + own[at]): np.ravel_multi_index(at, lane.shape)
        for at in np.ndindex(lane.shape)
        if number[at] < span // 8 + 2
    }
    found = np.zeros((keys, rows), np.int64)
    for at in np.ndindex(keys, rows):
        k, q = at
        mine = k % 8 * 4 + q % 8 // 2
        other = (mine + (9 if mine % 2 == 0 else -9)) % LANES
        warp_at = k // 16 + q // span * (keys // 16)
        kept = [place.get((warp_at, x, q % span - k % 16)) for x in (mine, other)]
        (found[at],) = (each for each in kept if each is not None)
    return found


@lru_cache
def adders(keys, rows):
    """Of each score of a tile the place in [keys, rows // 2] of the sum that it goes into."""
    lane, number, warp, span = lanes_of((keys, rows // 2))
    own = (2 * (lane % 4) + lane % 2 - lane // 4) % 8
    halves = span // 16 + 1
    quarters = (halves + 1) // 2
    high, odd = lane % 4 // 2, lane % 2
    kept = number < np.where(odd, halves - quarters, quarters)
    eight = number + high * halves + odd * quarters
    place = {
        (warp[at], 8 * eight[at] - 16 + own[at]): np.ravel_multi_index(at, lane.shape)
        for at in np.ndindex(lane.shape)
        if kept[at]
    }
    assert len(place) == kept.sum()
    k, q = np.indices((keys, rows))
    warp_at = k // 16 + q // span * (keys // 16)
    return np.vectorize(lambda *at: place[at])(warp_at, q % span - k % 16)


def broadcast_diagonals(read, pointer=None):
    keys, half = read.shape
    return np.asarray(read).reshape(-1)[readers(keys, 2 * half)].view(type(read))


def reduce_diagonals(values):
    keys, rows = values.shape
    found = np.zeros(keys * rows // 2, np.float32)
    np.add.at(found, adders(keys, rows), np.asarray(values))
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
            "sub": lambda a=a, rest=rest: a - rest[0],
            "xor": lambda a=a, rest=rest: a ^ rest[0],
            "and": lambda a=a, rest=rest: a & rest[0],
            "shr": lambda a=a, rest=rest: a >> rest[0],
            "setp.ne": lambda a=a, rest=rest: a != rest[0],
            "setp.ge": lambda a=a, rest=rest: a >= rest[0],
            "selp": lambda a=a, rest=rest: np.where(rest[1], a, rest[0]),
            "shfl": lambda a=a, rest=rest: a[rest[0]],
        }[".".join(op.split(".")[: 1 + op.startswith("setp")])]()
    return np.stack([names[f"${i}"] for i in range(count)], -1)
