"""Machine code is loaded only whole, for this source and this GPU, and from where one said."""

import dataclasses
import hashlib
import os
import threading
from types import SimpleNamespace

import pytest

from flexattn.errors import BuildError
from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.base.source import Source
from flexattn.runtime import build
from flexattn.runtime.build import Builder
from flexattn.runtime.kernel_store import Binary, KernelStore, TensorMap, binary_of
from flexattn.settings import override
from flexattn.util.files import sealed, unsealed
from tests.problems import A100, H200
from tests.stored_kernels import belongs_to_another

BOX = TensorMap((1, 1, 128, 64), 3)
CODE = b"\x7fELF" + bytes(range(256))
BINARY = Binary(
    CODE,
    name="kernel",
    arch="sm_90",
    shared=1024,
    num_warps=4,
    parameters=12,
    maps=(BOX,),
)
ARGUMENTS = (Argument("Q", "tensordesc<bf16[1, 1, 128, 64]>"), Argument("sm_scale", "fp32"))
SOURCE = Source("import triton\n", hashlib.sha256(b"text").hexdigest(), ARGUMENTS, 4, 2)


@pytest.fixture
def root(tmp_path):
    KernelStore(tmp_path).write_binary(SOURCE, BINARY, "3.9.0")
    return tmp_path


def told(binary):
    return [getattr(binary, field.name) for field in dataclasses.fields(binary)]


def test_what_was_written_is_found(root):
    assert told(KernelStore(root).binary(SOURCE, H200)) == told(BINARY)
    assert sorted(p.parent.name for p in root.rglob("*.*")) == ["binaries", "kernels"]


@pytest.mark.parametrize("why", ["another template", "another arch", "an empty folder"])
def test_what_is_not_there_is_said_once(root, why, caplog):
    other = dataclasses.replace(SOURCE, hash=hashlib.sha256(b"changed").hexdigest())
    store = KernelStore(root / "nothing" if why == "an empty folder" else root)
    source, device = (other, H200) if why == "another template" else (SOURCE, A100)
    for _ in range(2):
        assert store.binary(source, device) is None
    assert len(caplog.records) == 1 and "it is compiled" in caplog.text


def described(root):
    (path,) = (root / "kernels").iterdir()
    return path


def code(root):
    (path,) = (root / "binaries").iterdir()
    return path


def change(**fields):
    def damage(root):
        path = described(root)
        path.write_text(sealed({**unsealed(path.read_bytes()), **fields}))

    return damage


