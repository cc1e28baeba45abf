"""A mod that another process traced is recognised by what its code reads, or traced again."""

import enum
import functools
import json

import pytest
import torch

from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import bind, operators
from flexattn.mods.bind import clear, record, stats
from flexattn.mods.identity import identify
from flexattn.mods.recorded import digest
from flexattn.settings import override
from tests.processes import python

SCORE = ("score", "b", "h", "q_idx", "kv_idx")

# A module's text, and changes of it that a reader must see.
MODULE = """
import functools, torch
from torch.nn.attention.flex_attention import and_masks
WINDOW = 16
class Config:
    cap = 30.0
def helper(x, bound=2.0):
    return torch.clamp(x, -bound, bound)
def factory(slope):
    def mod(score, b, h, q_idx, kv_idx, *, bias=1.5):
        return helper(score) * slope + bias + Config.cap * (q_idx - kv_idx < WINDOW)
    return mod
mod = factory(0.5)
"""
CHANGES = {
    "constant": ("30.0", "31.0"),
    "global": ("WINDOW = 16", "WINDOW = 17"),
    "helper": ("torch.clamp(x, -bound, bound)", "torch.clamp(x, -bound, bound + 1)"),
    "helper's function": ("torch.clamp", "torch.clip"),
    "helper's default": ("bound=2.0", "bound=3.0"),
    "closure": ("factory(0.5)", "factory(0.25)"),
    "keyword default": ("bias=1.5", "bias=1.25"),
    "comparison": ("kv_idx < WINDOW", "kv_idx <= WINDOW"),
    "integer for float": ("cap = 30.0", "cap = 30"),
}


def made(text, name="users_module"):
    scope = {"__name__": name}
    exec(compile(text, f"{name}.py", "exec"), scope)
    return scope["mod"]


def value(bound, **env):
    names = SCORE if bound.mod.kind == "score" else SCORE[1:]
    numbers = {
        n: torch.tensor(float(env.get(n, 0)) if n == "score" else env.get(n, 0)) for n in names
    }
    return evaluate(bound.mod, numbers, bound.tensors, bound.scalars).item()


def seen(fn, kind, root):
    """The mod as a process that starts now has it, and how many traces that took."""
    clear()
    with override(binaries=root):
        bound = bind(fn, kind)
    return bound, stats().traces


def test_same_text_is_recognised(tmp_path):
    assert record(made(MODULE), "score", tmp_path)
    wanted = bind(made(MODULE), "score").mod
    bound, traces = seen(made(MODULE), "score", tmp_path)
    assert traces == 0
    assert bound.mod == wanted and value(bound, score=9, q_idx=3) == 2 * 0.5 + 1.5 + 30


def test_what_others_may_write_is_traced(tmp_path, caplog):
    """A file says what a callable means: another one gives other results without a word."""
    record(made(MODULE), "score", tmp_path)
    (path,) = (tmp_path / "mods").iterdir()
    path.chmod(0o666)
    assert seen(made(MODULE), "score", tmp_path)[1] >= 1
    assert "nobody else may write" in caplog.text and "the mod is traced" in caplog.text


@pytest.mark.parametrize("change", CHANGES)
def test_changed_text_is_traced(tmp_path, change):
    record(made(MODULE), "score", tmp_path)
    changed = made(MODULE.replace(*CHANGES[change]))
    bound, traces = seen(changed, "score", tmp_path)
    assert traces >= 1
    clear()
    assert value(bound, score=9, q_idx=16) == value(bind(changed, "score"), score=9, q_idx=16)


def test_comments_lines_and_places_do_not_matter(tmp_path):
    record(made(MODULE), "score", tmp_path)
    moved = MODULE.replace("WINDOW = 16", "# of keys\n\n\nWINDOW = 16  # as trained")
    assert seen(made(moved, "elsewhere"), "score", tmp_path)[1] == 0


