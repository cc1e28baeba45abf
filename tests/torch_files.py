"""`python -m tests.torch_files FILE…`: torch's own tests of flex_attention, run with ours.

FILE is test_flex_attention.py or test_flex_decoding.py of a torch checkout, or an option of
pytest. What they compile is served by this library where it can be (`flexattn.install`), forward
and backward; what they call without a compile stays torch's, and is what ours is compared with.
The last line says who served how many nodes.
"""

from __future__ import annotations

import sys

import pytest

import flexattn


def pytest_sessionstart() -> None:
    """Before the modules of tests are imported, some of which compile as they are."""
    flexattn.install(eager=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Who served."""
    terminalreporter.write_line(f"served: {dict(flexattn.install(eager=False).served)}")


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "tests.torch_files", *sys.argv[1:]]))
