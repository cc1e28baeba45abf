"""On a CPU torch's compiled kernel serves, in compiled graphs and for eager calls that repeat."""

import threading
from functools import partial

import pytest
import torch

import flexattn
from flexattn.catalogue import causal
from flexattn.errors import UnsupportedError
from flexattn.frontend import attention, install, on_cpu
from flexattn.frontend.compiled import lowering, node
from flexattn.settings import override
from tests.compiled import compiling
from tests.support import inputs


class Read(BaseException):
    """Ends a compile where somebody took a node."""


short = torch.linspace(-1, 1, 8)
NODES = {
    "a table": ({"score_mod": lambda s, b, h, i, j: s + short[h]}, {}, "torch"),
    "lse": ({"return_lse": True}, {}, "ours"),
    # Inductor's kernel raises for an index outside of a tensor, also where the mask removes it.
    "a removed read": ({"score_mod": lambda s, b, h, i, j: s + short[i - j]}, {}, "ours"),
    "checked": ({}, {"check": True}, "ours"),
    "float64": ({}, {}, "ours"),
}


@pytest.mark.parametrize("name", NODES)
def test_a_node_on_the_cpu_is_torchs(monkeypatch, name):
    """Ours was plain torch, 7 to 17 times slower than the kernel that it replaced."""
    from torch._inductor.lowering import lowerings

    more, settings, who = NODES[name]
    dtype = torch.float64 if name == "float64" else torch.bfloat16
    given = [x.to(dtype) for x in inputs(1, 2, 2, 40, 40, 16)]

    def took(who):
        def take(*_):
            raise Read(who)

        return take

    hop = torch.ops.higher_order.flex_attention
    monkeypatch.setitem(lowerings, hop, node._ours(took("torch"), lowering.lower, 6))
    monkeypatch.setattr(lowering, "printed", took("ours"))
    mask = flexattn.create_block_mask(causal, None, None, 40, 40, "cpu", 16)
    call = partial(flexattn.flex_attention, block_mask=mask, **more)
    with (
        override(**{"check": False} | settings), compiling(monkeypatch) as inductor,
        pytest.raises(Read, match=who), torch.no_grad(),
    ):  # fmt: skip
        inductor.compile(call)(*given)


class Repeated:
    """Eager calls with a setting on, Dynamo's graphs run as they are; `plain` counts our own."""

    def __init__(self, monkeypatch):
        self.plain, self.compile = 0, partial(torch.compile, backend="eager")
        self.run = attention._reference
        monkeypatch.setattr(attention, "_reference", self._counted)
        monkeypatch.setattr(torch, "compile", lambda fn, **more: self.compile(fn, **more))
        on_cpu.forget()

    def _counted(self, call):
        self.plain += 1
        return self.run(call)

    def call(self, *given, **more):
        """A call's result, and whether plain torch computed it; what it began is waited for."""
        before = self.plain
        with override(check=False, cpu_compile=True):
            found = flexattn.flex_attention(*given, **more)
        self.wait()
        return found, self.plain > before

    def wait(self):
        for thread in threading.enumerate():
            if thread.name == on_cpu.THREAD:
                thread.join()


@pytest.fixture
def repeated(monkeypatch):
    torch._dynamo.reset()
    yield Repeated(monkeypatch)
    on_cpu.forget()
    torch._dynamo.reset()


def test_a_call_that_repeats_is_compiled(repeated):
    """Also with mods and masks made anew; what is captured is read when the call runs."""
    q, k, v = inputs(2, 4, 2, 40, 40, 16)
    table = torch.linspace(-1, 1, 40)

    def layer(number, **more):
        def mod(score, b, h, q_idx, kv_idx):
            return score + number * table[kv_idx]

        def few(b, h, q_idx, kv_idx):
            return (q_idx >= kv_idx) & (q_idx > 7)

        mask = flexattn.create_block_mask(few, None, None, 40, 40, "cpu", 16)
        given = q, k, v, mod, mask, 0.3, True
        found, plain = repeated.call(*given, **more)
        with override(cpu_compile=False):
            wanted = flexattn.flex_attention(*given, **more)
        repeated.plain -= 1
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert not plain or more or not found[:, :, :8].any()
        return plain

    with torch.no_grad():
        assert all(layer(2) for _ in range(on_cpu.FIRST))
        assert not layer(2)
        table.mul_(-3)
        assert not layer(2)
        # What the guards of no compiled code hold for is plain torch's, and compiled later.
        assert layer(3)
        assert not layer(3)
        assert layer(2, return_lse=True)
        with torch.device("cpu"):
            assert layer(2)
    table.requires_grad_()
    assert layer(2) and layer(2)


def test_a_compile_that_fails_is_not_tried_again(repeated):
    """As without a C++ compiler."""
    tries = []

    def fails(fn, **more):
        tries.append(fn)
        raise RuntimeError("no compiler")

    repeated.compile = fails
    given = inputs(1, 2, 2, 9, 9, 16)
    with torch.no_grad():
        assert all(repeated.call(*given)[1] for _ in range(6))
    assert len(tries) == 1


def test_a_call_that_fails_in_compiled_code_is_plain_torchs(repeated):
    given = inputs(1, 2, 2, 9, 9, 16)
    with torch.no_grad():
        for _ in range(4):
            wanted, plain = repeated.call(*given)
        assert not plain
        ((_, known),) = on_cpu._known.items()
        known.run = lambda *_: 1 / 0
        for _ in range(2):
            found, plain = repeated.call(*given)
            assert plain and torch.allclose(found, wanted, atol=1e-6)


def test_nobody_waits_for_a_compile(repeated):
    """Two compiles at a time there are never; a call that would begin one goes on."""
    begun, end = threading.Event(), threading.Event()

    def waits(fn, **more):
        begun.set()
        end.wait(60)
        raise RuntimeError("the end")

    repeated.compile, wait = waits, repeated.wait
    repeated.wait = lambda: None
    with torch.no_grad():
        for length in (9, 11):
            given = inputs(1, 2, 2, length, length, 16)
            assert all(repeated.call(*given)[1] for _ in range(5))
    assert begun.wait(60)
    end.set()
    wait()


def test_off_is_off(repeated):
    given = inputs(1, 2, 2, 9, 9, 16)
    with torch.no_grad(), override(check=False, cpu_compile=False):
        for _ in range(5):
            flexattn.flex_attention(*given)
    assert repeated.plain == 5 and not list(on_cpu._known.items())


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on a device which this machine lacks."""

    where = "xpu"

    @property
    def device(self):
        return torch.device(self.where)


@pytest.mark.parametrize("where", ["xpu", "mps"])
def test_other_devices_are_torchs(monkeypatch, where):
    """They were refused, though torch's own function serves them."""
    monkeypatch.setattr(Elsewhere, "where", where)
    asked = []

    def theirs(q, k, v, **more):
        asked.append(more)
        return torch.zeros_like(q), more["return_aux"]

    monkeypatch.setattr(install, "torch_flex_attention", lambda: theirs)
    given = [x.as_subclass(Elsewhere) for x in inputs(1, 2, 2, 9, 9, 16)]
    assert flexattn.flex_attention(*given, scale=0.5).shape == (1, 2, 9, 16)
    assert [each["scale"] for each in asked] == [0.5]
    assert where in flexattn.explain(*given).why
    with pytest.raises(UnsupportedError, match="no dropout"):
        flexattn.flex_attention(*given, dropout_p=0.5)
