"""Faults planted in the text of kernels, as a compiler's fault would change what they compute."""

from contextlib import contextmanager

from flexattn.frontend.launch_cache import launch_cache
from flexattn.runtime import build, dispatch
from flexattn.runtime.outcomes import memory
from flexattn.serving.launching import kept_plans


@contextmanager
def planted(monkeypatch, old, new, within=""):
    """Kernels whose text has `old` and `within` compute by `new` in its place; yields how many.

    Nothing that was built, verified or found wrong before or inside is known after.
    """
    made, found = build.module_of, []

    def changed(path, text):
        if old in text and within in text:
            found.append(path)
            return made(path.with_name(f"planted_{path.name}"), text.replace(old, new))
        return made(path, text)

    _forget()
    with monkeypatch.context() as patched:
        patched.setattr(build, "module_of", changed)
        yield found
    _forget()


def _forget():
    dispatch.dispatcher().clear()
    build.builder().clear()
    for memo in (launch_cache, kept_plans):
        memo.clear()
    memory().forget()
