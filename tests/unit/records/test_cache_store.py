"""A directory of records: whole files whoever dies, and misses for all that is no record."""

import errno
import json
import logging
import os
import signal
import time
from dataclasses import replace

import pytest

from flexattn.errors import CacheError
from flexattn.records.codec import MAX_BYTES, encode_record
from flexattn.records.store import Store, generation
from flexattn.util.files import open_lock, try_lock
from tests.processes import started
from tests.records import HERE, key, prefill_record

RECORD = prefill_record(provenance="measured")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "records")


@pytest.fixture
def said(caplog):
    """Warnings as they come; each test hears them anew."""
    caplog.set_level(logging.WARNING, "flexattn")
    return lambda: [record.getMessage() for record in caplog.records]


def path_of(store, record=RECORD):
    return store.path(record.environment, record.key)


def other(title="other", **changes):
    """A record of the same key whose winner is the default."""
    decision = replace(RECORD.decision, winner=RECORD.decision.default)
    return replace(RECORD, decision=decision, title=title, **changes)


def test_what_is_written_is_read(store, said):
    assert store.read(HERE, RECORD.key) is None
    before = generation()
    assert store.write(RECORD) and generation() != before
    assert store.read(HERE, RECORD.key) == RECORD
    assert store.answer(HERE, RECORD.key) == RECORD.answer
    assert list(store.entries()) == [(path_of(store), RECORD)]
    assert list(store.answers()) == [(path_of(store), RECORD.answer)]
    assert store.folders("nvidia-h200") == [HERE.folder] and not store.folders("nvidia-h100")
    assert store.sizes(HERE.folder, RECORD.key.family()) == [RECORD.key.sizes]
    manifest = json.loads((path_of(store).parent.parent / "manifest.json").read_text())
    assert manifest["torch"] == HERE.torch and not said() and not store.strays()


def test_one_that_is_there_stays_unless_told(store):
    assert store.write(RECORD) and not store.write(other())
    assert store.read(HERE, RECORD.key).title == RECORD.title
    assert not store.write(other(), replace=lambda new, old: new.title < old.title)
    assert store.write(other(), replace=lambda new, old: new.title > old.title)
    assert store.read(HERE, RECORD.key).title == "other"
    assert store.write(RECORD, replace=True)
    assert store.read(HERE, RECORD.key) == RECORD


def test_rankings_of_earlier_versions_and_unknown_provenances_are_no_records(store, said):
    target = path_of(store)
    target.parent.mkdir(parents=True)
    for provenance in ("model", "replay"):
        target.write_text(encode_record(replace(RECORD, provenance=provenance)))
        assert store.read(HERE, RECORD.key) is None
    assert len(said()) == 2 and "provenance is 'model'" in said()[0]


def fifo(path, text):
    os.mkfifo(path)


def link(path, text):
    (path.parent / "elsewhere").write_text(text)
    path.symlink_to(path.parent / "elsewhere")


def unreadable(path, text):
    path.write_text(text)
    path.chmod(0)


def other_key(path, text):
    path.write_text(encode_record(replace(RECORD, key=replace(RECORD.key, dtype="float16"))))


def other_environment(path, text):
    path.write_text(encode_record(replace(RECORD, environment=replace(HERE, torch="1.0"))))


BROKEN = {
    "empty": lambda path, text: path.write_text(""),
    "truncated": lambda path, text: path.write_text(text[:500]),
    "a foreign schema": lambda path, text: path.write_text(
        text.replace('schema": 1', 'schema": 7')
    ),
    "a directory": lambda path, text: path.mkdir(),
    "a pipe": fifo,
    "a link to a record": link,
    "a dangling link": lambda path, text: path.symlink_to("/nowhere/at/all"),
    "huge": lambda path, text: path.write_text(text + " " * MAX_BYTES),
    "unreadable": unreadable,
    "another key's record": other_key,
    "another environment's record": other_environment,
    "deep nesting": lambda path, text: path.write_text("[" * 100000),
}


def denied_to_root_too(path, monkeypatch):
    """Permissions say nothing to root: refuse to open this file, whatever its name becomes."""
    file, plain = os.stat(path).st_ino, os.open

    def opened(name, flags, *more, **named):
        if os.path.exists(name) and os.stat(name).st_ino == file:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))
        return plain(name, flags, *more, **named)

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_record_is_a_miss_and_moved_aside(store, said, name, monkeypatch):
    path = path_of(store)
    path.parent.mkdir(parents=True)
    BROKEN[name](path, encode_record(RECORD))
    if name == "unreadable":
        denied_to_root_too(path, monkeypatch)
    for _ in range(2):
        assert store.read(HERE, RECORD.key) is None
        assert store.answer(HERE, RECORD.key) is None
    assert 1 <= len(said()) <= 2 and all(str(path) in text for text in said())
    assert all("\n" not in text for text in said())
    before = os.lstat(path)
    assert store.write(RECORD)
    assert store.read(HERE, RECORD.key) == RECORD
    (aside,) = store.strays()
    assert os.lstat(aside).st_ino == before.st_ino and aside.suffix == ".bad"


def test_broken_files_pile_up_beside_the_record(store):
    path = path_of(store)
    path.parent.mkdir(parents=True)
    for text in ("one", "two"):
        path.write_text(text)
        assert store.write(RECORD)
    assert [each.read_text() for each in store.strays()] == ["two", "one"]
    assert [each.name for each in store.strays()] == [f"{path.name}.1.bad", f"{path.name}.bad"]


