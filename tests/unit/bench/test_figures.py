"""What README and manual say of speed is what the files in bench/results say."""

import re

import pytest

from bench.figures import FIGURE, PICTURES, ROOT, pages, rewritten

PAGES = sorted(pages())
# Speeds of a cost model, which that page says of each; and what a dated entry said then.
MODELLED = {"neuron.md"}
SPEED = re.compile(
    r"\d\s*(?:µs|TFLOP/s|TB/s)|\d\s+times (?:as|the|our|torch)|% (?:faster|slower|ahead|earlier)"
)
# A line that begins with a comment is taken for HTML to its end: only tables may stand so.
HIDDEN = re.compile(r"^ {0,3}(?:[-*>] )?<!--= (?!table|note|mods)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_of_a_page_are_those_of_the_files(page):
    text = page.read_text(encoding="utf-8")
    assert rewritten(text) == text, f"{page.name}: python -m bench.figures writes them anew"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_the_files_draw(name):
    drawn = (ROOT / name).read_text(encoding="utf-8")
    assert PICTURES[name]() == drawn, f"{name}: python -m bench.figures draws it anew"
    assert len(drawn) < 60_000


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name not in MODELLED], ids=lambda page: page.name
)
def test_no_speed_is_written_by_hand(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    text = FIGURE.sub("", text)
    assert not SPEED.findall(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_figure_begins_a_line(page):
    assert not HIDDEN.findall(page.read_text(encoding="utf-8"))


def test_a_figure_that_differs_is_noticed():
    right = rewritten("<!--= ratio h200-prefill-fa4 fa4 -->0.5<!--.-->")
    assert right != "<!--= ratio h200-prefill-fa4 fa4 -->0.5<!--.-->"
    assert rewritten(right) == right
    with pytest.raises(ValueError, match="the verbs are ratio"):
        rewritten("<!--= rato h200-prefill-fa4 fa4 -->1<!--.-->")
    with pytest.raises(ValueError, match="has no row 'd7'"):
        rewritten("<!--= us h200-prefill-fa4 d7 -->1<!--.-->")
    with pytest.raises(ValueError, match="no row of h200-head-dims matches 'times'"):
        rewritten("<!--= table h200-head-dims flexattn,sdpa-cudnn  times -->1<!--.-->")
