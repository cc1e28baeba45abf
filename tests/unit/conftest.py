"""What tests share: the command line, and what the library logs."""

import logging

import pytest
from typer.testing import CliRunner

from flexattn.cli.app import app
from flexattn.records import layers
from flexattn.settings import override
from tests.forked import forking


@pytest.fixture
def nothing_shipped(monkeypatch):
    """Only the records that a test writes: those that ship change with every tuning."""
    monkeypatch.setattr(layers, "configs_folder", lambda: None)
    layers._memory.clear()
    yield
    layers._memory.clear()


@pytest.fixture
def flexattn(tmp_path, nothing_shipped):
    """Run the command line in this process; the user's directory is below tmp_path."""

    def call(*arguments, status=0):
        with override(cache_dir=tmp_path / "cache", cache=()):
            result = CliRunner().invoke(app, list(map(str, arguments)))
        assert result.exit_code == status, result.output
        return result

    return call


@pytest.fixture
def said(caplog):
    """What the library has logged so far, as a function."""
    caplog.set_level(logging.INFO, "flexattn")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture(scope="module")
def forked():
    """Workers and compilers are forked from this process: tests/forked.py."""
    with forking():
        yield
