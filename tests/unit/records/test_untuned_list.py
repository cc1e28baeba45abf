"""A problem leaves the list of untuned ones when its record lands; nobody else's line is lost."""

import json
import os
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from flexattn.records import untuned
from flexattn.records.record import key_of
from flexattn.records.untuned import drop, note, read_untuned, untuned_path
from flexattn.settings import override
from flexattn.util.files import append_line, drop_lines
from tests.problems import A100, H200, problem

MOST = 1 << 22


@pytest.fixture(autouse=True)
def own_list(tmp_path):
    untuned._noted.clear()
    with override(cache_dir=tmp_path, mode="replay"):
        yield


def listed():
    return [(key_of(each.problem), each.device) for each in read_untuned(untuned_path())]


def test_what_has_a_record_leaves_and_the_rest_stays_as_it_is():
    one, other = problem("decode"), problem("prefill")
    for each, device in ((one, H200), (other, H200), (one, A100)):
        note(each, device, "default", None, None)
    # Of another version, half written, of nobody: they may mean something to somebody.
    for line in (b'{"schema": 99}', b'{"device": ', b"[1]", b'{"device": "nvidia-h200", "B": []}'):
        append_line(untuned_path(), line, MOST)
    lines = untuned_path().read_bytes().splitlines()
    drop(key_of(one), H200.name)
    assert untuned_path().read_bytes().splitlines() == lines[1:]
    assert listed() == [(key_of(other), H200.name), (key_of(one), A100.name)]
    drop(key_of(one), H200.name)
    assert untuned_path().read_bytes().splitlines() == lines[1:]


def test_sizes_that_round_to_the_key_leave_with_it():
    """Calls of a key are listed once a process, each with its own sizes."""
    shapes = [problem("decode", kv_len=length) for length in (8190, 8192)]
    assert key_of(shapes[0]) == key_of(shapes[1])
    for each in shapes:
        untuned._noted.clear()
        note(each, H200, "default", None, None)
    assert len(untuned_path().read_text().splitlines()) == 2
    drop(key_of(shapes[0]), H200.name)
    assert untuned_path().read_bytes() == b""


def test_without_a_list_or_with_one_that_cannot_be_written_nothing_is_raised(tmp_path, caplog):
    drop(key_of(problem()), H200.name)
    assert not untuned_path().exists() and not caplog.records
    os.mkfifo(untuned_path())
    drop(key_of(problem()), H200.name)
    assert "keeps what was tuned since" in caplog.text


def test_what_others_append_meanwhile_is_kept(tmp_path):
    """Writers append while lines are dropped again and again: every other line is there once."""
    path, ended = tmp_path / "lines", threading.Event()
    append_line(path, b"drop", MOST)

    def write(number):
        for i in range(200):
            assert append_line(path, b"%d-%d" % (number, i), MOST)
            append_line(path, b"drop", MOST)

    def tidy():
        dropped = 0
        while not ended.is_set():
            dropped += drop_lines(path, b"drop".__eq__, MOST)
            time.sleep(0)
        return dropped + drop_lines(path, b"drop".__eq__, MOST)

    with ThreadPoolExecutor(6) as pool:
        tidying = [pool.submit(tidy) for _ in range(2)]
        for writing in [pool.submit(write, number) for number in range(4)]:
            writing.result()
        ended.set()
        dropped = sum(each.result() for each in tidying)
    found = path.read_text().splitlines()
    assert sorted(found) == sorted(f"{n}-{i}" for n in range(4) for i in range(200))
    assert dropped == 801 and [each.name for each in tmp_path.iterdir()] == ["lines"]


def test_a_disk_that_refuses_leaves_the_list_whole(tmp_path, monkeypatch):
    path = tmp_path / "lines"
    path.write_text(json.dumps({"a": 1}) + "\ndrop\n")

    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="No space"):
        drop_lines(path, b"drop".__eq__, MOST)
    assert path.read_text().splitlines() == [json.dumps({"a": 1}), "drop"]
    assert [each.name for each in tmp_path.iterdir()] == ["lines"]


def test_a_line_for_which_there_is_no_room_leaves_nothing_behind(tmp_path):
    """Half of it stayed, and the next line, which went on there, was lost too."""
    path = tmp_path / "lines"
    append_line(path, b"first", MOST)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Beyond this size the kernel takes no byte of any file, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="No space"):
            append_line(path, b"a long second line", MOST)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert append_line(path, b"third", MOST)
    assert path.read_bytes() == b"first\nthird\n"
