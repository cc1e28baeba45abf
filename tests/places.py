"""A user's directory of a test's own, in which dispatch finds nothing but what the test wrote."""

from contextlib import contextmanager

from flexattn.records import layers, untuned
from flexattn.settings import override


@contextmanager
def own_place(folder, monkeypatch):
    """Records and lists below a folder, and nothing shipped; nothing was said or noted yet."""
    untuned._noted.clear()
    monkeypatch.setattr(layers, "configs_folder", lambda: None)
    layers._memory.clear()
    with override(cache_dir=folder, cache=(), mode="replay"):
        yield
    layers._memory.clear()
