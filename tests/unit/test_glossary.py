"""The glossary says where each of our own words stands, and it does stand there."""

import re

import pytest

from tests.processes import ROOT

ROW = re.compile(r"^\| ([^|`-]+) \|.*\| (`[^|]*`) \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs/glossary.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("words", "places"), ROWS, ids=[words for words, _ in ROWS])
def test_a_word_of_the_glossary_stands_where_it_says(words, places):
    files = re.findall(r"`([^`]+)`", places)
    text = "\n".join((ROOT / each).read_text(encoding="utf-8") for each in files)
    for word in words.split(", "):
        assert re.search(word.replace(" ", "."), text, re.IGNORECASE), f"{word} is not there"


def test_the_glossary_is_read():
    assert len(ROWS) > 20
