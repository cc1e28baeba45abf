"""Text that others wrote is shown, on a terminal and on a page, and does nothing there."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import flexattn.cli
from flexattn.cli.watch import Watch
from flexattn.records.store import Store
from flexattn.settings import log, say_once
from flexattn.tuning.race import replay_study
from flexattn.util.text import one_line, printable
from tests import records

# Closes a style of rich's markup, clears the screen, turns the writing, and no UTF-8 has the last.
HOSTILE = "a [/b] \x1b[2J \u202e\r\nFAULT b \ud800"
SHOWN = r"a [/b] \x1b[2J \u202e\r\nFAULT b \ud800"


@pytest.fixture
def hostile(tmp_path):
    """The user's records: one, whose title anybody may have written."""
    record = records.prefill_record(HOSTILE)
    store = Store(tmp_path / "cache" / "records")
    measured = replace(record, provenance="measured", decision=replay_study(record))
    store.write(measured)
    return store


@pytest.mark.parametrize(
    ("text", "lines", "line"),
    [
        ("plain – µs × 中", "plain – µs × 中", "plain – µs × 中"),
        ("a\n\tb", "a\n\tb", r"a\n\tb"),
        ("\x1b]0;x\x07\x9b\r", r"\x1b]0;x\x07\x9b\r", r"\x1b]0;x\x07\x9b\r"),
        ("\u2028\u200f\ud800", r"\u2028\u200f\ud800", r"\u2028\u200f\ud800"),
        (HOSTILE, SHOWN.replace(r"\n", "\n"), SHOWN),
    ],
)
def test_what_does_not_print_is_escaped(text, lines, line):
    assert printable(text) == lines and one_line(text) == line


@pytest.mark.parametrize("verb", ["show", "replay-study"])
def test_a_title_is_shown_and_not_obeyed(flexattn, hostile, verb, monkeypatch):
    """`[/b]` ended `show` in a traceback, and control characters reached the terminal."""
    monkeypatch.setenv("COLUMNS", "200")
    folder = (hostile.root,) if verb == "replay-study" else ()
    assert SHOWN in flexattn(verb, *folder).stdout


def test_a_lone_surrogate_ends_no_report(flexattn, hostile, tmp_path):
    """UTF-8 cannot write one: the page was cut short, with a traceback."""
    pytest.importorskip("matplotlib")
    told = flexattn("report", hostile.root, "--out", tmp_path / "page")
    assert SHOWN in told.stdout
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert SHOWN.replace(r"\n", "\n") in page and "\x1b" not in page


def test_progress_shows_a_title_as_it_is():
    """Bars read markup, and a problem's title is any text."""
    out = io.StringIO()
    with Watch(1, Console(file=out, force_terminal=True, width=200)) as watch:
        lane = watch.lane()
        lane.problem(HOSTILE)
        lane.stage("build", 3)
        lane.step("[/i]\x1b[3J", 2.0)
        lane.note("\x07")
        watch.finished(f"{HOSTILE}: tuned")
    text = out.getvalue()
    assert r"\x1b[2J" in text and r"\x07" in text and "\x1b[2J" not in text
    assert "\x1b[3J" not in text


def test_a_log_line_is_one_that_shows(caplog):
    with caplog.at_level("WARNING", log.name):
        say_once(HOSTILE)
    assert caplog.records[0].getMessage() == SHOWN.replace(r"\n", "\n")


def test_verbs_print_through_one_module():
    """So that the next verb that shows a record cannot forget to escape it."""
    folder = Path(flexattn.cli.__file__).parent
    direct = ("typer.echo(", "typer.secho(", " print(")
    loud = [
        path.name
        for path in folder.glob("*.py")
        if path.name != "terminal.py" and any(word in path.read_text() for word in direct)
    ]
    assert not loud
