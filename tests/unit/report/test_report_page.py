"""The report's page: what it says, that nothing can break out of it, and how a browser sees it."""

import re
import statistics
import struct
import time
from dataclasses import replace
from html.parser import HTMLParser
from itertools import product

import pytest
from typer.testing import CliRunner

from bench.results import load
from bench.table import ratios
from flexattn.cli.app import app
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.records import layers
from flexattn.records.codec import encode_record
from flexattn.records.record import Decision, Failed
from flexattn.records.store import Store
from flexattn.report.numbers import config_axes
from flexattn.report.page import PAGE, html, write_page
from flexattn.report.rivals import read_bench
from flexattn.settings import override
from tests.browser import asked, needs_chromium, opened
from tests.processes import ROOT
from tests.records import decode_record, prefill_record

pytest.importorskip("matplotlib")

BENCH = ROOT / "bench" / "results" / "h200-decode.json"
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
    return write_page(records, tmp_path_factory.mktemp("report"), [read_bench(BENCH)])


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


def test_every_picture_is_drawn_in_the_page_with_words(written):
    page = Tags(written.page.read_text())
    assert not [tag for tag, _ in page.tags if tag == "img"]
    drawn = [a for tag, a in page.tags if tag == "svg" and float(a["width"]) > 300]
    assert len(drawn) == 10 and all(len(each["aria-label"]) > 30 for each in drawn)
    assert written.pictures == () and [p.name for p in written.page.parent.iterdir()] == [PAGE]


def test_pictures_are_files_where_that_is_asked_for(tmp_path):
    written = write_page([prefill_record(HOSTILE)], tmp_path, [read_bench(BENCH)], as_png=True)
    assert len(written.pictures) == 4 and written.pictures[0].name == "decode.png"
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
        "4 problems of 3 models on nvidia-h200, all of them below.",
        prefill_record().decision.why,
        "registers a thread",
        "Beside other libraries: decode",
        bench_mean(),
        "out max 3.1e-2 > 2.2e-3",
        "No config has a time, so there is nothing to draw.",
    ):
        assert words in text, words


def test_equal_records_make_equal_pages(tmp_path):
    made = [write_page([decode_record()], tmp_path / name).page.read_bytes() for name in "ab"]
    assert made[0] == made[1]


def test_a_page_without_anything_is_a_page():
    assert "Is flexattn faster here?" in html(())


@pytest.fixture
def flexattn(tmp_path, monkeypatch):
    """The command line in this process, in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments, status=0):
        result = CliRunner().invoke(app, list(map(str, arguments)), terminal_width=200)
        assert result.exit_code == status, result.output
        return result

    return call


def test_the_verb_reads_files_and_directories(flexattn, tmp_path):
    path, out = tmp_path / "record.json", tmp_path / "r"
    path.write_text(encode_record(prefill_record(HOSTILE)))
    store = Store(tmp_path / "cache")
    store.write(decode_record())
    shown = flexattn("report", path, store.root, "--out", out, "--bench", BENCH, "--png").stdout
    assert HOSTILE in shown and "llama-3 decode" in shown and "7 pictures beside it" in shown
    assert len(list(out.glob("*.png"))) == 7 and (out / PAGE).exists()


def test_the_verb_alone_reads_the_layers_that_are_there(flexattn, tmp_path, monkeypatch):
    """Who had no folder of records was told that it is no file."""
    monkeypatch.setattr(layers, "configs_folder", lambda: None)
    store = Store(tmp_path / "shared")
    store.write(decode_record())
    with override(cache=(store.root,), cache_dir=tmp_path / "nowhere"):
        assert "index.html: 1 problems" in flexattn("report").stdout


def test_a_file_that_is_no_record_is_refused(flexattn, tmp_path):
    (tmp_path / "x.json").write_text("{}")
    assert "is no record" in flexattn("report", "x.json", status=2).stderr
    assert "No such file" in flexattn("report", "y.json", status=2).stderr
    assert "no record to report" in flexattn("report", tmp_path, status=2).stderr


# A page with all problems opened: how much is too wide, and which speedups are off the screen.
SEEN = """(() => { for (const each of document.querySelectorAll("details")) each.open = true;
return {
    width: innerWidth,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    pictures: document.querySelectorAll("figure svg").length,
    cut: Array.from(document.querySelectorAll("figure svg")).filter((each) =>
        each.getBoundingClientRect().right > innerWidth || each.clientWidth < 300).length,
    hidden: Array.from(document.querySelectorAll(".problems .speedup")).filter((each) =>
        !(each.getBoundingClientRect().right <= innerWidth)).length,
    small: Array.from(document.querySelectorAll("figure svg text")).filter((each) =>
        each.getBoundingClientRect().height < 9).length,
    filter: !document.getElementById("filter").hidden,
    models: (each => each.scrollWidth - each.clientWidth)(document.getElementById("models")
        .closest(".scroll")),
    ground: getComputedStyle(document.body).backgroundColor,
}; })()"""


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280, 1920])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_all_of_it(written, tmp_path, width, dark):
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    seen = asked(written.page, tmp_path, SEEN, scheme, width=width)
    ground = seen.pop("ground")
    assert seen == {
        "width": width, "overflow": 0, "pictures": 10, "cut": 0, "hidden": 0, "small": 0,
        "filter": True, "models": 0,
    }  # fmt: skip
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
        const all = () => Array.from(document.querySelectorAll(".problems tbody tr"));
        const table = document.querySelectorAll(".problems")[1];
        const rows = () => Array.from(table.querySelectorAll("tbody tr"));
        const order = () => rows().map((row) => row.cells[1].textContent.trim());
        const header = table.tHead.rows[0].cells[4];
        header.querySelector("button").click();
        const up = order();
        header.querySelector("button").click();
        const down = order();
        const input = document.querySelector("#filter input");
        input.value = "Decode";
        input.dispatchEvent(new Event("input"));
        const left = all().filter((row) => !row.hidden).length;
        const opened = Array.from(document.querySelectorAll("details"));
        const models = Array.from(document.querySelectorAll(".model"));
        const shown = (each) => each.filter((one) => !one.hidden).length;
        return [up[0], down[0], header.ariaSort, left, shown(opened), shown(models)];
    })()"""
    first, second = "llama-3 decode", "llama-3 prefill"
    assert asked(written.page, tmp_path, script) == [first, second, "descending", 1, 1, 1]


