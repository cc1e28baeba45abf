"""`python -m tests.torch_files FILE…`: torch's own tests of flex_attention, run with ours.

FILE is test_flex_attention.py or test_flex_decoding.py of a torch checkout, or an option of
pytest. What they compile is served by this library where it can be (`flexattn.install`), forward
and backward; what they call without a compile stays torch's, and is what ours is compared with.
The last line says who served how many nodes, of all of xdist's workers together.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest

import flexattn

_SERVED = "flexattn_served"
_of_workers: Counter[str] = Counter()


def pytest_sessionstart() -> None:
    """Before the modules of tests are imported, some of which compile as they are."""
    flexattn.install(eager=False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands its counts to the process that reports."""
    told = getattr(session.config, "workeroutput", None)
    if told is not None:
        told[_SERVED] = dict(flexattn.install(eager=False).served)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended; one that died has told nothing."""
    _of_workers.update(getattr(node, "workeroutput", {}).get(_SERVED, {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Who served."""
    served = flexattn.install(eager=False).served + _of_workers
    terminalreporter.write_line(f"served: {dict(served)}")


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "tests.torch_files", *sys.argv[1:]]))
