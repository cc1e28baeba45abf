"""A headless Chromium that says what it made of a page."""

import json
import re
import shutil
import subprocess
from functools import lru_cache
from html import unescape
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
)
CONSOLE = re.compile(r"CONSOLE[^\]]*\] (.*)")


@lru_cache(maxsize=1)
def chromium():
    """The browser's path, on PATH or as playwright keeps it; None without one."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    kept = Path("~/.cache/ms-playwright").expanduser()
    own = sorted(kept.glob("chromium*/chrome-*/*hrome*shell")) + sorted(
        kept.glob("chromium*/chrome-linux*/chrome")
    )
    return found or next((str(path) for path in own if path.is_file()), None)


needs_chromium = pytest.mark.skipif(
    chromium() is None, reason="no Chromium: apt-get install chromium, or playwright's"
)


def opened(page, folder, *flags):
    """(the DOM as text, the lines of its console) once the page is loaded."""
    done = subprocess.run(
        [chromium(), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr",
         "--virtual-time-budget=4000", *flags, "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "</html>" in done.stdout, done.stderr[-2000:]
    return done.stdout, CONSOLE.findall(done.stderr)


def asked(page, folder, script, *flags, width=1280):
    """What an expression of JavaScript is worth in a loaded page that is `width` pixels wide.

    A window cannot be as narrow as a phone, a frame can. The question stands in a copy without
    the page's Content-Security-Policy, which would refuse it.
    """
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    question = (
        f"addEventListener('load', () => parent.postMessage(JSON.stringify({script}), '*'));"
    )
    copy = folder / f"asked-{page.name}"
    copy.write_text(text.replace("<head>", f"<head><script>{question}</script>"))
    frame = folder / f"frame-{page.name}"
    frame.write_text(
        "<!doctype html><html style='color-scheme: light dark'><script>"
        "const root = document.documentElement;"
        "addEventListener('message', (event) => { root.dataset.answer = event.data; });"
        "</script><style>iframe { border: 0 }</style>"
        f"<iframe src='{copy.name}' width='{width}' height='900'></iframe>"
    )
    dom, _ = opened(frame, folder, *flags)
    return json.loads(unescape(re.search(r'data-answer="([^"]*)"', dom).group(1)))
