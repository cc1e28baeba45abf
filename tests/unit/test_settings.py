"""What the environment says, overrides for a block of code, and what is said once."""

import logging
import os
import re
import threading
from pathlib import Path
from types import ModuleType

import pytest

from flexattn import settings
from flexattn.errors import SettingsError
from flexattn.settings import current, override, read_settings, say_once
from tests.processes import ROOT, python


def test_defaults():
    found = read_settings({})
    assert not found.interpret and found.debug == 0
    assert found.cache_dir == Path("~/.cache/flexattn").expanduser()


def test_values():
    found = read_settings({
        "FLEXATTN_INTERPRET": "1", "FLEXATTN_DEBUG": "4", "FLEXATTN_CACHE_DIR": "~/there"
    })  # fmt: skip
    assert found.interpret and found.debug == 4
    assert found.cache_dir == Path("~/there").expanduser()
    empty = dict.fromkeys(
        ("FLEXATTN_INTERPRET", "FLEXATTN_DEBUG", "FLEXATTN_MODE", "FLEXATTN_CACHE"), ""
    )
    assert read_settings(empty) == read_settings({})


def test_where_records_are_looked_for_and_what_is_taken():
    found = read_settings(
        {"FLEXATTN_CACHE": os.pathsep.join(["/a", "", "~/b"]), "FLEXATTN_MODE": "tune"}
    )
    assert found.cache == (Path("/a"), Path("~/b").expanduser()) and found.mode == "tune"
    assert read_settings({}).cache == () and read_settings({}).mode == "replay"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLEXATTN_INTERPRET", "yes"),
        ("FLEXATTN_DEBUG", "7"),
        ("FLEXATTN_DEBUG", "12"),
        ("FLEXATTN_MODE", "on"),
        ("FLEXATTN_MODS", "module"),
        ("FLEXATTN_MODS", ":mods"),
    ],
)
def test_values_that_are_not_understood(name, value):
    with pytest.raises(SettingsError, match=f"{name}='{value}'"):
        read_settings({name: value})


def test_every_variable_has_a_default_and_a_meaning():
    assert {name for name, _, _ in settings.VARIABLES} >= {
        "FLEXATTN_INTERPRET", "FLEXATTN_DEBUG", "FLEXATTN_CACHE_DIR"
    }  # fmt: skip
    assert all(name.startswith("FLEXATTN_") and text for name, _, text in settings.VARIABLES)


def test_a_call_is_served_whatever_the_cache_directory(tmp_path):
    """A name of 300 letters ended a call in OSError, with a traceback of pathlib."""
    code = "import torch, flexattn; x = torch.zeros(1, 1, 2, 16); flexattn.flex_attention(x, x, x)"
    folder = str(tmp_path / ("a" * 300))
    about = {"interpret": True, "FLEXATTN_CACHE_DIR": folder, "FLEXATTN_CACHE": folder}
    _, said = python("-c", code, **about)
    assert "Traceback" not in said
    assert "File name too long; FLEXATTN_CACHE_DIR names another directory" in said
    assert f"FLEXATTN_CACHE names {folder}, which is no directory" in said


def test_a_path_that_no_directory_can_have_is_refused():
    with (
        pytest.raises(SettingsError, match="no path has a NUL in it"),
        override(cache_dir=Path("a\0b")),
    ):
        pass
    with pytest.raises(SettingsError, match=r"~no_such_user/x.*\n.*home of a user"):
        read_settings({"FLEXATTN_CACHE_DIR": "~no_such_user/x"})


def test_overrides_nest_and_end(tmp_path):
    before = current()
    with override(debug=3), override(cache_dir=tmp_path) as inner:
        assert current() is inner and (inner.debug, inner.cache_dir) == (3, tmp_path)
    assert current() == before


def test_an_override_ends_with_an_error():
    before = current()
    with pytest.raises(KeyError), override(debug=2):
        raise KeyError
    assert current() == before


def test_an_override_is_this_threads_own():
    seen = []
    with override(debug=5):
        thread = threading.Thread(target=lambda: seen.append(current().debug))
        thread.start()
        thread.join()
    assert seen == [current().debug]


def test_interpreting_cannot_be_switched_on_later():
    with pytest.raises(SettingsError, match="before the process starts"), override(interpret=True):
        pass


def test_said_once(caplog):
    with caplog.at_level(logging.WARNING, "flexattn"):
        for text in ("one", "two", "one"):
            say_once(text)
    assert [record.getMessage() for record in caplog.records] == ["one", "two"]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FLEXATTN_CHACHE": "/there"}, "FLEXATTN_CHACHE is set.*mean FLEXATTN_CACHE?"),
        ({"FLEXATTN_INTERPRETER": "1"}, "mean FLEXATTN_INTERPRET?"),
        (
            {"FLEXATTN_CACHE": f"{ROOT}{os.pathsep}/nowhere"},
            "FLEXATTN_CACHE names /nowhere.*no directory.*make it",
        ),
        ({"FLEXATTN_CACHE": str(ROOT), "FLEXATTN_MODE": "off", "FLEX": "1"}, None),
    ],
)
def test_what_nothing_reads_is_said(environment, words):
    """A misspelt variable, or a directory of records that is none, was ignored in silence."""
    found = list(settings.doubts(environment))
    assert len(found) == (words is not None)
    assert words is None or re.search(words.rstrip("?"), found[0])


def test_who_imported_a_package_first():
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    early, late, within = (ModuleType(name) for name in ("early", "late", "within"))
    early.language, late.triton = language, triton
    names = "within", "early", "triton.language", "triton", "late"
    modules = dict(zip(names, (within, early, language, triton, late), strict=True))
    assert settings.importer("triton", modules) == "early"
    del early.language
    early.kernel = type("JITFunction", (), {"__module__": "triton.runtime.jit"})()
    assert settings.importer("triton", modules) == "early"
    assert settings.importer("triton", {"within": within, "triton": triton}) == ""


def test_asking_for_the_interpreter_sets_tritons_switch():
    code = "import flexattn, triton; print(triton.knobs.runtime.interpret)"
    assert python("-c", code, interpret=True)[0] == "True\n"


def test_asking_for_the_interpreter_too_late_is_an_error():
    about = {"status": 1, "interpret": True, "FLEXATTN_INTERPRETER": 1}
    _, said = python("-c", "import triton, flexattn", **about)
    assert "before anything imports triton" in said
    assert "and compiles: __main__ imported it" in said
    assert said.count("did you mean FLEXATTN_INTERPRET?") == 1


def test_debug_levels_show_dispatch_and_source(tmp_path):
    code = """
        import sys, torch, flexattn
        from flexattn.settings import override
        q = torch.zeros(1, 1, 3, 16)
        flexattn.flex_attention(q, q, q, lambda s, b, h, m, n: s * 0.5)
        print("level 4", file=sys.stderr, flush=True)
        with override(debug=4):
            flexattn.flex_attention(q, q, q, lambda s, b, h, m, n: s * 0.25)
    """
    about = {"FLEXATTN_DEBUG": 1, "FLEXATTN_CACHE_DIR": tmp_path}
    _, said = python("-c", code, interpret=True, **about)
    low, _, high = said.partition("level 4")
    assert "decode float32" in low and "(score * 0.5)" not in low and "def flexattn_" not in low
    assert "(score * 0.25)" in high and "def flexattn_triton_decode" in high
