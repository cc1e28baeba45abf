"""Packed sequences from their lengths to their outputs: rows listed and merged, and attention."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import flexattn
import flexattn.frontend.packed as engine
import flexattn.runtime.ragged as packed
from flexattn.catalogue import alibi, causal, sliding_window
from flexattn.device import detect
from flexattn.kernels.hopper import ragged
from flexattn.mods import bind
from flexattn.runtime.build import DESCRIPTOR, Builder, builder
from flexattn.runtime.outcomes import memory
from flexattn.settings import override
from flexattn.util.locks import Lru
from tests.emulated_memory import Descriptor, Number, Pointer
from tests.emulated_prefill import run
from tests.launches import Recorded
from tests.packs import alone, assert_right
from tests.problems import H200

TARGET = replace(H200, num_sms=3)


class Emulated(Recorded):
    """Hopper's kernel on tensors of the CPU, whose strides are those of its descriptors."""

    compiled = binary = None
    shared_memory = 0

    def launch(self, stream, given):
        super().launch(stream, given)
        told = self.launched[-1]
        arrays = {}

        def array(x):
            """The memory of a tensor in float32 or int64, from its first number on."""
            size = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
            whole = x.detach().as_strided((size,), (1,))
            if x.data_ptr() not in arrays:
                arrays[x.data_ptr()] = (whole.float() if x.is_floating_point() else whole).numpy()
            return arrays[x.data_ptr()]

        values = {}
        for each in self.source.arguments:
            value, described = told[each.name], DESCRIPTOR.match(each.type)
            if described:
                box, flat = self.boxes[each.name], array(value)
                strides = [4 * step for step in box.strides]
                view = np.lib.stride_tricks.as_strided(flat, box.shape, strides)
                block = tuple(map(int, described["shape"].split(",")))
                value = Descriptor(view, block, 2)
            elif isinstance(value, torch.Tensor):
                value = Pointer(array(value))
            elif type(value) is int:
                value = Number(value)
            values[each.name] = value
        run(self.source, self.programs, values)
        for name in ("OUT", "LSE", "WORKSPACE", "COUNTER"):
            if told.get(name) is not None:
                told[name].view(-1).copy_(torch.from_numpy(arrays[told[name].data_ptr()]))


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    """Kernels are made for a small Hopper, one emulated and the others interpreted."""
    plain = ragged.ragged_defaults

    def emulable(problem, device):
        for each in plain(problem, device):
            yield replace(each, merge_consumers=False, lazy_rescale=False)

    class Emulating(Builder):
        def kernel(self, source, target, index):
            if source.language == "gluon":
                return Emulated(source)
            return builder().kernel(source, target, -1)

    # Inline assembly is not interpreted.
    here = replace(detect(torch.device("cpu")), num_sms=TARGET.num_sms)
    for name in ("render_row_tiles", "render_merge_parts"):
        plain_render = getattr(ragged, name)
        monkeypatch.setattr(
            packed, name, lambda form, config, _, render=plain_render: render(form, config, here)
        )
    monkeypatch.setattr(ragged, "ragged_defaults", emulable)
    monkeypatch.setattr(packed, "builder", Emulating)
    # A launch of another test's emulated kernel would serve the same call here.
    monkeypatch.setattr("flexattn.frontend.launch_cache.launches", Lru(64))


def numbers(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def launch_of(q, k, v, sequences, score_mod=None, mask_mod=causal, sinks=None):
    score, mask = bind(score_mod, "score"), bind(mask_mod, "mask")
    problem = packed.packed_problem(
        q, k, v, sequences, score, mask, lse=True, positive_scale=True, sinks=sinks is not None
    )
    launch = packed.prepare_packed(problem, TARGET, q.device, q, k, v)
    rest = launch.rest_of(None, score, mask)
    attend = partial(launch.run, q, k, v, scale=0.1, rest=rest, sinks=sinks)
    attend.choice = launch.choice
    return attend


def right(q, k, v, cu_q, cu_k, mask_mod=causal, **mods):
    """(out, lse) in float64; rows and keys behind the last sequence are one more."""
    whole = (torch.cat((cu, torch.tensor([len(x)]))) for cu, x in ((cu_q, q), (cu_k, k)))
    out, lse = alone(q, k, v, *whole, mask_mod=mask_mod, scale=0.1, **mods)
    return out, lse.T


def check(got, wanted, rounding=2**-8):
    """The output alone is rounded."""
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=rounding, atol=1e-5)
    torch.testing.assert_close(got[1].double(), wanted[1], rtol=1e-5, atol=1e-5)


def made(total_q, total_k, heads=(4, 2), dims=(64, 64)):
    torch.manual_seed(0)
    (Hq, Hkv), (D, Dv) = heads, dims
    shapes = (total_q, Hq, D), (total_k, Hkv, D), (total_k, Hkv, Dv)
    return [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]


