"""What the driver is handed: every argument where the kernel's parameters point, packed once."""

import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch

from flexattn.device import cuda_driver
from flexattn.errors import BuildError, InputError
from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.base.binding import bind_arguments
from flexattn.kernels.printers.spelling import signature_type
from flexattn.problem.serving import KV_DTYPES
from flexattn.runtime.cuda_launch import CudaLaunch
from flexattn.runtime.kernel_store import Binary, TensorMap
from flexattn.runtime.launch import DescriptorBox, box_of

BOX = DescriptorBox((2, 3, 40, 64), (7680, 2560, 64, 1))
FORMATS = {"i32": "i", "i64": "q", "fp32": "f", "fp64": "d"}


class Driver:
    """Stands for libcuda: it reads each launch's parameters as the GPU would."""

    def __init__(self, types):
        self.types, self.seen, self.maps, self.fails = types, [], [], []

    def launch(self, config, function, params, extra):
        if self.fails:
            return self.fails.pop()
        assert function == 42 and extra is None
        config = cuda_driver.LaunchConfig.from_address(config)
        assert config.shared == 100 and bool(config.attributes) == config.count
        early = config.count and cuda_driver.LaunchAttribute.from_address(config.attributes)
        found = []
        count = sum(9 if kind[0] == "t" else 1 for kind in self.types) + 2
        pointers = iter((ctypes.c_void_p * count).from_address(params))
        for kind in self.types:
            at = next(pointers)
            if kind[0] == "t":
                box = [
                    struct.unpack("q", ctypes.string_at(next(pointers), 8))[0] for _ in range(8)
                ]
                assert at % 128 == 0
                found.append(box)
            else:
                form = FORMATS.get(kind, "Q")
                raw = ctypes.string_at(at, struct.calcsize(form))
                found.append(struct.unpack(form, raw)[0])
        scratch = [ctypes.string_at(next(pointers), 8) for _ in range(2)]
        assert scratch == [bytes(8)] * 2 and next(pointers, None) is None
        grid, block = tuple(config.grid), tuple(config.block)
        stream = config.stream or 0
        self.seen.append(
            SimpleNamespace(grid=grid, block=block, stream=stream, args=found, early=early)
        )
        return 0

    def encode(self, at, element, address, shape, strides, block, swizzle):
        self.maps.append((element, address, shape, strides, block, swizzle))
        return 0


@pytest.fixture
def drive(monkeypatch):
    def make(types, fixed, boxes=(), maps=(), parameters=None, order=1, **more):
        driver = Driver(types)
        # As the driver's function: of C, and without argtypes.
        driver.entry = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(driver.launch)
        launch = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.cast(driver.entry, ctypes.c_void_p).value)
        monkeypatch.setattr(cuda_driver, "launch_kernel", lambda: launch)
        monkeypatch.setattr(cuda_driver, "encode_descriptor", driver.encode)
        count = len(types) + 8 * len(boxes) + 2 if parameters is None else parameters
        binary = Binary(
            b"", name="kernel", arch="sm_90", shared=100, num_warps=4, parameters=count, maps=maps,
        )  # fmt: skip
        arguments = [Argument(f"a{i}", kind) for i, kind in enumerate(types)]
        names = [argument.name for argument in arguments]
        values = dict(zip(names, fixed, strict=True))
        kept = {name: value for name, value in values.items() if value is not None}
        given = [name for name in names if name not in kept][::order]
        found = [i for i, kind in enumerate(types) if kind[0] == "t"]
        described = {f"a{i}": box for i, box in zip(found, boxes, strict=False)}
        bound = bind_arguments(arguments, kept, given, described)
        # What a binary may have other than its source says.
        bound = bound._replace(boxes=bound.boxes + tuple(boxes[len(found) :]))
        return CudaLaunch(binary, 42, bound, 0, 6, **more), driver

    return make


def test_arguments_arrive_in_order(drive):
    types = ["*bf16", "i32", "fp32", "i64", "*fp32", "fp64", "fp32", "i32", "*i32"]
    launch, driver = drive(types, [None, -7, None, 2**40, 0, None, 0.5, None, None])
    first, second = torch.zeros(4), torch.zeros(5)
    launch.launch(9, [first, 0.25, 0.1, -3, second])
    launch.launch(9, [second, -1.5, 1e300, 2**31 - 1, first])
    a, b = first.data_ptr(), second.data_ptr()
    assert driver.seen[0].args == [a, -7, 0.25, 2**40, 0, 0.1, 0.5, -3, b]
    assert driver.seen[1].args == [b, -7, -1.5, 2**40, 0, 1e300, 0.5, 2**31 - 1, a]
    assert (driver.seen[0].grid, driver.seen[0].block, driver.seen[0].stream) == (
        (6, 1, 1),
        (128, 1, 1),
        9,
    )
    launch.launch(0, [first, 0.25, 0.1, -3, second])
    assert driver.seen[2].stream == 0