def linked(path):
    os.rename(path, path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def instead(path, make):
    path.unlink()
    make(path)


def swapped(root):
    """Sound code of another kernel under this one's name."""
    digest = hashlib.sha256(CODE + b"1").hexdigest()
    (root / "binaries" / f"{digest}.cubin").write_bytes(b"\x7fELF1")
    change(sha256=digest, size=5)(root)


def no_elf(root):
    digest = hashlib.sha256(b"#!/bin/sh").hexdigest()
    (root / "binaries" / f"{digest}.cubin").write_bytes(b"#!/bin/sh")
    change(sha256=digest, size=9)(root)


DAMAGE = {
    "code cut": lambda r: code(r).write_bytes(CODE[:-1]),
    "code longer": lambda r: code(r).write_bytes(CODE + b"0"),
    "code changed": lambda r: code(r).write_bytes(CODE[:-1] + b"!"),
    "code gone": lambda r: code(r).unlink(),
    "code a link": lambda r: linked(code(r)),
    "code a pipe": lambda r: instead(code(r), os.mkfifo),
    "code of another": swapped,
    "no machine code": no_elf,
    "description cut": lambda r: described(r).write_bytes(described(r).read_bytes()[:-30]),
    "description changed": lambda r: described(r).write_text(
        described(r).read_text().replace("1024", "1025")
    ),
    "description a link": lambda r: linked(described(r)),
    "description a folder": lambda r: instead(described(r), os.mkdir),
    "a path": change(sha256="../../../../etc/passwd"),
    "an absolute path": change(sha256="/etc/passwd"),
    "upper case": change(sha256=hashlib.sha256(CODE).hexdigest().upper()),
    "a schema to come": change(schema=3),
    "the schema before": change(schema=1),
    "another source": change(source="0" * 64),
    "another arch": change(arch="sm_80"),
    "too many warps": change(num_warps=64),
    "a number as text": change(num_warps="4"),
    "a truth for a number": change(num_warps=True),
    "a negative number": change(shared=-1),
    "too much shared memory": change(shared=2**30),
    "no parameters": change(parameters=0),
    "a name that is none": change(name="kernel; rm"),
    "no descriptors": change(maps=[]),
    "a box too large": change(maps=[{"block": [1, 1, 512, 64], "swizzle": 3}]),
    "a box of three": change(maps=[{"block": [1, 128, 64], "swizzle": 3}]),
    "a swizzle too large": change(maps=[{"block": [1, 1, 128, 64], "swizzle": 9}]),
    "a field too many": change(hook="os.system"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_sound_is_a_miss_and_said(root, damage, caplog):
    DAMAGE[damage](root)
    assert KernelStore(root).binary(SOURCE, H200) is None
    assert len(caplog.records) == 1 and "compiled" in caplog.text


def compiled(**changes):
    metadata = SimpleNamespace(
        name="kernel", shared=1024, num_warps=4, global_scratch_size=0,
        profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=False,
        tensordesc_meta=[{"block_size": [1, 1, 128, 64], "swizzle": 3, "elem_size": 2}],
    )  # fmt: skip
    vars(metadata).update(changes)
    ptx = ".visible .entry kernel(\n.param .u64 a,\n.param .align 64 .b8 b[128]\n)\n.param"
    return SimpleNamespace(metadata=metadata, asm={"ptx": ptx, "cubin": CODE})


def test_a_binary_of_what_triton_compiled():
    assert told(binary_of(compiled(), "sm_90")) == [
        "kernel",
        "sm_90",
        1024,
        4,
        2,
        (BOX,),
        False,
        CODE,
    ]
    assert binary_of(compiled(tensordesc_meta=None), "sm_90").maps == ()


@pytest.mark.parametrize(
    "special",
    [
        {"global_scratch_size": 8}, {"profile_scratch_size": 8},
        {"launch_cooperative_grid": True}, {"launch_pdl": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_only_triton_launches_is_no_binary(special):
    assert binary_of(compiled(**special), "sm_90") is None


class TestBuilder:
    """The builder asks the directory that the settings name, and no other."""

    @pytest.fixture(autouse=True)
    def no_gpu(self, monkeypatch):
        self.loads, self.compiles = [], []
        monkeypatch.setattr(build, "loaded", lambda binary, index: self.loads.append(binary))
        monkeypatch.setattr(Builder, "_compile", lambda *args: self.compiles.append(args))

    def test_loads_instead_of_compiling(self, root):
        builder = Builder()
        with override(binaries=root):
            kernel = builder.kernel(SOURCE, H200, 0)
        assert told(kernel.binary) == told(BINARY) and kernel.shared_memory == 1024
        assert (builder.loaded, len(self.loads), self.compiles) == (1, 1, [])

    def test_without_a_directory_it_compiles(self, root):
        with override(cache_dir=root, cache=(root,)):
            Builder().kernel(SOURCE, H200, 0)
        assert len(self.compiles) == 1 and not self.loads

    def test_what_was_begun_is_waited_for_with_the_settings_of_who_began_it(self, root):
        builder = Builder()
        with override(binaries=root):
            builder.begin(SOURCE, H200, 0)
        for thread in threading.enumerate():
            if thread.name.startswith("kernel_"):
                thread.join(10)
        kernel = builder.kernel(SOURCE, H200, 0)
        assert told(kernel.binary) == told(BINARY)
        builder.begin(SOURCE, H200, 0)
        assert (builder.loaded, self.compiles) == (1, [])

    def test_triton_is_hashed_before_threads_compile(self, root, monkeypatch):
        """Each of them read all 400 MB of it, and lost its turn in Python after every megabyte."""
        hashed = []
        monkeypatch.setattr(
            "triton.runtime.cache.triton_key", lambda: hashed.append(threading.current_thread())
        )
        with override(binaries=root):
            Builder().begin(SOURCE, H200, 0)
        assert hashed == [threading.current_thread()]

    def test_what_failed_when_it_was_begun_fails_where_it_is_asked_for(self, monkeypatch):
        def fails(*args):
            raise BuildError("no", "it compiles", "report it")

        monkeypatch.setattr(Builder, "_compile", fails)
        builder = Builder()
        builder.begin(SOURCE, H200, 0)
        with pytest.raises(BuildError):
            builder.kernel(SOURCE, H200, 0)

    def test_a_driver_that_refuses_is_a_miss(self, root, monkeypatch, caplog):
        def refuse(binary, index):
            raise BuildError("cuModuleLoadData failed: CUDA_ERROR_NO_BINARY_FOR_GPU")

        monkeypatch.setattr(build, "loaded", refuse)
        with override(binaries=root):
            Builder().kernel(SOURCE, H200, 0)
        assert len(self.compiles) == 1 and "NO_BINARY_FOR_GPU" in caplog.text


def writable(path, monkeypatch):
    path.chmod(0o664)


@pytest.mark.parametrize("of", [described, code])
@pytest.mark.parametrize("change", [writable, belongs_to_another])
def test_code_that_others_could_have_changed_is_not_loaded(root, of, change, monkeypatch, caplog):
    """Its sha256 stands in a file beside it, which the same people could have changed."""
    change(of(root), monkeypatch)
    assert KernelStore(root).binary(SOURCE, H200) is None
    assert "nobody else may write" in caplog.text and "kernel is compiled" in caplog.text
