"""No test leaves the GPU hanging: one that takes too long ends the process, and so its kernels."""

import os

import pytest

from bench.time_limit import time_limit

# Of a test with its fixtures; a mark `timeout` says another.
SECONDS = 300


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    mark = item.get_closest_marker("timeout")
    seconds = mark.args[0] if mark else SECONDS
    # The stderr that people read, which pytest has put something else in place of.
    with item.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        stderr = os.fdopen(os.dup(2), "w")
    with stderr, time_limit(seconds, stderr):
        return (yield)
