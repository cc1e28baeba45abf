"""A kernel is compiled from the text that was rendered, whatever the cache directory says."""

import errno
import os
import tempfile
import time
from pathlib import Path

import pytest
from triton import knobs

from flexattn.errors import CacheError
from flexattn.runtime import build, codecache
from flexattn.runtime.build import compile_source
from flexattn.runtime.codecache import text_file
from flexattn.settings import override
from tests.problems import H200
from tests.processes import python
from tests.stored_kernels import belongs_to_another, stored, tiny, wrong

pytestmark = pytest.mark.oldest


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    """An empty cache of ours, one of Triton's, and an empty folder for temporary ones."""
    for name in ("triton", "temporary", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    # Triton writes what is set to the environment too.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    codecache._made.cache_clear()
    with knobs.cache.scope(), override(cache_dir=tmp_path / "cache"):
        yield tmp_path
    codecache._made.cache_clear()


def compares(source):
    """How the compiled kernel compares: greater or equal, or (changed) greater."""
    text = compile_source(source, H200).asm["ttir"]
    return [name for name in ("sge", "sgt") if f"cmpi {name}" in text]


def kernels(caches):
    return sorted(path.name for path in (caches / "cache").rglob("*") if path.is_file())


@pytest.mark.parametrize("kept", ["", "wrong"])
def test_a_stored_kernel_that_was_changed_is_not_compiled(caches, kept):
    """Triton reads a function's source from its file: what lay there was compiled."""
    source = tiny(number=11)
    path = stored(caches / "cache", source, wrong(source) if kept else "")
    assert compares(source) == ["sge"]
    assert path.read_text() == source.text


def test_a_link_is_replaced_and_not_followed(caches):
    source = tiny(number=12)
    path = stored(caches / "cache", source)
    path.unlink()
    other = caches / "precious"
    other.write_text("kept")
    path.symlink_to(other)
    assert compares(source) == ["sge"]
    assert other.read_text() == "kept" and path.read_text() == source.text
    assert not path.is_symlink()


def test_sources_are_as_readable_as_records_and_written_by_their_user_alone(caches):
    """They were 0600, and with a umask of 002 their folder was the group's to write."""
    before = os.umask(0o002)
    try:
        path = build.path_of(tiny(number=13))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
    assert path.parent.stat().st_mode & 0o777 == 0o755


def test_a_new_source_waits_for_no_disk(caches, monkeypatch):
    """What a power failure cuts short differs from what was rendered, and is written again."""
    monkeypatch.setattr(os, "fsync", lambda handle: pytest.fail("fsync"))
    assert build.path_of(tiny(number=14)).parent == caches / "cache" / "kernels"


def test_what_a_killed_writer_left_is_removed_and_what_is_being_written_stays(caches):
    folder = caches / "cache" / "kernels"
    folder.mkdir()
    for name in (".old.tmp", ".new.tmp"):
        (folder / name).write_text("half")
    os.utime(folder / ".old.tmp", (time.time() - 1e5,) * 2)
    path = build.path_of(tiny(number=15))
    assert kernels(caches) == [".new.tmp", path.name]


def in_the_way(caches, monkeypatch):
    """The directory cannot be made."""
    (caches / "cache").rmdir()
    (caches / "cache").write_text("a file")


def read_only(caches, monkeypatch):
    """A container's read-only HOME; permissions alone do not stop root."""
    make = tempfile.mkstemp

    def mkstemp(*args, dir=None, **kwargs):
        if str(dir).startswith(str(caches / "cache")):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))
        return make(*args, dir=dir, **kwargs)

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)


def full(caches, monkeypatch):
    """The disk takes some bytes, and then no more."""
    write = os.write

    def limited(handle, data):
        there = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if there.is_relative_to(caches / "cache"):
            if os.fstat(handle).st_size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = data[:10]
        return write(handle, data)

    monkeypatch.setattr(os, "write", limited)


