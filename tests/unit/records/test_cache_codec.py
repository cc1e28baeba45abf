"""Records as text: exact there and back, and nothing but a record is taken for one."""

import hashlib
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from flexattn.errors import CacheError
from flexattn.kernels.base.config import Config
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig
from flexattn.records.codec import (
    MAX_BYTES,
    decode,
    decode_answer,
    decode_record,
    encode,
    encode_record,
    whole_trials,
)
from flexattn.records.record import SCHEMA, Failed, Gated, Trial, rounded
from tests.records import decode_record as split, prefill_record as record

RECORD = record(provenance="measured")
FLOATS = st.floats(0, 1e12)
SAMPLES = st.lists(st.floats(1e-4, 1e12), max_size=5).map(tuple)
TEXT = st.text(max_size=40)
COUNTS = st.integers(0, 2**31)
CONFIGS = st.builds(
    PrefillConfig, st.sampled_from([16, 128]), st.sampled_from([32, 1024]),
    st.sampled_from([1, 4, 32]), st.integers(0, 8), st.booleans(),
)  # fmt: skip
TRIALS = st.builds(
    Trial, CONFIGS, COUNTS, COUNTS, COUNTS,
    st.none() | st.builds(Gated, TEXT, FLOATS, FLOATS, FLOATS, st.booleans()),
    SAMPLES, COUNTS, SAMPLES,
    st.none() | st.builds(Failed, st.sampled_from(["gate", "hang"]), TEXT, TEXT),
)  # fmt: skip
SIZES = st.integers(0, 2**26)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(TRIALS, max_size=4), st.tuples(SIZES, SIZES, SIZES), TEXT,
    st.lists(st.tuples(TEXT, COUNTS), max_size=3).map(tuple), FLOATS,
)  # fmt: skip
def test_a_record_survives_its_text(trials, sizes, text, rejected, seconds):
    B, q_len, kv_len = map(rounded, sizes)
    winner = Trial(PrefillConfig(64, 64, 4, 2), gate=Gated(text, 1.0, 2.0, 1.0, True))
    wanted = replace(
        RECORD, trials=(winner, *trials), sizes=sizes,
        key=replace(RECORD.key, B=B, q_len=q_len, kv_len=kv_len, score=text), rejected=rejected,
        decision=replace(RECORD.decision, winner=0, default=0), seconds=seconds, title=text,
        note=text,
    )  # fmt: skip
    raw = encode_record(wanted).encode()
    assert decode_record(raw) == wanted
    assert decode_answer(raw) == wanted.answer
    assert encode_record(decode_record(raw)).encode() == raw


def test_the_text_is_one_object_that_people_can_read():
    text = encode_record(split(provenance="measured"))
    data = json.loads(text)
    assert data["key"]["kv_len"] == 8192 and data["environment"]["device"] == "nvidia-h200"
    assert data["config"]["type"] == "DecodeConfig" and data["schema"] == SCHEMA
    lines = text.splitlines()
    assert lines[lines.index(' "trials": [') + 1].startswith('["config","registers",')
    assert sum(line.startswith("[{") for line in lines) == len(data["trials"]) - 1
    assert [*data] == [line.split('"')[1] for line in lines if line.startswith(' "')]


def test_errors_without_a_number_stay_readable():
    gate = Gated("out max", math.nan, 1.0, math.inf, False)
    trial = replace(RECORD.trials[-1], gate=gate, failed=Failed("gate", "fault", "NaN"))
    raw = encode_record(replace(RECORD, trials=(*RECORD.trials, trial))).encode()
    found = decode_record(raw).trials[-1].gate
    assert found.error > 1e300 and found.reference > 1e300


def text_of(data):
    """Data as a file with a checksum that fits: only what it says can be wrong."""
    trials = data.pop("trials", [])
    body = json.dumps(data, indent=1).removesuffix("\n}")
    body += ',\n "trials": ' + json.dumps(trials)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body},\n "sha256": "{digest}"\n}}\n'.encode()


def forged(change):
    data = json.loads(encode_record(RECORD))
    del data["sha256"]
    data["trials"] = whole_trials(data["trials"], data["config"])
    change(data)
    return text_of(data)


@pytest.mark.parametrize("us", [0, -3.5, 4e-5])
@pytest.mark.parametrize("samples", ["screening", "finals"])
def test_a_sample_that_is_no_time_is_refused(samples, us):
    """Whoever read such a record divided by it: a report or a replay ended in a traceback."""
    change = put(f"trials.2.{samples}", [800.0, us])
    with pytest.raises(CacheError, match="a time is a finite number above 0"):
        decode_record(forged(change))
    assert decode_answer(forged(change)) == RECORD.answer, "dispatch reads no samples"


def put(path, value):
    def change(data):
        *parents, last = [int(name) if name.isdigit() else name for name in path.split(".")]
        for name in parents:
            data = data[name]
        data[last] = value

    return change


def test_the_forger_forges_well():
    assert decode_record(forged(lambda data: None)) == RECORD
    # Earlier versions wrote a field that nothing filled.
    assert decode_record(forged(put("transfer", []))) == RECORD
    assert decode_answer(forged(lambda data: None)) == RECORD.answer