def test_values_recorded_one_by_one_are_all_constants(tmp_path):
    def window(n):
        return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < n

    for n in (16, 0, 64):
        assert record(window(n), "mask", tmp_path)
    assert len(list((tmp_path / "mods").iterdir())) == 3
    clear()
    with override(binaries=tmp_path):
        for n in (64, 16, 0):
            bound = bind(window(n), "mask")
            assert bound.scalars == ()
            assert value(bound, q_idx=n + 2, kv_idx=3) and not value(bound, q_idx=n + 3, kv_idx=3)
        assert stats().traces == 0
        # Another value is learnt here as ever: as an argument.
        assert bind(window(9), "mask").scalars == (9,)


def test_tensors_are_read_where_they_are_now(tmp_path):
    def biased(bias):
        return lambda score, b, h, q_idx, kv_idx: score + bias[h]

    record(biased(torch.zeros(4)), "score", tmp_path)
    bias = torch.arange(9.0)
    bound, traces = seen(biased(bias), "score", tmp_path)
    assert traces == 0 and bound.tensors[0] is bias and value(bound, h=7) == 7
    for other in (torch.zeros(4, dtype=torch.float16), torch.zeros(4, 4)[0:1, 0]):
        assert seen(biased(other), "score", tmp_path)[1] == int(other.dtype != torch.float32)


def test_sizes_count_where_the_mod_reads_them(tmp_path):
    def scaled(bias):
        return lambda score, b, h, q_idx, kv_idx: score * bias.shape[0] + bias[h]

    record(scaled(torch.zeros(4)), "score", tmp_path)
    assert seen(scaled(torch.zeros(4)), "score", tmp_path)[1] == 0
    bound, traces = seen(scaled(torch.zeros(5)), "score", tmp_path)
    assert traces >= 1 and value(bound, score=2) == 10


def test_composed_masks_and_partials(tmp_path):
    text = MODULE + (
        "def near(w, b, h, q_idx, kv_idx): return q_idx - kv_idx < w\n"
        "def causal(b, h, q_idx, kv_idx): return q_idx >= kv_idx\n"
        "mod = and_masks(causal, functools.partial(near, WINDOW))\n"
    )
    assert record(made(text), "mask", tmp_path)
    assert seen(made(text), "mask", tmp_path)[1] == 0
    assert seen(made(text.replace("q_idx >= kv_idx", "q_idx > kv_idx")), "mask", tmp_path)[1] >= 1


class Side(enum.Enum):
    LEFT = 1


class Odd(float):
    def __radd__(self, other):
        return other + 7


@pytest.mark.parametrize(
    "captured", [Side.LEFT, Odd(2.0), {1, 2}, open], ids=["enum", "float", "set", "C function"]
)
def test_what_has_no_form_of_its_own_gets_no_digest(captured, tmp_path):
    def mod(score, b, h, q_idx, kv_idx):
        return score + len(str(captured))

    assert digest(identify(mod, "score")) is None
    assert not record(mod, "score", tmp_path)


def test_devices_count_where_the_code_names_them():
    def digests(fn, **tensors):
        return {
            digest(identify(fn(t), "score"))
            for t in (torch.zeros(3), torch.zeros(3, device="meta"))
        }

    assert len(digests(lambda t: lambda s, b, h, q, k: s + t[h])) == 1
    assert len(digests(lambda t: lambda s, b, h, q, k: s + t[h] + t.is_cuda)) == 2


def test_what_asks_for_a_gpu_gets_no_digest():
    """Recorded where there is none it would say so everywhere."""

    def mod(score, b, h, q_idx, kv_idx):
        return score * 2 if torch.cuda.is_available() else score

    assert digest(identify(mod, "score")) is None


def test_what_operators_were_taught_gets_no_digest(monkeypatch):
    """Another process may have taught them otherwise: it took this one's expression."""

    def mod(score, b, h, q_idx, kv_idx):
        return torch.ops.approx.tanh(score)

    known = digest(identify(mod, "score"))
    monkeypatch.setattr(operators, "_meanings", operators._meanings | {"my.op": torch.exp})
    assert known is not None and digest(identify(mod, "score")) is None