@needs_chromium
@pytest.mark.slow
def test_a_link_to_a_problem_opens_it(written, tmp_path):
    script = """(() => {
        const states = () => Array.from(document.querySelectorAll("details")).map((e) => e.open);
        const before = states();
        document.querySelectorAll(".problems a")[1].click();
        return [before, states()];
    })()"""
    before, after = asked(written.page, tmp_path, script)
    assert not any(before) and after.index(True) == 1 and sum(after) == 1


def nothing_varies():
    """A record of one config, whose device nobody knows."""
    trial = next(t for t in prefill_record().trials if t.finals)
    where = replace(prefill_record().environment, device="brand-new")
    decision = Decision(0, 0, 1.0, 1.0, 1.02, 0.95, "nothing else was tried")
    return prefill_record("one", trials=(trial,), decision=decision, environment=where)


def of_two_templates():
    """Hopper's configs, and one of Triton's."""
    best = prefill_record().trials[-1]
    found = [
        replace(
            best, config=HopperPrefillConfig(2, 128, stages, 240, lazy_rescale=lazy), finals=(us,)
        )
        for us, (stages, lazy) in enumerate(product((2, 3), (False, True)), 5)
    ]
    decision = Decision(0, 4, 1.1, 0.01, 1.02, 0.95, "it is faster")
    return prefill_record("two", trials=(*found, best), decision=decision)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (nothing_timed, "No config has a time, so there is nothing to draw."),
        (nothing_varies, "One config was timed, so there is nothing to compare it with."),
        (nothing_varies, "The limits of brand-new are not in the table of known devices"),
        (of_two_templates, "One config is of another template than the winner's"),
    ],
)
def test_what_is_not_computed_is_said_in_a_sentence(make, sentence, tmp_path):
    text = " ".join(Tags(write_page([make()], tmp_path).page.read_text()).text.split())
    assert sentence in text


def test_no_axis_says_which_template_alone(tmp_path):
    """A mixed space had an axis `template`, and one for each number that only one of them has."""
    assert config_axes(of_two_templates()) == ("num_stages", "lazy_rescale")
    labels = write_page([of_two_templates()], tmp_path).page.read_text()
    assert ">template<" not in labels and ">none<" not in labels


def test_plans_are_reported_too(tmp_path):
    """Their configs have no template's language, which ended the report in a traceback."""
    shipped = [each for _, each in Store(ROOT / "configs" / "nvidia-h200").entries()]
    found = [record for record in shipped if record.key.kind == "serving"][:2]
    assert len(found) == 2
    page = Tags(write_page(found, tmp_path).page.read_text())
    assert len([a for tag, a in page.tags if tag == "svg" and float(a["width"]) > 300]) >= 4


def test_problems_stand_by_model_with_the_speedup_first(written):
    page = written.page.read_text()
    models = re.findall(r'<section class="card model".*?<h2[^>]*>(.*?)</h2>', page, re.DOTALL)
    assert models == sorted(models) and "llama-3" in models and "nothing" in models
    head = re.search(r'<table class="sortable problems">.*?</thead>', page, re.DOTALL).group()
    assert re.findall(r"<th[^>]*>([^<]*)</th>", head)[:3] == ["speedup", "problem", "winner"]
    assert "All 2 of its problems" in page


@pytest.mark.slow
def test_all_shipped_records_take_seconds_and_few_megabytes(flexattn, tmp_path):
    """It took four minutes without a word, for 34 MB and 481 files."""
    begin = time.process_time()
    told = flexattn("report", ROOT / "configs" / "nvidia-h200", "--out", tmp_path / "r")
    spent = time.process_time() - begin
    page = tmp_path / "r" / "index.html"
    count = len(list(Store(ROOT / "configs" / "nvidia-h200").paths()))
    assert f"reporting on {count} problems" in told.stderr
    assert f"{count} problems of " in page.read_text()
    assert spent < 20 and page.stat().st_size < 5e6
    assert list(page.parent.iterdir()) == [page]