def test_names_that_are_no_sizes_are_not_looked_at(store):
    store.write(RECORD)
    folder = path_of(store).parent
    for name in ("b1-q1.json", "b-1-q1-k1.json", "..", "b1-q1-k1.json.bad", "b1-q1-k9.jsonx"):
        if name != "..":
            (folder / name).write_text("{}")
    (folder / f"b{'9' * 30}-q1-k1.json").write_text("{}")
    assert store.sizes(HERE.folder, RECORD.key.family()) == [RECORD.key.sizes]


def test_keys_with_paths_in_them_stay_inside(store):
    key = replace(RECORD.key, score="../../../../etc", layout="/tmp/x", mask_class="..")
    record = replace(RECORD, key=key, environment=replace(HERE, device="../../NVIDIA /../H200"))
    store.write(record)
    path = path_of(store, record)
    assert path.resolve().is_relative_to(store.root.resolve()) and path.is_file()
    assert store.read(record.environment, key) == record


def test_two_users_of_a_group_write_to_one_directory(store, monkeypatch):
    """The lock is the file of who came first: the other may read it, which a lock needs."""
    assert store.write(RECORD)
    opened = os.open

    def refusing(path, flags, *args, **kwargs):
        if str(path).endswith(".lock") and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    assert store.write(other(), replace=True)
    assert store.read(HERE, RECORD.key) == other()


@pytest.mark.slow
def test_sixteen_writers_half_of_them_killed(tmp_path):
    """Forked from one parent that has imported everything: what is tested is the writing."""
    root = tmp_path / "records"
    store = Store(root)
    children = []
    for seed in range(16):
        child = os.fork()
        if child == 0:
            _write_until_killed(store, seed)
        children.append(child)
    try:
        deadline = time.monotonic() + 20
        while not any(root.rglob("*.json")) and time.monotonic() < deadline:
            time.sleep(0.01)
        reads = 0
        for child in children[:8]:
            time.sleep(0.1)
            os.kill(child, signal.SIGKILL)
            reads += sum(not isinstance(each, CacheError) for _, each in store.entries())
        assert reads
    finally:
        for child in children[8:]:
            os.kill(child, signal.SIGTERM)
        for child in children:
            os.waitpid(child, 0)
    found = list(store.entries())
    assert len(found) == 8
    assert all(not isinstance(each, CacheError) for _, each in found)
    strays = store.strays()
    assert len(strays) <= 16 and all(path.suffix == ".tmp" for path in strays)
    assert store.write(RECORD, replace=True)


def _write_until_killed(store, seed):
    try:
        record = prefill_record(provenance="measured", seed=seed)
        step = seed
        while True:
            sizes = (1 << step % 8, 4096, 4096)
            each = replace(record, sizes=sizes, key=key(sizes=sizes), title=f"{seed} {step}")
            store.write(each, replace=True)
            step += 1
    finally:
        os._exit(1)


@pytest.mark.parametrize("lock", [open_lock, try_lock], ids=["open", "try"])
def test_a_link_for_a_lock_is_not_followed(tmp_path, lock):
    """Who may write a shared cache could have any file of its users made, by a link at `.lock`."""
    outside = tmp_path / "outside"
    (tmp_path / ".lock").symlink_to(outside)
    with pytest.raises(OSError, match="remove it"):
        lock(tmp_path / ".lock")
    assert not outside.exists()


def test_a_dead_writers_lock_is_free(store):
    """A writer that is killed while it holds the directory's lock holds up nobody."""
    code = (
        "import sys, time, pathlib\n"
        "from flexattn.util.files import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)\n"
    )
    folder = path_of(store).parent.parent
    folder.mkdir(parents=True)
    child = started("-c", code, folder)
    assert child.stdout.readline() == "held\n"
    child.kill()
    child.wait()
    assert store.write(RECORD)


def test_a_new_record_may_take_the_place_of_those_of_other_environments(store):
    """What has no successor stays, for it is still a hint; so do another device's records.

    Those of another Triton are hits where it is installed: shipped records of the newest release
    would have taken away those of the oldest.
    """
    older, elsewhere = replace(HERE, template="old"), replace(HERE, device="nvidia-h100")
    oldest = replace(HERE, triton="3.5.0")
    for where in (HERE, older, elsewhere, oldest):
        store.write(replace(RECORD, environment=where))
    longer = prefill_record(provenance="measured", environment=older)
    longer = replace(longer, key=key(sizes=(2, 8192, 8192)), sizes=(2, 8192, 8192))
    store.write(longer)
    before = generation()
    assert store.drop_others(HERE, RECORD.key) == [store.path(older, RECORD.key)]
    assert generation() != before
    assert store.answer(HERE, RECORD.key) and store.answer(elsewhere, RECORD.key)
    assert store.answer(older, longer.key) is not None
    assert store.drop_others(HERE, longer.key) == [store.path(older, longer.key)]
    assert store.answer(oldest, RECORD.key) is not None
    kept = sorted([HERE.folder, oldest.folder])
    assert sorted(store.folders("nvidia-h200")) == kept, "a folder without records is gone"
    assert store.drop_others(HERE, longer.key) == []