def test_a_kernel_that_waits_itself_may_begin_early(drive, monkeypatch):
    """Programmatic dependent launch, of drivers whose graphs hold it."""
    for version, known in ((12020, False), (12030, True)):
        monkeypatch.setattr(cuda_driver, "version", lambda version=version: version)
        launch, driver = drive(["i32"], [5], launch_pdl=True)
        launch.launch(0, [])
        early = driver.seen[0].early
        assert (early.id, early.value) == (6, 1) if known else not early
    launch, driver = drive(["i32"], [5])
    launch.launch(0, [])
    assert not driver.seen[0].early


def test_a_launch_may_pass_its_values_in_any_order(drive):
    """Each has the name of its argument: the order of either is nobody's business."""
    types = ["*bf16", "i32", "tensordesc<bf16[1, 1, 64, 64]>", "fp32", "*fp32"]
    maps = (TensorMap((1, 1, 64, 64), 3),)
    launch, driver = drive(types, [None, 7, None, None, None], [BOX], maps, order=-1)
    first, second, third = torch.zeros(4), torch.zeros(5), torch.zeros(6)
    launch.launch(9, [first, 0.25, second, third])
    box = [*BOX.shape, *BOX.strides]
    assert driver.seen[0].args == [third.data_ptr(), 7, box, 0.25, first.data_ptr()]
    assert driver.maps[0][1] == second.data_ptr()


def test_a_descriptor_is_encoded_when_its_address_changes(drive):
    types = ["tensordesc<bf16[1, 1, 64, 64]>", "*bf16", "i32"]
    launch, driver = drive(types, [None, None, 5], [BOX], (TensorMap((1, 1, 64, 64), 3),))
    q, other, out = (torch.zeros(8) for _ in range(3))
    for tensor in (q, q, other):
        launch.launch(0, [tensor, out])
    box = [*BOX.shape, *BOX.strides]
    assert [seen.args for seen in driver.seen] == [[box, out.data_ptr(), 5]] * 3
    assert [each[1] for each in driver.maps] == [q.data_ptr(), other.data_ptr()]
    assert driver.maps[0][0] == "bf16" and driver.maps[0][2:] == (*BOX, (1, 1, 64, 64), 3)


@pytest.mark.parametrize("shape", [(1, 1, 1, 100), (1, 1, 7, 104), (3, 1, 1, 96)], ids=str)
def test_a_box_has_strides_that_the_copy_engine_takes(shape):
    """Also for one key of one head, whose strides nobody steps along."""
    box = box_of(torch.zeros(shape, dtype=torch.bfloat16))
    assert box.shape == shape and box.strides[-1] == 1
    assert all(stride > 0 and stride % 8 == 0 for stride in box.strides[:-1])


@pytest.mark.parametrize(
    ("types", "fixed", "boxes", "parameters"),
    [
        (["*bf16", "i32"], [None, None], (), 5),
        (["*bf16"], [None], (BOX,), None),
        (["tensordesc<bf16[1, 1, 64, 64]>"], [None], (BOX,), None),
    ],
    ids=["one more parameter", "a box too many", "no tensor map"],
)
def test_another_calling_convention_is_refused(drive, types, fixed, boxes, parameters):
    with pytest.raises(BuildError, match="parameters"):
        drive(types, fixed, boxes, (), parameters)


def test_a_value_too_many_or_too_few_is_refused(drive):
    launch, driver = drive(["i32", "i32"], [None, None])
    for given in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match="values for 2 names"):
            launch.launch(0, given)
    assert not driver.seen


def test_a_size_past_32_bits_is_refused(drive):
    """Cut to its low half it would be a negative size, and every load out of range."""
    launch, driver = drive(["*bf16", "i32"], [None, None])
    with pytest.raises(InputError, match=str(2**31)):
        launch.launch(0, [torch.zeros(1), 2**31])
    assert not driver.seen


def test_only_what_does_not_fit_is_named(drive):
    """A stride of 64 bits beside it once was named as well."""
    launch, driver = drive(["i64", "*bf16", "i32", "fp32"], [None] * 4)
    with pytest.raises(InputError, match=rf"value {2**31 + 5}\n") as caught:
        launch.launch(0, [3 * 2**30, torch.zeros(1), 2**31 + 5, 0.5])
    assert str(3 * 2**30) not in str(caught.value) and not driver.seen


def test_a_thread_without_a_context_gets_torchs(drive, monkeypatch):
    launch, driver = drive(["i32"], [None])
    current = []
    monkeypatch.setattr(cuda_driver, "make_current", current.append)
    driver.fails = [cuda_driver.INVALID_CONTEXT]
    launch.launch(0, [1])
    assert current == [0] and len(driver.seen) == 1
    driver.fails = [700]
    with pytest.raises(BuildError, match="700"):
        launch.launch(0, [1])


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_the_copy_engine_knows_the_dtypes_of_caches(dtype, monkeypatch):
    """Of e5m2 it once knew nothing: a first run over such pages failed."""
    told = []

    class Library:
        def cuTensorMapEncodeTiled(self, *given):
            told.append(given)
            return 0

    monkeypatch.setattr(cuda_driver, "_cuda", Library)
    element = signature_type(KV_DTYPES[dtype])
    assert cuda_driver.encode_descriptor(0, element, 64, (5, 3), (48, 1), (8, 4), 0) == 0
    strides, box, steps = told[0][5:8]
    assert (list(strides), list(box), list(steps)) == ([48 * dtype.itemsize], [4, 8], [1, 1])
