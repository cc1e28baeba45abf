"""Where records are: the layers that dispatch reads, or directories that a verb was given."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from flexattn.errors import InputError
from flexattn.records.layers import RecordLayer, configs_folder
from flexattn.records.store import Store
from flexattn.settings import current

# Beside the folders of devices: whole spaces as they were measured, which are no records.
STUDIES = "studies"


def writable(folder: Path) -> Path:
    """The folder, made where it is missing; raises OSError where no file can be made in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    return folder


def users() -> Path:
    """The user's own directory of records, which `tune` writes to unless told otherwise."""
    return current().cache_dir / "records"


def places(folders: Sequence[Path] = ()) -> list[RecordLayer]:
    """The given directories, else every layer there is, those shipped for all devices included.

    Raises InputError for a directory that does not exist.
    """
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: no such directory", "records are kept in directories")
    if folders:
        return [RecordLayer(str(folder), Store(folder)) for folder in folders]
    settings = current()
    found = [RecordLayer("FLEXATTN_CACHE", Store(root)) for root in settings.cache]
    found.append(RecordLayer("user", Store(users())))
    shipped = configs_folder()
    if shipped is not None:
        there = (each for each in shipped.iterdir() if each.is_dir())
        devices = sorted(each for each in there if each.name != STUDIES)
        found += [RecordLayer("shipped", Store(each)) for each in devices]
    return found