def test_the_default_dtype_counts():
    mod = made(MODULE)
    before = digest(identify(mod, "score"))
    torch.set_default_dtype(torch.float64)
    try:
        assert digest(identify(mod, "score")) != before
    finally:
        torch.set_default_dtype(torch.float32)


CHILD = """
import sys
from pathlib import Path
sys.path[:0] = [{here!r}]
from flexattn.mods import bind
from flexattn.mods.bind import stats
from flexattn.catalogue import causal, softcap
import users_module
mods = [bind(users_module.mod, "score"), bind(softcap(30.0), "score"), bind(causal, "mask")]
print(stats().traces, *[each.mod.fingerprint for each in mods])
"""


def test_another_process_recognises_without_tracing(tmp_path):
    (tmp_path / "users_module.py").write_text(MODULE)
    from flexattn.catalogue import causal, softcap

    mods = [(made(MODULE), "score"), (softcap(30.0), "score"), (causal, "mask")]
    prints = [bind(fn, kind).mod.fingerprint for fn, kind in mods]
    assert all(record(fn, kind, tmp_path) for fn, kind in mods)
    about = {"FLEXATTN_BINARIES": tmp_path, "PYTHONHASHSEED": 7}
    out, err = python("-c", CHILD.format(here=str(tmp_path)), **about)
    assert out.split() == ["0", *prints], err


def recorded_file(tmp_path):
    record(made(MODULE), "score", tmp_path)
    (path,) = (tmp_path / "mods").iterdir()
    return path


def resealed(path, change):
    from flexattn.util.files import sealed, unsealed

    data = unsealed(path.read_bytes())
    change(data)
    path.write_text(sealed(data))


DAMAGE = {
    "cut": lambda p: p.write_bytes(p.read_bytes()[:-40]),
    "a changed digit": lambda p: p.write_text(p.read_text().replace("30.0", "31.0")),
    "no JSON": lambda p: p.write_text("import os"),
    "too large": lambda p: p.write_bytes(b" " * 2**22),
    "a link": lambda p: (p.rename(p.with_suffix(".real")), p.symlink_to(p.with_suffix(".real"))),
    "a folder": lambda p: (p.unlink(), p.mkdir()),
    "another schema": lambda p: resealed(p, lambda d: d.update(schema=1)),
    "an index past the captures": lambda p: resealed(p, lambda d: d.update(tensors=[99])),
    "a tensor that nothing reads": lambda p: resealed(p, lambda d: d.update(tensors=[-1])),
    "a slot of another kind": lambda p: resealed(p, lambda d: d["mod"].update(scalars=["int64"])),
    "a field too many": lambda p: resealed(p, lambda d: d.update(code="...")),
    "a mask": lambda p: resealed(p, lambda d: d["mod"].update(kind="mask")),
    "a list": lambda p: resealed(p, lambda d: d.update(mod=[])),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_no_record_is_a_miss_and_said(tmp_path, damage, caplog):
    path = recorded_file(tmp_path)
    DAMAGE[damage](path)
    bound, traces = seen(made(MODULE), "score", tmp_path)
    assert traces == 1 and value(bound, score=9, q_idx=3) == 2 * 0.5 + 1.5 + 30
    assert "traced" in caplog.text and path.name in caplog.text


def test_deep_nesting_is_no_crash(tmp_path):
    from flexattn.errors import CacheError
    from flexattn.util.files import sealed, unsealed

    text = sealed(1).replace("1", "[" * 100000, 1)
    with pytest.raises(CacheError):
        unsealed(text.encode())
    assert unsealed(sealed({"a": [1, None, 0.1]}).encode()) == {"a": [1, None, 0.1]}
    assert json.loads(sealed([2]))["data"] == [2]


def test_without_a_directory_nothing_is_read(tmp_path):
    record(made(MODULE), "score", tmp_path)
    clear()
    bind(functools.partial(made(MODULE)), "score")
    assert stats().traces == 1
