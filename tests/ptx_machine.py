"""Runs PTX in Python, warp by warp: integers, comparisons, loops, shuffles and stores."""

import re

_HIGH = {"16": 0xFFFF, "32": 0xFFFFFFFF, "64": 2**64 - 1, "x2": 0xFFFFFFFF}


def _prmt(a, b, selector):
    found = [x >> shift & 255 for x in (a, b) for shift in (0, 8, 16, 24)]
    picked = [(found[n & 7], n & 8) for n in (selector >> shift & 15 for shift in (0, 4, 8, 12))]
    # The high bit of a selector's digit copies the byte's sign over all of it.
    each = [(255 if byte >> 7 else 0) if sign else byte for byte, sign in picked]
    return sum(byte << 8 * place for place, byte in enumerate(each))


def _signed(x):
    return (x + 2**31) % 2**32 - 2**31


_TYPES = {"b32": lambda x: x, "u32": lambda x: x, "s32": _signed}
_COMPARISONS = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "gt": lambda x, y: x > y,
}
_OPERATIONS = {
    "mov": lambda x: x,
    "cvt": lambda x: x,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "shl": lambda x, y: x << y,
    "shr": lambda x, y: x >> y,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "mad": lambda x, y, z: x * y + z,
    "bfe": lambda x, start, size: (x >> start) & ((1 << size) - 1),
    "prmt": _prmt,
    "set": lambda x, y: _HIGH["32"] if x > y else 0,
    "selp": lambda x, y, first: x if first else y,
}


def run(ptx, parameters, memory, threads=128):
    """What a kernel stores: words by address.

    parameters: its numbers and addresses, which are not negative. memory: what every load gives.
    """
    body = re.sub(
        r"//[^\n]*|\.loc[^\n]*|\.pragma[^\n]*", "", ptx[ptx.index("{\n") : ptx.index("ret;")]
    )
    body = re.sub(r"(\$L\w+):", r"\1;", body)
    statements = [each.strip(" {}\n\t") for each in body.replace("\n", " ").split(";")]
    statements = [each for each in statements if each]
    stored = {}
    for first in range(0, threads, 32):
        _run_warp(
            [
                _run_thread(statements, thread, parameters, memory, stored)
                for thread in range(first, first + 32)
            ]
        )
    return stored


def _run_warp(lanes):
    """All of them up to a shuffle, which all reach or none."""
    asked = [next(each, None) for each in lanes]
    while all(asked):
        given = [asked[source][0] for _, source in asked]
        asked = [_send(each, word) for each, word in zip(lanes, given, strict=True)]
    assert not any(asked)


def _send(lane, word):
    try:
        return lane.send(word)
    except StopIteration:
        return None


def _run_thread(statements, thread, parameters, memory, stored):
    """Yields the word that a lane gives to a shuffle and the lane it asks, and is sent a word."""
    registers = {"%tid.x": thread}
    places = {each: place for place, each in enumerate(statements) if each.startswith("$L")}

    def value(text):
        return registers[text] if text in registers else int(text, 0) & _HIGH["64"]

    place = 0
    while place < len(statements):
        name, _, rest = statements[place].partition(" ")
        place += 1
        operands = re.findall(r"[%$\w.-]+", rest)
        if name.startswith("@"):
            if registers[name[1:]]:
                place = places[operands[-1]]
        elif name.startswith("bra"):
            place = places[operands[0]]
        elif name.startswith("shfl"):
            lane = value(operands[2])
            asked = lane if ".idx." in name else thread % 32 ^ lane
            registers[operands[0]] = yield value(operands[1]), asked
        elif not name.startswith((".reg", "$L")):
            _run_statement(name, operands, value, registers, parameters, memory, stored)


def _run_statement(name, operands, value, registers, parameters, memory, stored):
    kind, _, suffix = name.partition(".")
    if name.startswith("ld.param"):
        registers[operands[0]] = parameters[int(operands[1].rpartition("_")[2])]
    elif name.startswith("ld.global"):
        registers[operands[0]] = memory
    elif name.startswith("st.global"):
        address, offset, word = operands
        stored[value(address) + int(offset)] = value(word) & _HIGH["32"]
    elif kind == "setp":
        compared, read = suffix.split(".")
        registers[operands[0]] = _COMPARISONS[compared](
            *(_TYPES[read](value(each)) for each in operands[1:])
        )
    elif suffix == "pred":
        registers[operands[0]] = _OPERATIONS[kind](*map(value, operands[1:]))
    elif name == "mov.b64" and len(operands) == 3:
        low, high, source = operands
        registers[low] = value(source) & _HIGH["32"]
        registers[high] = value(source) >> 32
    else:
        high = _HIGH["64" if "wide" in suffix else suffix[-2:]]
        found = _OPERATIONS[kind](*map(value, operands[1:]))
        registers[operands[0]] = found & (_HIGH["32"] if kind == "cvt" else high)