HEAD = {
    "a text for a number": put("key.B", "2"),
    "a number for a text": put("key.dtype", 3),
    "a float for an integer": put("key.B", 2.0),
    "true for an integer": put("key.B", True),
    "a negative size": put("key.B", -2),
    "an absurd size": put("key.B", 10**30),
    "a size that is not rounded": put("key.B", 3),
    "other sizes than the key's": put("sizes", [7, 7, 7]),
    "too few sizes": put("sizes", [2, 4096]),
    "a huge text": put("title", "x" * 5000),
    "a missing field": lambda data: data["key"].pop("dtype"),
    "a field too many": put("key.path", "/etc/passwd"),
    "a field too many in the config": put("config.command", "rm"),
    "another schema": put("schema", SCHEMA + 1),
    "a schema of another type": put("schema", True),
    "another schema in the environment": put("environment.schema", SCHEMA + 1),
    "a config of no class": put("config.type", "os.system"),
    "a config of the other template": put("config", {
        "type": "DecodeConfig", "BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2
    }),
    "a config of another device": put("config", {
        "type": "NkiPrefillConfig", "BLOCK_M": 128, "BLOCK_N": 512
    }),
    "a device of another config": put("environment.arch", "trn2"),
    "a tile that is no power of two": put("config.BLOCK_M", 96),
    "an absurd tile": put("config.BLOCK_N", 2**20),
    "an absurd number of warps": put("config.num_warps", 4096),
    "stages without end": put("config.num_stages", 2**40),
    "a flag that is a number": put("config.use_tma", 1),
    "NaN": put("decision.speedup", math.nan),
    "infinity": put("decision.p_value", math.inf),
    "a null": put("decision", None),
    "an unknown provenance": put("provenance", "guessed"),
    "a list for an object": put("policy", [True]),
    "an object for a list": put("sizes", {"B": 2}),
}  # fmt: skip
TAIL = {
    "samples of text": put("trials.0.screening", ["1.5"]),
    "samples without end": put("trials.0.screening", [1.5] * 20000),
    "NaN samples": put("trials.0.finals", [math.nan]),
    "an unknown stage": put("trials.0.failed", {"stage": "x", "error": "", "message": ""}),
    "a trial that is none": put("trials.0", 5),
    "trials without end": lambda data: data.update(trials=data["trials"] * 100),
    "no trials": lambda data: data.update(trials=[]),
    "a winner past the end": put("decision.winner", 4000),
    "a twin past the end": put("trials.0.same_code_as", 4000),
    "a winner that failed": lambda data: data["trials"][data["decision"]["winner"]].update(
        failed={"stage": "gate", "error": "", "message": ""}
    ),
    "a winner that nobody judged": lambda data: data["trials"][data["decision"]["winner"]].update(
        gate=None
    ),
    "a winner with a red gate": lambda data: data["trials"][data["decision"]["winner"]].update(
        gate={"name": "", "error": 2.0, "budget": 1.0, "reference": 1.0, "passed": False}
    ),
    "another config than the winner's": put("config.num_stages", 7),
    "a rejected count of text": put("rejected", [["shared memory", "many"]]),
    "an object for a list of pairs": put("rejected", {"shared memory": 1}),
    "rejections without end": put("rejected", [["shared memory", 1]] * 5000),
}


@pytest.mark.parametrize("name", [*HEAD, *TAIL])
def test_a_forged_record_is_refused(name):
    raw = forged({**HEAD, **TAIL}[name])
    with pytest.raises(CacheError):
        decode_record(raw)
    if name in HEAD:
        with pytest.raises(CacheError):
            decode_answer(raw)


WHOLE = encode_record(RECORD).encode()
BROKEN = {
    "nothing": b"",
    "no JSON": b"hello\n",
    "a cut": WHOLE[: len(WHOLE) // 2],
    "without its last byte": WHOLE[:-1],
    "an edit": WHOLE.replace(b'"num_warps":4', b'"num_warps":8', 1),
    "an edit of a sample": WHOLE[:-400] + b"9" + WHOLE[-399:],
    "something behind it": WHOLE + b"{}",
    "two of them": WHOLE + WHOLE,
    "zeros": bytes(len(WHOLE)),
    "no UTF-8": b"\xff\xfe" + WHOLE,
    "too much": WHOLE + b" " * MAX_BYTES,
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("decode", [decode_record, decode_answer])
def test_a_broken_file_is_refused(name, decode):
    with pytest.raises(CacheError):
        decode(BROKEN[name])


def test_deep_nesting_and_long_numbers_are_refused():
    def signed(body):
        digest = hashlib.sha256(body).hexdigest()
        return body + f',\n "sha256": "{digest}"\n}}\n'.encode()

    deep = b'{\n "schema": ' + b"[" * 100000 + b"]" * 100000 + b',\n "rejected": []'
    long = b'{\n "schema": ' + b"9" * 10000 + b',\n "rejected": []'
    for body in (deep, long):
        for read in (decode_record, decode_answer):
            with pytest.raises(CacheError):
                read(signed(body))


def test_a_knob_that_a_record_does_not_know_has_its_default():
    def old(data):
        for config in (data["config"], *(trial["config"] for trial in data["trials"])):
            config.pop("use_tma")

    found = decode_record(forged(old))
    assert not found.config.use_tma


def test_a_knob_that_is_gone_is_read_where_it_was_not_turned():
    config = HopperPrefillConfig(2, 128, 2, 240)
    known = encode(config) | {"fp8_pv": False}
    assert decode(Config, known, "config") == config
    with pytest.raises(CacheError, match="fp8_pv is not False"):
        decode(Config, known | {"fp8_pv": True}, "config")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_noise_is_refused(raw):
    for read in (decode_record, decode_answer):
        with pytest.raises(CacheError):
            read(raw)


def test_configs_of_both_kinds_have_their_own_class():
    assert isinstance(decode_record(WHOLE).config, PrefillConfig)
    raw = encode_record(split(provenance="measured")).encode()
    assert isinstance(decode_answer(raw).config, DecodeConfig)