ASKED = {
    "causal": {},
    "no mask": {"mask_mod": None},
    "window": {"mask_mod": sliding_window(40)},
    "alibi": {"score_mod": alibi(4, "cpu")},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
}


@pytest.mark.parametrize("asked", ASKED)
def test_lengths_change_in_one_launch(asked):
    """New lengths in the same tensors, with rows behind the last one or without."""
    q, k, v = made(300, 300)
    attend = launch_of(q, k, v, 4, **ASKED[asked])
    for lengths in ([130, 1, 99, 70], [0, 300, 0, 0], [20, 30, 0, 40]):
        cu = numbers(lengths)
        check(attend(cu, cu), right(q, k, v, cu, cu, **ASKED[asked]))


@pytest.mark.parametrize("lengths", [[702], [330]])
def test_long_sequences_of_narrow_heads_have_three_consumers(lengths):
    q, k, v = made(702, 702, heads=(2, 1))
    attend = launch_of(q, k, v, 1)
    assert attend.choice.config.consumers == 3
    cu = numbers(lengths)
    check(attend(cu, cu), right(q, k, v, cu, cu))


def test_keys_and_queries_of_other_lengths():
    q, k, v = made(150, 700, dims=(80, 48))
    attend = launch_of(q, k, v, 3)
    for q_lens, k_lens in (([30, 70, 50], [500, 20, 180]), ([1, 0, 149], [0, 600, 100])):
        cu_q, cu_k = numbers(q_lens), numbers(k_lens)
        check(attend(cu_q, cu_k), right(q, k, v, cu_q, cu_k))


def test_few_rows_of_many_keys_are_merged():
    q, k, v = made(20, 2100, heads=(2, 1))
    attend = launch_of(q, k, v, 2, mask_mod=None)
    assert attend.choice.config.splits
    cu_q, cu_k = numbers([13, 7]), numbers([2000, 100])
    # The interpreter, which merges, cuts off what bfloat16 does not hold.
    check(attend(cu_q, cu_k), right(q, k, v, cu_q, cu_k, mask_mod=None), 2**-7)


def test_heads_side_by_side_in_memory():
    """q, k and v are columns of one tensor, as a projection leaves them."""
    joint = torch.randn(140, 8, 64, dtype=torch.bfloat16)
    q, k, v = joint[:, :4], joint[:, 4:6], joint[:, 6:]
    cu = numbers([70, 41, 29])
    check(launch_of(q, k, v, 3)(cu, cu), right(q, k, v, cu, cu))


def test_what_is_not_served():
    q, k, v = (x.float() for x in made(30, 30))
    problem = packed.packed_problem(
        q, k, v, 1, None, None, lse=False, positive_scale=True, sinks=False
    )
    assert packed.prepare_packed(problem, TARGET, q.device, q, k, v) is None


@pytest.fixture
def is_served(monkeypatch):
    """Tensors of the CPU count as those of the small Hopper; the launches that are made."""
    made = []

    def prepared(*given):
        made.append(packed.prepare_packed(*given))
        return made[-1]

    monkeypatch.setattr(engine, "is_readable", lambda *given: True)
    monkeypatch.setattr(engine, "detect", lambda _: TARGET)
    monkeypatch.setattr(engine, "prepare_packed", prepared)
    with override(verify="first", check=False):
        yield made


@pytest.mark.parametrize("asked", ["causal", "window", "mask", "score"])
def test_varlen_attn(is_served, asked):
    """The first launch is judged by the document mask of the same call, and new lengths go on."""
    given = {
        "causal": {"causal": True},
        "window": {"window": (40, 0)},
        "mask": {"causal": True, "mask_mod": lambda b, h, q, k: (q - k) % 3 != b % 3},
        "score": {"causal": True, "score_mod": lambda s, b, h, q, k: s + (k - q) / 64 + b},
    }[asked]
    mods = {name: mod for name, mod in given.items() if "mod" in name}
    left, right = given.get("window", (-1, 0))
    q, k, v = made(200, 200)
    for lengths in ([70, 1, 129], [20, 100, 80]):
        cu = numbers(lengths)
        out, lse = flexattn.varlen_attn(q, k, v, cu, cu, scale=0.1, return_lse=True, **given)
        wanted = alone(q, k, v, cu, cu, left=left, right=right, scale=0.1, **mods)
        check((out, lse), wanted)
    (launch,) = is_served
    assert all(memory().verified(each, TARGET) for each in launch.kernel_sources)


def test_what_takes_the_document_mask(is_served):
    """Of other keys the last query stands at the last one, which the kernel does not know."""
    q, k, v = made(60, 70)
    cu_q, cu_k = numbers([40, 20]), numbers([20, 50])
    out = flexattn.varlen_attn(q, k, v, cu_q, cu_k, causal=True)
    assert_right((out, None), q, k, v, cu_q, cu_k, right=0)
    flexattn.varlen_attn(q, k, v, cu_q, cu_k, kernel_options={"BACKEND": "TRITON"})
    assert not is_served
