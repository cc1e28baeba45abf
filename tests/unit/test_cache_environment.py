"""The environment of a record: what changes it, what does not, and that it is found once."""

from dataclasses import replace
from pathlib import Path

import pytest

from flexattn import cuda_driver
from flexattn.cache import environment as module
from flexattn.cache.environment import bare, environment, serving_policy, source_hash
from flexattn.cache.record import SCHEMA, Policy, slug
from flexattn.device import named

H200 = named("nvidia-h200")


def test_the_fields_are_this_processs():
    import torch
    import triton

    found = environment("decode", H200)
    assert (found.schema, found.torch, found.triton) == (
        SCHEMA, str(torch.__version__), triton.__version__
    )  # fmt: skip
    assert (found.device, found.arch, found.num_sms) == ("nvidia-h200", "sm_90", 132)
    assert (found.graph, found.cold_l2) == serving_policy("decode", H200) == (True, True)
    assert all(type(getattr(found, name)) in (str, int, bool) for name in found.__slots__)


def test_a_kind_a_device_and_a_policy_have_folders_of_their_own():
    base = environment("decode", H200)
    warm = Policy(graph=False, cold_l2=False, rounds=3, min_ms=1.0)
    folders = {
        base.folder,
        environment("prefill", H200).folder,
        environment("decode", named("nvidia-h100")).folder,
        environment("decode", H200, warm).folder,
        *(replace(base, **{name: "x"}).folder for name in ("template", "triton", "torch")),
        replace(base, driver="x").folder,
    }
    assert len(folders) == 8
    more = replace(warm, rounds=99, min_ms=9.0)
    assert environment("decode", H200, warm) == environment("decode", H200, more)
    assert base.folder.startswith("nvidia-h200-") and base.differing(base) == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvidia-h200", "nvidia-h200"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("../../etc/passwd", "etc-passwd"),
        ("a\x00b/..", "a-b"),
        ("", "unnamed"),
        ("x" * 300, "x" * 64),
    ],
)
def test_a_devices_name_is_a_plain_file_name(name, expected):
    assert slug(name) == expected


def test_it_is_found_once(monkeypatch):
    first = environment("prefill", H200)
    monkeypatch.setattr(module, "source_hash", None)
    assert environment("prefill", H200) is first


class Driver:
    """Stands for libcuda: it counts what is asked of it and writes a version, or fails."""

    def __init__(self, version=0, status=0):
        self.number, self.status, self.asked = version, status, []

    def __getattr__(self, name):
        if name != "cuDriverGetVersion":
            raise AttributeError(name)

        def ask(at):
            self.asked.append(name)
            at._obj.value = self.number
            return self.status

        return ask


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (Driver(13000), "13"),
        (Driver(12080), "12"),
        (Driver(), ""),
        (Driver(13000, status=34), ""),  # the stub library of a toolkit
        (object(), ""),
    ],
    ids=["13.0", "12.8", "zero", "an_error", "not_a_driver"],
)
def test_the_driver_is_asked_for_its_version_and_nothing_else(monkeypatch, library, expected):
    monkeypatch.setattr(module.torch.version, "hip", None)
    monkeypatch.setattr(cuda_driver, "_cuda", lambda: library)
    assert module._driver() == expected
    if isinstance(library, Driver):
        assert library.asked == ["cuDriverGetVersion"]


def test_without_a_driver_there_is_no_version_and_no_error(monkeypatch):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(module.torch.version, "hip", None)
    monkeypatch.setattr(cuda_driver, "_cuda", missing)
    assert cuda_driver.version() == 0 and module._driver() == ""


def test_hip_has_its_own_version(monkeypatch):
    monkeypatch.setattr(module.torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(cuda_driver, "_cuda", None)
    assert module._driver() == "6"


def test_decode_depends_on_the_kernel_that_merges_its_splits(monkeypatch):
    plain = {kind: source_hash(kind) for kind in ("prefill", "decode")}
    hashes = module.template_hash

    def changed(name):
        return "0" * 16 if "combine" in name else hashes(name)

    monkeypatch.setattr(module, "template_hash", changed)
    source_hash.cache_clear()
    assert source_hash("prefill") == plain["prefill"]
    assert source_hash("decode") != plain["decode"]
    source_hash.cache_clear()


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("serving_layouts.py", {"serving"}),
        ("serving_reads.py", {"serving"}),
        ("serving_join.py", set()),
        ("interpreted_gluon.py", set()),
        ("score_printer.py", {"prefill", "decode", "serving"}),
        ("tiles.py", {"prefill"}),
    ],
)
def test_a_change_makes_hints_of_the_records_that_it_concerns_alone(name, kinds, monkeypatch):
    """Once a change of what renders plans made hints of every record of prefill too."""
    every = ("prefill", "decode", "serving")

    def hashes():
        source_hash.cache_clear()
        module.renderer_hash.cache_clear()
        return {kind: source_hash(kind, True) for kind in every}

    plain, read = hashes(), Path.read_text

    def changed(path, **how):
        return read(path, **how) + ("\nx = 1\n" if path.name == name else "")

    monkeypatch.setattr(Path, "read_text", changed)
    now = hashes()
    monkeypatch.undo()
    assert {kind for kind in every if now[kind] != plain[kind]} == kinds
    assert hashes() == plain


SOURCE = '''
"""A module."""

# why
def f(x):
    """One line."""
    y = x + 1  # a reason
    return f"# {y}  # not a comment"


class C:
    """Two
    lines."""

    text = """kept"""
'''


def test_comments_and_docstrings_do_not_count():
    lines = bare(SOURCE).splitlines()
    assert lines == [
        "def f(x):", "    y = x + 1", '    return f"# {y}  # not a comment"', "class C:",
        '    text = """kept"""',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("# why", "# another reason, in\n# two lines", True),
        ("One line.", "Other words.", True),
        ("# a reason", "# an effect", True),
        ("x + 1", "x + 2", False),
        ("# not a comment", "# not a remark", False),
        ("kept", "changed", False),
    ],
)
def test_what_changes_the_hash(old, new, same):
    assert (bare(SOURCE) == bare(SOURCE.replace(old, new))) == same
