"""The report's page: what it says, that nothing can break out of it, and how a browser sees it."""

import json
import re
import statistics
import struct
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.results import load
from bench.table import ratios
from flexattn.cli.app import app
from flexattn.records.codec import encode_record
from flexattn.records.record import Decision, Failed
from flexattn.report.page import html, write
from flexattn.report.rivals import read
from tests.browser import asked, needs_chromium, opened
from tests.records import decode_record, prefill_record

pytest.importorskip("matplotlib")

BENCH = Path(__file__).parents[3] / "bench" / "results" / "h200-decode.json"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> \"'&amp; $x^2$ ${7*7} {{ 7*7 }}"


def nothing_timed():
    """A record whose every config failed."""
    failed = Failed("build", HOSTILE, f"{HOSTILE}\nsecond line")
    trials = tuple(
        replace(t, screening=(), finals=(), failed=failed, same_code_as=None)
        for t in prefill_record().trials
    )
    decision = Decision(0, 0, 1.0, 1.0, 1.02, 0.95, f"nothing ran {HOSTILE}")
    return prefill_record("nothing", trials=trials, decision=decision)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A page of four problems, one of them hostile and one without a time, and a bench."""
    records = (
        prefill_record(),
        decode_record(),
        prefill_record(HOSTILE, seed=3, note=HOSTILE, rejected=((HOSTILE, 3),)),
        nothing_timed(),
    )
    return write(records, tmp_path_factory.mktemp("report"), [read(BENCH)])


class Tags(HTMLParser):
    """Every start tag with its attributes, and the text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.inside = [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside not in ("script", "style"):
            self.text += data


def test_the_page_needs_nothing_else(written):
    page = Tags(written.page.read_text())
    assert [tag for tag, _ in page.tags].count("script") == 1
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("data:", "#")), (tag, attributes)
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and "sha256-" in policy


def test_text_from_records_is_escaped(written):
    text = written.page.read_text()
    assert HOSTILE not in text and "<img src=x" not in text
    assert Tags(text).text.count(HOSTILE) >= 4  # title, note, reason, message


def test_every_picture_has_words_a_size_and_a_file(written):
    page = Tags(written.page.read_text())
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == len(written.pictures) == 14
    assert all(len(image["alt"]) > 30 and int(image["width"]) > 300 for image in images)
    for path in written.pictures:
        assert re.fullmatch(r"[a-z0-9-]+\.png", path.name)
        data = path.read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert data.startswith(b"\x89PNG") and width > 400 and height > 200


def bench_mean():
    """The geometric mean that bench.table prints for the same file."""
    found = ratios(load(BENCH), "torch-flex-tuned").values()
    return f"{statistics.geometric_mean(found):.3f}"


def test_the_page_says_why_and_beside_what(written):
    text = " ".join(Tags(written.page.read_text()).text.split())
    for words in (
        "4 problems on nvidia-h200",
        prefill_record().decision.why,
        "registers a thread",
        "blocks per SM",
        "Ours beside torch: decode",
        bench_mean(),
        "out max 3.1e-2 > 2.2e-3",
        "b4-q1-k8192: 1.3 % slower",
        "No config has a time",
    ):
        assert words in text, words


def test_equal_records_make_equal_pages(tmp_path):
    made = [write([decode_record()], tmp_path / name).page.read_bytes() for name in "ab"]
    assert made[0] == made[1]


def test_a_page_without_anything_is_a_page():
    assert "How to read this" in html(())


@pytest.fixture
def flexattn(tmp_path, monkeypatch):
    """The command line in this process, in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments, status=0):
        result = CliRunner().invoke(app, list(map(str, arguments)), terminal_width=200)
        assert result.exit_code == status, result.output
        return result

    return call


def test_the_verb_reads_files_and_prints_json(flexattn, tmp_path):
    path = tmp_path / "record.json"
    path.write_text(encode_record(prefill_record(HOSTILE)))
    found = json.loads(
        flexattn("report", path, "--out", tmp_path / "r", "--bench", BENCH, "--json").stdout
    )
    (problem,) = found["problems"]
    assert problem["title"] == HOSTILE and problem["speedup"] > 1
    assert problem["winner"]["blocks"] >= 1 and problem["default"]["reach"]["bound"] == "compute"
    assert Path(found["page"]).exists() and all(Path(p).exists() for p in found["pictures"])


def test_the_verb_reads_a_folder_of_a_cache(flexattn, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "a.json").write_text(encode_record(decode_record()))
    (tmp_path / "cache" / "manifest.json").write_text("{}")
    shown = flexattn("report", tmp_path / "cache").stdout
    assert "llama-3 decode" in shown and (tmp_path / "report" / "index.html").exists()


def test_a_file_that_is_no_record_is_refused(flexattn, tmp_path):
    (tmp_path / "x.json").write_text("{}")
    assert "is no record" in flexattn("report", "x.json", status=2).stderr
    assert "No such file" in flexattn("report", "y.json", status=2).stderr
    assert "no record to report" in flexattn("report", "--cache", tmp_path, status=2).stderr


SEEN = """({
    width: innerWidth,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    images: document.images.length,
    broken: Array.from(document.images).filter((image) => !(image.naturalWidth > 0)).length,
    filter: !document.getElementById("filter").hidden,
    ground: getComputedStyle(document.body).backgroundColor,
})"""


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_all_of_it(written, tmp_path, width, dark):
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    seen = asked(written.page, tmp_path, SEEN, scheme, width=width)
    ground = seen.pop("ground")
    assert seen == {"width": width, "overflow": 0, "images": 14, "broken": 0, "filter": True}
    assert (ground == "rgb(18, 20, 23)") == dark


@needs_chromium
@pytest.mark.slow
def test_the_console_stays_empty(written, tmp_path):
    dom, console = opened(written.page, tmp_path)
    assert console == [] and '<button type="button">' in dom  # the script ran, by its hash
    loud = tmp_path / "loud.html"
    loud.write_text("<!doctype html><html><script>console.error('heard')</script></html>")
    assert "heard" in opened(loud, tmp_path)[1][0]


@needs_chromium
@pytest.mark.slow
def test_tables_sort_and_filter(written, tmp_path):
    script = """(() => {
        const rows = () => Array.from(document.querySelectorAll("#problems tbody tr"));
        const order = () => rows().map((row) => row.cells[0].textContent.trim());
        const header = document.querySelector("#problems thead").rows[0].cells[3];
        header.querySelector("button").click();
        const up = order();
        header.querySelector("button").click();
        const down = order();
        const input = document.querySelector("#filter input");
        input.value = "Decode";
        input.dispatchEvent(new Event("input"));
        return [up[0], down[0], header.ariaSort, rows().filter((row) => !row.hidden).length];
    })()"""
    assert asked(written.page, tmp_path, script) == ["2", "4", "descending", 1]
