"""The environment of a record: what changes it, what does not, and that it is found once."""

from dataclasses import replace
from pathlib import Path

import pytest

from flexattn.device import cuda_driver, named
from flexattn.kernels.base.environment import templates_folder
from flexattn.records import environment as module
from flexattn.records.environment import (
    TEMPLATES,
    environment,
    serving_policy,
    source_hash,
    templates_of,
    unlisted,
)
from flexattn.records.record import SCHEMA, Policy, slug

A100, H200, MI300X = (named(name) for name in ("nvidia-a100", "nvidia-h200", "amd-mi300x"))


def test_the_fields_are_this_processs():
    import torch
    import triton

    found = environment("decode", H200)
    assert (found.schema, found.torch, found.triton) == (
        SCHEMA, str(torch.__version__), triton.__version__
    )  # fmt: skip
    assert (found.device, found.arch, found.num_sms) == ("nvidia-h200", "sm_90", 132)
    assert environment("decode", replace(H200, num_sms=78)).num_sms == 78
    assert (found.graph, found.cold_l2) == serving_policy("decode", H200) == (True, True)
    assert all(
        type(getattr(found, name)) in (str, int, bool) for name in type(found).__dataclass_fields__
    )


def test_a_kind_a_device_and_a_policy_have_folders_of_their_own():
    base = environment("decode", H200)
    warm = Policy(graph=False, cold_l2=False, rounds=3, min_ms=1.0)
    folders = {
        base.folder,
        environment("prefill", H200).folder,
        environment("decode", named("nvidia-h100")).folder,
        environment("decode", H200, warm).folder,
        *(replace(base, **{name: "x"}).folder for name in ("template", "triton", "torch")),
        replace(base, driver="x").folder,
    }
    assert len(folders) == 8
    more = replace(warm, rounds=99, min_ms=9.0)
    assert environment("decode", H200, warm) == environment("decode", H200, more)
    assert base.folder.startswith("nvidia-h200-") and base.differing(base) == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvidia-h200", "nvidia-h200"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("../../etc/passwd", "etc-passwd"),
        ("a\x00b/..", "a-b"),
        ("", "unnamed"),
        ("x" * 300, "x" * 64),
    ],
)
def test_a_devices_name_is_a_plain_file_name(name, expected):
    assert slug(name) == expected


def test_its_hash_is_found_once(monkeypatch):
    first = environment("prefill", H200)
    monkeypatch.setattr(module, "rendering", None)
    assert environment("prefill", H200) == first


class Driver:
    """Stands for libcuda: it counts what is asked of it and writes a version, or fails."""

    def __init__(self, version=0, status=0):
        self.number, self.status, self.asked = version, status, []

    def __getattr__(self, name):
        if name != "cuDriverGetVersion":
            raise AttributeError(name)

        def ask(at):
            self.asked.append(name)
            at._obj.value = self.number
            return self.status

        return ask


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (Driver(13000), "13"),
        (Driver(12080), "12"),
        (Driver(), ""),
        (Driver(13000, status=34), ""),  # the stub library of a toolkit
        (object(), ""),
    ],
    ids=["13.0", "12.8", "zero", "an_error", "not_a_driver"],
)
def test_the_driver_is_asked_for_its_version_and_nothing_else(monkeypatch, library, expected):
    monkeypatch.setattr(module.torch.version, "hip", None)
    monkeypatch.setattr(cuda_driver, "_cuda", lambda: library)
    assert module._driver() == expected
    if isinstance(library, Driver):
        assert library.asked == ["cuDriverGetVersion"]


def test_without_a_driver_there_is_no_version_and_no_error(monkeypatch):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(module.torch.version, "hip", None)
    monkeypatch.setattr(cuda_driver, "_cuda", missing)
    assert cuda_driver.version() == 0 and module._driver() == ""


