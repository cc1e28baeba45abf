"""Sources of exported kernels are served whole, for what they were rendered of, or not at all."""

from dataclasses import replace
from pathlib import Path

import pytest

from flexattn.catalogue import alibi, causal, softcap
from flexattn.errors import BuildError
from flexattn.kernels.choose.options import NONE
from flexattn.kernels.choose.registry import families
from flexattn.records.environment import _read, source_hash
from flexattn.runtime import build
from flexattn.runtime.build import Builder, Kernel, builder
from flexattn.runtime.dispatch import Dispatcher
from flexattn.runtime.kernel_store import Binary, KernelStore
from flexattn.settings import override
from flexattn.util.files import sealed, unsealed
from tests.problems import A100, H200, choices, problem

CAPPED = {"score_mod": softcap(30.0), "mask_mod": causal, "runs": True}


@pytest.fixture(autouse=True)
def fresh():
    builder().rendered.clear()
    yield
    builder().rendered.clear()


def best(wanted, device=H200):
    """What dispatch chooses, and its sources."""
    choice = next(choices(wanted, device, NONE))
    return choice, tuple(each for each in (choice.source, choice.combine) if each is not None)


def export(root, wanted, device=H200):
    choice, sources = best(wanted, device)
    KernelStore(root).write_sources(wanted.structure, choice.config, device, sources)
    for each in sources:
        binary = Binary(
            b"\x7fELF",
            name="kernel",
            arch=device.arch,
            shared=0,
            num_warps=4,
            parameters=1,
            maps=(),
        )
        KernelStore(root).write_binary(each, binary, "3.9.0")
    return choice, sources


def found(root, wanted, config, device=H200):
    return KernelStore(root).sources(wanted.structure, config, device)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_what_was_written_is_found(tmp_path, kind):
    wanted = problem(kind, **CAPPED)
    choice, sources = export(tmp_path, wanted)
    served = found(tmp_path, wanted, choice.config)
    assert served == tuple(
        replace(one, text=other.text) for one, other in zip(sources, served, strict=True)
    )
    assert len(sources) == (2 if kind == "decode" else 1)


def test_another_number_of_splits_is_the_same_source(tmp_path):
    """Exported with the splits of one batch, it was rendered anew for another's."""
    wanted = problem("decode", **CAPPED)
    choice, sources = export(tmp_path, wanted)
    (source, _) = found(tmp_path, wanted, replace(choice.config, num_splits=7))
    assert source.hash == sources[0].hash


def test_dispatch_renders_nothing_that_is_there(tmp_path, monkeypatch):
    wanted = problem(**CAPPED)
    _, (source,) = export(tmp_path, wanted)
    builder().rendered.clear()

    def render(*args):
        raise AssertionError("rendered")

    for family in families("prefill", H200):
        monkeypatch.setattr(family, "render", render)
    with override(binaries=tmp_path, mode="off"):
        found = next(choices(wanted, H200, NONE, stored=True)).source
        assert found == replace(source, text=found.text) and found.stored
        assert found.text.endswith(source.text[source.text.index("import triton") :])
        # Who compiles, as a tuner or warm() does, has what was rendered here.
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
    with monkeypatch.context() as here:
        here.setattr("flexattn.runtime.kernel_store.source_hash", lambda kind, hopper: "changed")
        assert found(tmp_path, wanted, choice.config) is None
    assert found(tmp_path, wanted, choice.config) is not None
    # Which arguments a kernel has is decided in a family's config too.
    read = Path.read_text
    for name in ("kernels/base/features.py", "mods/rules.py", "kernels/base/arguments.py"):
        with monkeypatch.context() as here:
            here.setattr(
                Path, "read_text",
                lambda p, n=name, **how: read(p, **how) + "x = 1\n" * str(p).endswith(n),
            )  # fmt: skip
            forget_sources()
            assert found(tmp_path, wanted, choice.config) is None, name
    forget_sources()
    assert found(tmp_path, wanted, choice.config) is not None


def forget_sources():
    source_hash.cache_clear()
    _read.cache_clear()


@pytest.mark.parametrize("fault", ["no binary", "a changed one", "a newer driver's"])
def test_a_source_whose_binary_is_refused_is_rendered(tmp_path, fault, monkeypatch):
    """It would have to be compiled, and what is compiled is what this process rendered."""
    wanted = problem(**CAPPED)
    _, (source,) = export(tmp_path, wanted)
    path = KernelStore(tmp_path).path(source, H200.arch)
    compiled = []

    def loaded(binary, index):
        raise BuildError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    def compiles(self, source, device, index):
        compiled.append(source)
        return Kernel(source, None, index)

    monkeypatch.setattr(build, "loaded", loaded)
    monkeypatch.setattr(Builder, "_compile", compiles)
    if fault == "no binary":
        path.unlink()
    elif fault == "a changed one":
        path.write_text(path.read_text().replace("num_warps", "num_warts"))
    text = tmp_path / "sources" / f"{source.hash}.py"
    text.write_text("raise SystemExit\n" + text.read_text())
    with override(binaries=tmp_path, mode="off"):
        choice = Dispatcher(Builder()).choose(wanted, H200, 0, NONE)
    assert [each.stored for each in compiled] == [False] == [choice.source.stored]
    assert "SystemExit" not in compiled[0].text


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


@pytest.mark.parametrize("kind", ["json", "py"])
def test_what_others_may_write_is_rendered(tmp_path, kind, caplog):
    """Who writes both files gives any text the hash that it needs."""
    wanted = problem(**CAPPED)
    choice, _ = export(tmp_path, wanted)
    for path in (tmp_path / "sources").glob(f"*.{kind}"):
        path.chmod(0o666)
    assert found(tmp_path, wanted, choice.config) is None
    assert "nobody else may write" in caplog.text and "the kernel is rendered" in caplog.text
