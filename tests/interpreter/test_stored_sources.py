"""What is interpreted is the text that was rendered, whatever lies in the cache directory."""

import os
import py_compile
from dataclasses import replace

import pytest
import torch

from flexattn.device import INTERPRETER
from flexattn.runtime.build import Builder, RenderAnew
from flexattn.settings import override
from tests.stored_kernels import stored, tiny, wrong

pytestmark = pytest.mark.oldest

RIGHT = [0, 0, 0, 1, 1, 1, 1, 1]


def launch(kernel):
    out = torch.full((8,), -1, dtype=torch.int32)
    kernel.prepare(1, {}, ("OUT", "bound")).launch(-1, [out, 3])
    return out.tolist()


def built(source):
    """The kernel as another process builds it."""
    return Builder().kernel(source, INTERPRETER, -1)


@pytest.fixture(autouse=True)
def cache(tmp_path):
    with override(cache_dir=tmp_path):
        yield tmp_path


def empty(source):
    return ""


def half(source):
    return source.text[: len(source.text) // 2]


def in_the_header(source):
    return "raise SystemExit('code before the kernel')\n" + source.text


def behind_a_comment(source):
    return "# a comment\rraise SystemExit('and its end')\n" + source.text


@pytest.mark.parametrize("change", [wrong, empty, half, in_the_header, behind_a_comment])
def test_a_source_that_was_changed_is_not_run_and_is_put_right(cache, change):
    """With `>=` changed to `>` every later call was wrong; an empty file failed for ever."""
    source = tiny()
    path = stored(cache, source, change(source))
    assert launch(built(source)) == RIGHT
    assert path.read_text() == source.text


def test_bytecode_beside_a_source_is_neither_run_nor_written(cache):
    """Python takes a planted .pyc of the source's size and time for its own."""
    source = tiny(number=1)
    path = stored(cache, source, "raise SystemError('planted')\n".ljust(len(source.text), "#"))
    planted = py_compile.compile(str(path), doraise=True)
    before = os.stat(path)
    path.write_text(source.text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert launch(built(source)) == RIGHT
    os.unlink(planted)
    assert launch(built(tiny(number=2))) == RIGHT
    assert list(cache.rglob("*.pyc")) == []


@pytest.mark.parametrize("when", ["before it is built", "before it is launched"])
def test_a_file_that_is_swapped_does_not_count(cache, when, monkeypatch):
    """Triton's interpreter reads a function's source when it is first launched."""
    source = tiny(number=3)
    path = stored(cache, source)
    if when == "before it is built":
        # The last thing that reads the file sees it as it should be; then it is swapped.
        read = os.close

        def close(handle):
            there = os.readlink(f"/proc/self/fd/{handle}")
            read(handle)
            if there == str(path):
                path.write_text(wrong(source))

        monkeypatch.setattr(os, "close", close)
    kernel = built(source)
    monkeypatch.undo()
    path.write_text(wrong(source))
    assert launch(kernel) == RIGHT


def test_problems_that_share_a_kernel_do_not_rewrite_its_header_in_turns(cache):
    """The hash leaves the header out: whoever comes first names the kernel."""
    first, second = tiny(number=4), tiny("# another problem\n# with one line more\n", number=4)
    assert first.hash == second.hash
    path = stored(cache, first)
    before = path.stat()
    for source in (first, second, first):
        assert launch(built(source)) == RIGHT
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_source_that_was_read_is_not_interpreted():
    """A directory of exported kernels names its texts' hashes itself: anybody may make one."""
    with pytest.raises(RenderAnew):
        built(replace(tiny(number=5), stored=True))
