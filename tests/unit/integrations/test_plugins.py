"""Entry points: what vLLM and SGLang call wherever the package is installed."""

import logging
import re
from importlib.metadata import EntryPoint

import pytest

from flexattn.integrations import plugins
from tests.contracts import imported, sglang, vllm
from tests.processes import ROOT

NAME = "flexattn.integrations.plugins"
BACKEND = "flexattn.integrations.vllm.FlexattnBackend"


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_the_groups_name_functions_of_ours(group):
    text = (ROOT / "pyproject.toml").read_text()
    named = re.search(rf'entry-points\."{re.escape(group)}"\]\nflexattn = "(.+)"', text)
    found = EntryPoint("flexattn", named[1], group).load()
    assert found in (plugins.register_vllm, plugins.register_sglang)
    assert found.__name__.endswith(group.partition(".")[0])


@pytest.mark.parametrize(("path", "said"), [(None, 0), (BACKEND, 0), ("another.Backend", 1)])
def test_vllm_has_it_as_custom_where_nobody_else_has(monkeypatch, caplog, path, said):
    modules = vllm.modules(path=path)
    found = imported(monkeypatch, modules, NAME)
    with caplog.at_level(logging.WARNING, "flexattn"):
        found.register_vllm()
        assert len(caplog.messages) == said
        found.register_vllm()
    registry = modules["vllm.v1.attention.backends.registry"]
    assert registry.AttentionBackendEnum.path == (path or BACKEND)


@pytest.mark.parametrize("registry", [False, True])
def test_a_vllm_without_backends_goes_on_without_it(monkeypatch, caplog, registry):
    modules = vllm.modules()
    if registry:
        modules["vllm.v1.attention.backends.registry"].AttentionBackendEnum = object()
    else:
        del modules["vllm.v1.attention.backends.registry"]
        modules["vllm.v1.attention.backends"].__path__ = []
    found = imported(monkeypatch, modules, NAME)
    with caplog.at_level(logging.WARNING, "flexattn"):
        found.register_vllm()
    assert "cannot be registered with this vLLM" in caplog.text


@pytest.mark.parametrize("version", sglang.KINDS)
def test_sglang_has_it_by_name(monkeypatch, version):
    modules = sglang.modules(version=version)
    found = imported(monkeypatch, modules, NAME)
    for _ in range(2):
        found.register_sglang()
    choices = modules[f"sglang.srt.{sglang.RELEASES[version].choices}"]
    for names in (
        choices.ATTENTION_BACKEND_CHOICES,
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        assert names.count("flexattn") == 1
    registry = modules["sglang.srt.layers.attention.attention_registry"]
    assert [*registry.ATTENTION_BACKENDS] == ["flexattn"]