def of_another_user(caches, monkeypatch):
    """Two users of one FLEXATTN_CACHE_DIR: the other was first."""
    (caches / "cache" / "kernels").mkdir()
    belongs_to_another(caches / "cache", monkeypatch)


def of_everybody(caches, monkeypatch):
    (caches / "cache" / "kernels").mkdir()
    (caches / "cache" / "kernels").chmod(0o777)


def of_a_group(caches, monkeypatch):
    (caches / "cache" / "kernels").mkdir()
    (caches / "cache" / "kernels").chmod(0o2775)


@pytest.mark.parametrize(
    ("refuses", "words"),
    [
        (in_the_way, "Not a directory"),
        (read_only, "Read-only file system"),
        (full, "No space left on device"),
        (of_another_user, "belongs to user 54321"),
        (of_everybody, "nobody else may write"),
        (of_a_group, "nobody else may write"),
    ],
)
def test_a_cache_directory_that_refuses_stops_no_call(caches, monkeypatch, caplog, refuses, words):
    """A private folder serves, with one warning, and nothing half-written stays behind."""
    refuses(caches, monkeypatch)
    sources = tiny(number=16), tiny(number=17)
    for source in (*sources, *sources):
        assert compares(source) == ["sge"]
    paths = [build.path_of(source) for source in sources]
    assert [path.read_text() for path in paths] == [source.text for source in sources]
    assert paths[0].is_relative_to(caches / "temporary")
    assert len(caplog.records) == 1 and words in caplog.text and "cache" in caplog.text
    assert kernels(caches) == []


def test_a_folder_with_the_sticky_bit_serves_several_users(caches, caplog):
    folder = caches / "cache" / "kernels"
    folder.mkdir()
    folder.chmod(0o1777)
    assert build.path_of(tiny(number=18)).parent == folder
    assert not caplog.records


def test_another_users_file_in_a_folder_of_ours_is_replaced(caches, monkeypatch):
    """It may say the right thing today, and something else when somebody opens it."""
    source = tiny(number=19)
    path = stored(caches / "cache", source)
    before = path.stat().st_ino
    belongs_to_another(path, monkeypatch)
    assert build.path_of(source) == path
    assert path.lstat().st_ino != before


def test_without_any_directory_the_error_says_what_to_do(caches, monkeypatch):
    in_the_way(caches, monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(caches / "cache"))
    with pytest.raises(CacheError, match="FLEXATTN_CACHE_DIR or TMPDIR"):
        text_file("kernel.py", "")


def test_the_private_folder_ends_with_its_process(caches):
    code = (
        "from flexattn.runtime.codecache import text_file\n"
        "path = text_file('kernel.py', 'text')\n"
        "print(path, oct(path.parents[1].stat().st_mode & 0o777))\n"
    )
    places = {"FLEXATTN_CACHE_DIR": "/dev/null/cache", "TMPDIR": caches / "temporary"}
    out, err = python("-c", code, **places)
    path, mode = out.split()
    assert path.startswith(str(caches / "temporary")) and mode == "0o700"
    assert list((caches / "temporary").iterdir()) == []
    assert err.count("/dev/null/cache/kernels: Not a directory") == 1


@pytest.mark.parametrize("refusal", ["in the way", "full"])
def test_a_cache_of_tritons_that_refuses_stops_no_call(caches, monkeypatch, caplog, refusal):
    """Triton's directory lies in HOME as well, which a container may mount read-only."""
    if refusal == "in the way":
        (caches / "triton").rmdir()
        (caches / "triton").write_text("a file")
    else:
        replace = os.replace

        def refusing(source, target):
            if str(target).startswith(str(caches / "triton")):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            replace(source, target)

        monkeypatch.setattr(os, "replace", refusing)
    for number in (20, 21):
        assert compares(tiny(number=number)) == ["sge"]
    assert len(caplog.records) == 1 and "TRITON_CACHE_DIR" in caplog.text
    assert str(caches / "triton") in caplog.text
