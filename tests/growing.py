"""For tests of caches that grow: which calls were looked at whole."""

from flexattn.frontend import attention
from flexattn.frontend.launch_cache import launch_cache


def numbers_admitted(monkeypatch):
    """Numbers of keys of the calls from now on that are admitted; launches are forgotten."""
    launch_cache.clear()
    numbers, admit = [], attention.admit

    def counted(given):
        numbers.append(given.k.shape[2])
        return admit(given)

    monkeypatch.setattr(attention, "admit", counted)
    return numbers
