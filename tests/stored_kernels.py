"""A kernel of a few lines whose source is stored, and a cache directory that others own."""

import os
from dataclasses import replace

from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.base.source import Source, digest_of

TEXT = """\
# numbers from a bound on, for eight of them
import triton
import triton.language as tl


@triton.jit
def kernel(OUT, bound):
    at = tl.arange(0, 8)
    tl.store(OUT + at, (at >= bound).to(tl.int32))
"""
ARGUMENTS = (Argument("OUT", "*i32", 16), Argument("bound", "i32", 1))


def tiny(header="", number=0):
    """The kernel's source. header: comments before its own; number: another makes another hash."""
    text = header + TEXT.replace("tl.arange(0, 8)", f"tl.arange(0, 8) + {number} * 0")
    source = Source(text, "", ARGUMENTS, 1, 1)
    return replace(source, hash=digest_of(source))


def stored(cache_dir, source, text=None):
    """The file of a source as an earlier process left it, or as somebody changed it since."""
    path = cache_dir / "kernels" / f"kernel_{source.hash[:24]}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source.text if text is None else text)
    return path


def wrong(source):
    """What somebody made of its text: every bound is one off."""
    return source.text.replace(">=", ">")


def belongs_to_another(folder, monkeypatch, user=54321):
    """All below a folder is another user's, for whoever asks: a test need not run as root."""
    real_stat, real_fstat = os.stat, os.fstat

    def changed(path, state):
        ours = str(path).startswith(str(folder))
        return os.stat_result((*state[:4], user, *state[5:10])) if ours else state

    def stat(path, *args, **kwargs):
        return changed(path, real_stat(path, *args, **kwargs))

    def fstat(handle):
        return changed(os.readlink(f"/proc/self/fd/{handle}"), real_fstat(handle))

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "fstat", fstat)
