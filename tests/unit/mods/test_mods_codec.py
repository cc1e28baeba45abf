"""A mod as data: the same object again, and an error for anything that is none."""

import copy
import json
import math
import struct

import pytest
import torch

from flexattn.errors import CacheError
from flexattn.mods import Mod, bind
from flexattn.mods.expr import VARS, Expr, const, fingerprint
from flexattn.mods.recorded import MAX_NODES, from_data, number_from_data, number_to_data, to_data
from tests.cases import CASES

MADE = {
    f"{case.name} {kind}": (fn, kind)
    for case in CASES
    for made in [case.make(2, 4, 2, 37, 53)]
    for kind, fn in (("score", made.score_mod), ("mask", made.mask_mod))
    if fn is not None
}


@pytest.mark.parametrize("name", MADE)
def test_every_mod_of_the_catalogue_survives(name):
    mod = bind(*MADE[name]).mod
    text = json.dumps(to_data(mod), allow_nan=False)
    again = from_data(json.loads(text))
    assert again == mod and again.expr is mod.expr


NUMBERS = [0, 1, -1, 2**63, True, False, 0.0, -0.0, 0.1, 1e-310, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_numbers_keep_their_bits_and_their_type(number):
    again = number_from_data(json.loads(json.dumps(number_to_data(number), allow_nan=False)))
    assert type(again) is type(number)
    if isinstance(number, float):
        assert struct.pack("<d", again) == struct.pack("<d", number)
    else:
        assert again == number


def test_a_nan_with_other_bits_keeps_them():
    odd = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000123))[0]
    expr = Expr("add", "float32", (Expr("var", "float32", (), "score"), const(odd, "float32")))
    mod = Mod("score", expr, (), (), fingerprint("score", expr, (), ()))
    assert from_data(json.loads(json.dumps(to_data(mod), allow_nan=False))) == mod


def alibi(slopes):
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


GOOD = to_data(bind(alibi(torch.ones(4)), "score").mod)
LOAD = next(i for i, node in enumerate(GOOD["nodes"]) if node[0] == "load")
VARIABLE = next(i for i, node in enumerate(GOOD["nodes"]) if node[3] == "score")


def node(index, field, value):
    return lambda data: data["nodes"][index].__setitem__(field, value)


def field(name, value):
    return lambda data: data.__setitem__(name, value)


HOSTILE = {
    "no object": lambda data: data.clear(),
    "a field too many": field("code", "import os"),
    "another kind": field("kind", "eval"),
    "a kind of another type": field("kind", ["score"]),
    "no nodes": field("nodes", []),
    "nodes without end": lambda data: data.update(nodes=data["nodes"] * MAX_NODES),
    "an unknown operation": node(-1, 0, "system"),
    "an operation of another type": node(-1, 0, 7),
    "an attribute of torch": node(-1, 0, "load_library"),
    "an unknown dtype": node(-1, 1, "object"),
    "an operand ahead": node(-1, 2, [10**6, 0]),
    "an operand before the first": node(-1, 2, [-1, 0]),
    "an operand of text": node(-1, 2, ["0", "1"]),
    "too few operands": node(-1, 2, [0]),
    "a value where none is": node(-1, 3, 5),
    "an unknown variable": node(VARIABLE, 3, "__class__"),
    "a variable of another dtype": node(VARIABLE, 1, "int8"),
    "a slot past the end": node(LOAD, 3, 1),
    "a slot before the first": node(LOAD, 3, -1),
    "a slot that is true": node(LOAD, 3, True),
    "an index too many": lambda data: data["nodes"][LOAD][2].append(0),
    "an absurd number": node(VARIABLE, 3, 10**400),
    "a list for a value": node(VARIABLE, 3, [1]),
    "bits that are none": node(VARIABLE, 3, {"bits": "xyz"}),
    "an absurd rank": field("buffers", [["float32", 10**6]]),
    "a buffer of text": field("buffers", ["float32"]),
    "buffers without end": field("buffers", [["float32", 1]] * 1000),
    "another fingerprint": field("fingerprint", "0" * 64),
    "a fingerprint of another type": field("fingerprint", None),
    "another scalar": field("scalars", ["float32"]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_mod_is_refused(name):
    data = copy.deepcopy(GOOD)
    HOSTILE[name](data)
    with pytest.raises(CacheError):
        from_data(data)


@pytest.mark.parametrize("data", [None, 5, "mod", [], {}])
def test_other_data_is_refused(data):
    with pytest.raises(CacheError):
        from_data(data)


def test_a_mask_reads_no_score():
    score = Expr("var", VARS["score"], (), "score")
    expr = Expr("lt", "bool", (score, const(0.0, "float32")))
    mod = Mod("mask", expr, (), (), fingerprint("mask", expr, (), ()))
    with pytest.raises(CacheError):
        from_data(to_data(mod))
