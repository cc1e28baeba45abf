"""A workload file is data: it runs no function that its reader does not allow, and has bounds."""

import os
import sys
from types import ModuleType

import pytest

from flexattn import warm
from flexattn.errors import InputError, InputTypeError
from flexattn.tuning.tasks import mods_of
from flexattn.tuning.workload import parse_workload, read

NAMED = """
[[layers]]
heads = [2, 1]
head_dim = 64
score = { mod = "NAME", args = ["id > executed"] }
[[layers.calls]]
q_len = 128
"""


@pytest.mark.parametrize(
    ("named", "allow", "words"),
    [
        ("os:system", (), "--allow-module os, in Python allow=\\['os'\\]"),
        ("subprocess:run", ("os",), "--allow-module subprocess"),
        ("flexattn.catalogue.masks:torch.hub.load", (), "is from torch.hub"),
        ("flexattn.catalogue.scores:math.exp", (), "is from math"),
        ("flexattn.catalogue:causal.__globals__.get", (), "is from None"),
        ("flexattn.cli:main", (), "--allow-module flexattn.cli"),
        ("flexattn.catalogues:causal", (), "--allow-module flexattn.catalogues"),
        ("named_by_a_file:system", ("named_by_a_file",), "is from (posix|nt|os)"),
        (
            "named_by_a_file:os.system",
            ("named_by_a_file",),
            "define a function in named_by_a_file",
        ),
        ("named_by_a_file.no:f", ("named_by_a_file",), "cannot import 'named_by_a_file.no'"),
    ],
)
def test_a_file_names_no_function_that_its_reader_does_not_allow(
    monkeypatch, tmp_path, named, allow, words
):
    """os:system ran with the file's arguments at tune --dry-run, why --workload and warm."""
    module = ModuleType("named_by_a_file")
    module.system, module.os = os.system, os
    monkeypatch.setitem(sys.modules, "named_by_a_file", module)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.toml"
    path.write_text(NAMED.replace("NAME", named))
    for reader in (read, lambda path, allow: warm(path, "cpu", allow=allow)):
        with pytest.raises(InputError, match=words):
            reader(path, allow)
    assert not (tmp_path / "executed").exists()


def test_a_module_that_is_allowed_gives_its_own_functions(monkeypatch):
    module = ModuleType("named_by_a_file.mods")
    exec("def even(b, h, q_idx, kv_idx): return kv_idx % 2 == 0", module.__dict__)
    for name in ("named_by_a_file", "named_by_a_file.mods"):
        monkeypatch.setitem(sys.modules, name, module)
    layer = {"heads": 2, "head_dim": 64, "mask": "named_by_a_file.mods:even"}
    data = {"layers": [{**layer, "calls": [{"q_len": 128}]}]}
    for allow in (["named_by_a_file"], ("json", "named_by_a_file.mods")):
        (each,) = parse_workload(data, "x", "x", allow).rows
        assert mods_of(each) == (None, module.even)
    with pytest.raises(InputTypeError, match="list of modules' names"):
        parse_workload(data, "x", "x", "named_by_a_file")


MANY = ",".join(map(str, range(1, 3001)))
PLANS = "q_len=1\nkind='serving'\n"
CALL = "[[layers]]\nheads=[2,1]\nhead_dim=64\n[[layers.calls]]\n"
BOMB = "a0: &a0 [1,1]\n" + "".join(
    f"a{i}: &a{i} [*a{i - 1},*a{i - 1},*a{i - 1},*a{i - 1}]\n" for i in range(1, 14)
)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("many.toml", f"{CALL}batch=[{MANY}]\nq_len=[{MANY}]\nkv_len=[{MANY}]\n", "27000000000"),
        ("plans.toml", f"{CALL}{PLANS}page_size=[{MANY}]\nlengths={['mixed'] * 99}", "297000"),
        ("many.toml", f"{CALL}q_len=[{MANY}]\ndtype={['fp16'] * 4}\n", "12000 rows"),
        ("calls.toml", CALL + f"q_len=[{MANY}]\n[[layers.calls]]\n" * 4 + "q_len=1", "12000 rows"),
        ("deep.json", '{"layers":' + "[" * 100000 + "]" * 100000 + "}", "nested deeper"),
        ("deep.json", '{"layers":' + "[" * 17 + "]" * 17 + "}", "at most 16"),
        ("deep.toml", "x = " + "[" * 50000 + "]" * 50000, "nested deeper"),
        ("deep.toml", ".".join("a" * 2000) + " = 1", "nested deeper"),
        ("deep.yaml", "x: " + "[" * 500_000, "nested deeper"),
        ("bomb.yaml", BOMB, "more than 200000 values"),
        ("large.toml", "#" * 2**20 + "\n", "at most 1048576 bytes"),
    ],
)  # fmt: skip
def test_a_file_has_bounds(tmp_path, name, text, words):
    """Lists of 42 KB made 2.7e10 rows, until the memory was gone."""
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words):
        read(tmp_path / name)


def test_a_file_is_opened_as_carefully_as_a_record(tmp_path):
    """A pipe blocked for ever, /dev/zero filled the memory; a link to a file is one."""
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    (tmp_path / "folder.toml").mkdir()
    for name in ("pipe", "zero", "folder"):
        with pytest.raises(InputError, match="a workload is a readable file of at most"):
            read(tmp_path / f"{name}.toml")
    (tmp_path / "real.toml").write_text(f"{CALL}q_len=[1,2]")
    (tmp_path / "link.toml").symlink_to(tmp_path / "real.toml")
    assert len(read(tmp_path / "link.toml").rows) == len(read(tmp_path / "real.toml").rows)


def test_a_mapping_has_the_bounds_of_a_file():
    inner = []
    for _ in range(99_999):
        inner = [inner]
    for data, words in (({"layers": inner}, "nested"), ({"layers": [[1] * 300_000]}, "values")):
        with pytest.raises(InputError, match=words):
            parse_workload(data, "x", "warm(...)")
