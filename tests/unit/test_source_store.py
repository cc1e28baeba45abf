"""Sources of exported kernels are served whole, for what they were rendered of, or not at all."""

from dataclasses import replace

import pytest

from flexattn import dispatch
from flexattn.binary import Binary
from flexattn.binary_store import Binaries
from flexattn.catalogue import alibi, causal, softcap
from flexattn.device import named
from flexattn.dispatch import choices
from flexattn.files import sealed, unsealed
from flexattn.options import NONE
from flexattn.settings import override, say_once
from flexattn.source_store import Sources
from tests.problems import problem

H200, A100 = named("nvidia-h200"), named("nvidia-a100")
CAPPED = {"score_mod": softcap(30.0), "mask_mod": causal, "runs": True}


@pytest.fixture(autouse=True)
def fresh():
    say_once.cache_clear()
    dispatch._rendered.cache_clear()
    yield
    dispatch._rendered.cache_clear()


def best(wanted, device=H200):
    """What dispatch chooses, and its sources."""
    choice = next(choices(wanted, device, NONE))
    return choice, tuple(each for each in (choice.source, choice.combine) if each is not None)


def export(root, wanted, device=H200):
    choice, sources = best(wanted, device)
    Sources(root).write(wanted.structure, choice.config, device, sources)
    for each in sources:
        binary = Binary(b"\x7fELF", "kernel", device.arch, 0, 4, 1, ())
        Binaries(root).write(each, binary, "3.9.0")
    return choice, sources


def found(root, wanted, config, device=H200):
    return Sources(root).find(wanted.structure, config, device)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_what_was_written_is_found(tmp_path, kind):
    wanted = problem(kind, **CAPPED)
    choice, sources = export(tmp_path, wanted)
    assert found(tmp_path, wanted, choice.config) == sources
    assert len(sources) == (2 if kind == "decode" else 1)


def test_dispatch_renders_nothing_that_is_there(tmp_path, monkeypatch):
    wanted = problem(**CAPPED)
    _, (source,) = export(tmp_path, wanted)
    dispatch._rendered.cache_clear()

    def render(*args):
        raise AssertionError("rendered")

    monkeypatch.setattr(dispatch, "render", render)
    with override(binaries=tmp_path, mode="off"):
        assert next(choices(wanted, H200, NONE)).source == source
    dispatch._rendered.cache_clear()
    with pytest.raises(AssertionError, match="rendered"):
        next(choices(wanted, H200, NONE))


OTHERS = {
    "another mod": problem(score_mod=softcap(31.0), mask_mod=causal, runs=True),
    "captured tensors": problem(score_mod=alibi(32, "cpu"), mask_mod=causal, runs=True),
    "lists": problem(score_mod=softcap(30.0), mask_mod=causal),
    "statistics": problem(**CAPPED, lse=False),
    "another head": problem(**CAPPED, D=64),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_structure_is_rendered(tmp_path, name):
    choice, _ = export(tmp_path, problem(**CAPPED))
    assert found(tmp_path, OTHERS[name], choice.config) is None


def test_another_config_device_or_renderer_is_rendered(tmp_path, monkeypatch):
    wanted = problem(**CAPPED)
    choice, _ = export(tmp_path, wanted)
    other = replace(choice.config, num_stages=choice.config.num_stages + 1)
    assert found(tmp_path, wanted, other) is None
    assert found(tmp_path, wanted, choice.config, A100) is None
    monkeypatch.setattr("flexattn.source_store.source_hash", lambda kind, hopper: "changed")
    assert found(tmp_path, wanted, choice.config) is None


def test_a_source_without_its_binary_is_rendered(tmp_path):
    """Its text would have to be compiled, and what is compiled is what this process rendered."""
    wanted = problem(**CAPPED)
    choice, (source,) = export(tmp_path, wanted)
    Binaries(tmp_path).path(source, H200.arch).unlink()
    assert found(tmp_path, wanted, choice.config) is None


@pytest.mark.parametrize("fault", ["text", "no text", "argument", "hash", "schema", "checksum"])
def test_what_is_not_sound_is_rendered_and_said(tmp_path, fault, caplog):
    wanted = problem(**CAPPED)
    choice, (source,) = export(tmp_path, wanted)
    text = tmp_path / "sources" / f"{source.hash}.py"
    (index,) = (tmp_path / "sources").glob("*.json")
    told = unsealed(index.read_bytes())
    match fault:
        case "text":
            text.write_text(source.text.replace("BLOCK_N", "BLOCK_O"))
        case "no text":
            text.unlink()
        case "argument":
            told["sources"][0]["arguments"][0]["divisible_by"] = 4
        case "hash":
            told["sources"][0]["hash"] = "../../elsewhere"
        case "schema":
            told["schema"] = 99
        case _:
            index.write_text(index.read_text().replace("num_warps", "num_warts"))
    if fault in ("argument", "hash", "schema"):
        index.write_text(sealed(told))
    assert found(tmp_path, wanted, choice.config) is None
    assert "the kernel is rendered" in caplog.text