def test_hip_has_its_own_version(monkeypatch):
    monkeypatch.setattr(module.torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(cuda_driver, "_cuda", None)
    assert module._driver() == "6"


def test_decode_depends_on_the_kernel_that_merges_its_splits(monkeypatch):
    plain = {kind: source_hash(kind, A100) for kind in ("prefill", "decode")}
    hashes = module.template_hash

    def changed(name):
        return "0" * 16 if "combine" in name else hashes(name)

    monkeypatch.setattr(module, "template_hash", changed)
    source_hash.cache_clear()
    assert source_hash("prefill", A100) == plain["prefill"]
    assert source_hash("decode", A100) != plain["decode"]
    source_hash.cache_clear()


# Those listed, and those of families that are not.
UNLISTED = [name for kind in ("prefill", "backward") for name in unlisted(kind, H200)]
EACH = (*TEMPLATES, *UNLISTED)
EVERY = {"prefill", "decode", "serving", "hopper", "amd"}


def changed_by(monkeypatch, name):
    """The kinds whose hash another line in a file makes another one; hopper: of prefill there."""

    def hashes():
        source_hash.cache_clear()
        module._read.cache_clear()
        found = {kind: source_hash(kind, A100) for kind in ("prefill", "decode", "serving")}
        return found | {
            "hopper": source_hash("prefill", H200), "amd": source_hash("decode", MI300X)
        }  # fmt: skip

    plain, read = hashes(), Path.read_text

    def changed(path, **how):
        return read(path, **how) + ("\nx = 1\n" if path == module._PACKAGE / name else "")

    assert (module._PACKAGE / name).exists()
    with monkeypatch.context() as here:
        here.setattr(Path, "read_text", changed)
        now = hashes()
    assert hashes() == plain
    return {kind for kind, found in plain.items() if now[kind] != found}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("kernels/paged_decode/engines.py", {"serving"}),
        ("kernels/paged_decode/reads.py", {"serving"}),
        ("kernels/paged_decode/merges.py", set()),
        ("kernels/paged_decode/family.py", set()),
        ("kernels/printers/interpreted_gluon.py", set()),
        ("kernels/block_mask/source.py", set()),
        ("kernels/printers/torch_printer.py", set()),
        ("kernels/printers/score_printer.py", EVERY),
        ("kernels/decay_skip/source.py", {"prefill", "hopper"}),
        ("kernels/hopper/config.py", {"hopper"}),
        ("kernels/hopper/merge_consumers.py", {"hopper"}),
        ("kernels/triton/config.py", {"prefill", "decode", "hopper", "amd"}),
        ("kernels/paged_decode/config.py", {"serving"}),
        ("runtime/launch.py", set()),
    ],
)
def test_a_change_makes_hints_of_the_records_that_it_concerns_alone(name, kinds, monkeypatch):
    """Once a change of what renders plans made hints of every record of prefill too."""
    assert changed_by(monkeypatch, name) == kinds


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("kernels/base/features.py", EVERY),
        ("kernels/base/config.py", EVERY),
        ("kernels/base/config.py", EVERY),
        ("mods/analysis/mask_form.py", EVERY),
        ("mods/simplify.py", EVERY),
        ("problem/problem.py", EVERY),
        ("gluon_api.py", {"hopper", "serving"}),
        ("kernels/hopper/config.py", {"hopper"}),
    ],
)
def test_what_a_renderer_imports_counts(name, kinds, monkeypatch):
    """Once files were listed by hand, and these were not: they changed kernels whose old records
    stayed hits.
    """
    assert changed_by(monkeypatch, name) == kinds


def test_what_a_device_can_do_counts():
    """Not the code that says it, nor the table of devices."""
    plain = source_hash("decode", A100)
    assert source_hash("decode", replace(A100, name="another")) == plain
    assert source_hash("decode", replace(A100, max_registers=128)) != plain
    assert source_hash("decode", replace(A100, arch="sm_70")) != plain, "it has no tanh"


@pytest.mark.parametrize("name", module.NO_TEXT)
def test_what_is_left_out_is_reached(name):
    """A module that no renderer reaches any more needs no reason to be left out."""
    others = {f"flexattn.{each}" for each in module.NO_TEXT if each != name}
    assert f"flexattn.{name}" in module.closure(module.roots_of(*EACH), others)


# Templates that no record's kernels are rendered of.
OF_NO_RECORD = {
    "block_mask/block_mask.py.jinja", "block_mask/chosen.py.jinja",
    "block_mask/by_key.py.jinja", "block_mask/mapped.py.jinja",
    "paged_decode/merge_states.py.jinja",
    "paged_decode/join.py.jinja", "paged_decode/merge_tree.py.jinja",
    "cache_append/cache_append.py.jinja", "cache_append/quantize.py.jinja",
    "hopper/row_tiles.py.jinja",
    "hopper/merge_parts.py.jinja",
    "blackwell/prefill.py.jinja",  # nobody has measured it
    # Its environments are those of neuron/plugin.py, which names its templates.
    "nki/prefill.py.jinja", "nki/decode.py.jinja", "nki/combine.py.jinja",
    "report/page.html.jinja", "report/script.js.jinja",
}  # fmt: skip


def test_every_template_is_some_kernels():
    known = {each for name in EACH for each in templates_of(name)}
    folder = templates_folder()
    texts = {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*.jinja")}
    included = {name for name in texts if any(f'"{name}"' in text for text in texts.values())}
    assert known | OF_NO_RECORD | included == set(texts)
    assert not known & OF_NO_RECORD
