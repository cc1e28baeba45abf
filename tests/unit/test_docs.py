"""Every place that the map of the code names is there."""

import re

import pytest

import flexattn
from tests.processes import ROOT

PAGES = ("docs/architecture.md", "docs/adding.md")
# A path ends as a file or a folder does, and has no spaces; in pictures it stands behind dots.
PATH = re.compile(r"[\w./-]+(?:\.(?:py|jinja|md|toml)|/)(?![\w/])")


def named_paths(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^```diff\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    quoted = re.findall(r"```text\n(.*?)```|`([^`\n]+)`", text, re.DOTALL)
    for block, inline in quoted:
        yield from PATH.findall(block.replace("...", " ") if block else inline)


def packages(folder):
    return [path.parent.name for path in (ROOT / folder).glob("*/__init__.py")]


@pytest.mark.parametrize("page", PAGES)
def test_every_path_of_a_page_is_in_the_tree(page):
    found = set(named_paths(page))
    missing = {
        path
        for path in found
        if not any((ROOT / place / path).exists() for place in ("", "flexattn"))
    }
    assert len(found) > 10 and missing == set()


def test_the_map_names_every_folder():
    text = (ROOT / PAGES[0]).read_text(encoding="utf-8")
    picture = text.split("```text\n")[1].split("```")[0]
    for folder in packages("flexattn"):
        assert re.search(rf"\b{folder}\b", picture), folder
    for folder in packages("flexattn/kernels"):
        assert f"| `{folder}` |" in text, folder


def steps(title):
    """The way through a picture: (function, file) for each step, and the files it goes up to."""
    text = (ROOT / PAGES[0]).read_text(encoding="utf-8")
    picture = text.split(f"## {title}\n")[1].split("```text\n")[1].split("```")[0]
    for line in picture.splitlines():
        if found := re.fullmatch(r" (\w+) ── ([\w/]+\.py)(, .*)?", line):
            yield found[1], found[2]
        elif found := re.match(r"   \^ ([\w/]+\.py)", line):
            yield None, found[1]


@pytest.mark.parametrize("title", ["The life of a call", "The life of a plan"])
def test_a_reader_goes_down_to_the_launch(title):
    """The pictures once named 28 files, and no reader could tell which of them to open."""
    opened, here, ups = set(), "", 0
    for name, file in steps(title):
        if name is None:
            assert file in opened, f"the way goes up to {file}, which is not open"
            ups += 1
        else:
            text = (ROOT / "flexattn" / file).read_text(encoding="utf-8")
            assert file not in opened, f"{file} is opened twice: draw the way up"
            assert re.search(rf"^ *(def|class) {name}\b", text, re.MULTILINE), (name, file)
            assert not here or re.search(rf"(?<!def )\b{name}\b", here), (name, file)
        opened.add(file)
        here = (ROOT / "flexattn" / file).read_text(encoding="utf-8")
    assert len(opened) > 5 and file == "runtime/cuda_launch.py"
    assert len(opened) <= 14 and ups <= 3


@pytest.mark.parametrize(
    "name",
    "bench create_block_mask explain flex_attention install pack quantize register_op tune "
    "varlen_attn visualize warm".split(),
)
def test_a_public_function_has_its_sections(name):
    """The manual shows them as Parameters, Returns, Raises and an example."""
    text = getattr(flexattn, name).__doc__
    sections = {"Args:", "Raises:", "Example::", *["Returns:"] * (name != "register_op")}
    assert sections <= {line.strip() for line in text.splitlines()}
